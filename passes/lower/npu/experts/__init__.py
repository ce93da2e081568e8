"""Lowering of mixtures of experts to Ascend's operators."""
