"""Profiling: records where the time of a run goes."""
