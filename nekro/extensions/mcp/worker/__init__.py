"""MCP servers in a worker: their plugins follow the declarations and listings."""
