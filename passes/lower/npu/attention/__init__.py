"""Lowering of attention, its caches and its indexers to Ascend's operators."""
