"""Reads checkpoints: configs, weights as they are stored, tokenizers; refuses what would be read wrongly."""
