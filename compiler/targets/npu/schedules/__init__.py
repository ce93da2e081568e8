"""Schedules of decode steps: what users may ask for, and what it becomes in a graph."""
