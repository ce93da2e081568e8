"""Modules that were compiled, as they are in memory: what they hold and read, and whether that has changed."""
