"""Schedules: which launches of a lowered graph run beside which; notes on its nodes that change nothing else."""
