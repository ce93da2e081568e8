"""The link of a rewritten graph with what its inputs receive: a Program, whose weights get packed."""
