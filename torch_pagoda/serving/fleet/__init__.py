"""Replicas of one model behind one address, started and restarted by Ray Serve."""
