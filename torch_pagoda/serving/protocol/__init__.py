"""The server's routes, by subject: what comes in as pydantic models, what goes out as structs that msgspec writes."""
