"""Reads GGUF files (llama.cpp): metadata as a config, blocks as stored weights, under transformers' names."""
