"""Tensors of the KV cache: their sizes, allocation, and copies of their blocks."""
