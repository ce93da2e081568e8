"""Structured output: what a request asks for, as a grammar that says which tokens may come next."""
