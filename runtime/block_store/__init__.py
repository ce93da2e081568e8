"""KV blocks outside of the process: entries, kinds of stores, prefetch, and writes behind the steps."""
