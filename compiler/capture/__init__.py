"""From a HuggingFace module to its graph: tracing, what is read off the module, layers that are alike."""
