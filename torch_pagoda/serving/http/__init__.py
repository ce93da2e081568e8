"""HTTP below the routes: OpenAI's error objects, API keys, limits on size and time, bodies."""
