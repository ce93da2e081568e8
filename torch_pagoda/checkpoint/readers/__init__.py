"""Readers of quantised checkpoints, one format per file."""
