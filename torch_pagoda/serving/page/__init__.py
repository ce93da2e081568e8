"""The chat page: static files, and markdown rendered in a process of its own."""
