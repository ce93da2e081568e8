"""One generation request from admission to response: prompts, submission, choices, streams."""
