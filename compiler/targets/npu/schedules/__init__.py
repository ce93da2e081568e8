"""Schedules of decode steps: the options, and their application to a graph."""
