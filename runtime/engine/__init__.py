"""The engine: requests in, steps of the model, tokens out."""
