"""Compiled modules in memory: their contents, what forward reads, and changes."""
