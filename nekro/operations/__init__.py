"""One function per use case: it takes an actor and typed arguments, and returns a model of the API.

HTTP routes, MCP tools and commands call these functions. Their names are the operation ids of the OpenAPI
document, and their docstrings its texts.
"""
