"""Structured output: a request's constraint as a grammar that determines the allowed next tokens."""
