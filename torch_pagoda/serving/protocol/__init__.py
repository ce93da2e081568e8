"""The server's routes by subject: requests as pydantic models, responses as msgspec structs."""
