"""The graph engine's route: torchair converts a lowered graph, dynamic or static."""
