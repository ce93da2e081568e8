"""From logits to tokens: rules, draws, log-probabilities, beams."""
