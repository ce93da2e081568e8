"""How much memory a model takes, and how large its blocks are best."""
