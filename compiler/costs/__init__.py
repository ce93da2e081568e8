"""Estimates from shapes and configurations: bytes moved, operations, live memory, and memory for serving."""
