"""Lowering: canonical operators to a target's fastest ones."""
