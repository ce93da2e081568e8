"""The tensors of the KV cache: their sizes, their memory, copies of their blocks."""
