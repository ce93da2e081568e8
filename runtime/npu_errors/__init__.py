"""Errors of an Ascend device: which ones end it, what they mean, what to do."""
