"""Questions to the engine and its answers: parameters, prompts, limits, outputs, text."""
