"""Writing to a chat: messages, and events for connectors that deliver them."""
