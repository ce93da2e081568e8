"""The engine behind a socket: messages, the process that runs it, and the client that asks it."""
