"""Writing to a chat: messages, and events for whoever delivers them."""
