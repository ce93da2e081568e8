"""From a rewritten graph to a Program: what its inputs receive, how its weights are packed."""
