"""Requests to the engine and its outputs: parameters, prompts, limits, text."""
