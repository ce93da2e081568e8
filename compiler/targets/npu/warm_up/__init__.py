"""Warm-up of an NPU's graphs before requests come."""
