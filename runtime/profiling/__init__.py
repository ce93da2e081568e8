"""Records of where the time of a run went."""
