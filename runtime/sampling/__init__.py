"""Sampling, from logits to tokens: rules, draws, log-probabilities, beams."""
