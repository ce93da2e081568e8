"""Lowering to a CPU: how weights are held, and products that do not depend on the batch."""
