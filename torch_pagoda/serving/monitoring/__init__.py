"""Metrics under vLLM's names, log lines and traces, from one record per request."""
