"""Lowering: canonical operators to the ones that a target runs fastest."""
