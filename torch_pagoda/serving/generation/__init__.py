"""One request for text from admission to its answer: prompts, submission, choices, streams."""
