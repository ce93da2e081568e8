"""Reads checkpoints: configs, weights as stored, tokenizers; rejects checkpoints that it would read wrongly."""
