"""Schedules: which launches of a lowered graph may overlap; notes on its nodes that change nothing else."""
