"""The server: an OpenAI-compatible API in one process, the engine in another, a socket between them."""
