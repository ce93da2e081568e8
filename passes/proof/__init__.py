"""Proofs on a graph that no operator mixes tokens of different sequences."""
