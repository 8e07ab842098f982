"""Python client of the HTTP API; needs pydantic and httpx only."""
