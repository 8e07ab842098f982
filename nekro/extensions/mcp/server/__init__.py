"""The system as an MCP server: tools, resources and prompts, over HTTP (`/mcp`) and stdio.

Only ``endpoint``, ``callers`` and ``schemas`` may be imported without the MCP SDK, which is an extra.
"""
