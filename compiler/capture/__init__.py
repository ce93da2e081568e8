"""Captures a HuggingFace module as a graph: facts about it, tracing, and equal layers."""
