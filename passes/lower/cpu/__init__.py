"""Lowering to a CPU: the format of weights, and batch-invariant products."""
