"""Tracing of a HuggingFace module, with what is read off it, and of its layers that are alike."""
