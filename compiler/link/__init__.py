"""Links a rewritten graph with its inputs to a Program, and packs its weights."""
