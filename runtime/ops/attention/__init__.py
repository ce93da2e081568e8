"""Attention: paged, gathered and sparse; rotary embeddings; rows of int8 caches."""
