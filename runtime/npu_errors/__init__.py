"""Errors of an Ascend device: fatal ones, meanings, remedies."""
