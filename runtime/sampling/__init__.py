"""Sampling, from logits to tokens: logits processing, draws, log-probabilities, beam search."""
