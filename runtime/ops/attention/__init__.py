"""Attention: paged, by gathered keys and by chosen ones; rotary embeddings; rows of int8 caches."""
