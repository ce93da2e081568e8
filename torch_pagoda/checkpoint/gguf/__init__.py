"""Reads GGUF files, llama.cpp's: metadata as a config, blocks as stored weights, under the names of transformers."""
