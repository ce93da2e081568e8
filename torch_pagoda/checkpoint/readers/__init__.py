"""Readers of quantised checkpoints, a format in each file."""
