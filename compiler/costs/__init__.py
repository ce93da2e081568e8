"""Estimates from shapes and configurations: bytes moved, operations, live memory, and what serving a model takes."""
