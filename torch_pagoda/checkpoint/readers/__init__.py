"""Readers of quantized checkpoints, one format per file."""
