"""What operators see and change: plugins, MCP servers, work, workers, queues, costs, probes."""
