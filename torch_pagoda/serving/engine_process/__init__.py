"""The engine in a process of its own: messages, the engine process, and its client in the API process."""
