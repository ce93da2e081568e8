"""The graph engine's route: what torchair makes of a lowered graph, with sizes that vary or are fixed."""
