"""Speculative decoding: tokens that drafters propose, and how many of them a step verifies."""
