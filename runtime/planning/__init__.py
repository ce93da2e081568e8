"""Plans of memory: what a model takes, and the best size of its blocks."""
