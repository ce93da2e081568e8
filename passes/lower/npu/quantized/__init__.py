"""Lowering of products with quantized weights to Ascend's operators."""
