"""Building blocks of the passes: the traced graph, its nodes, regions and values."""
