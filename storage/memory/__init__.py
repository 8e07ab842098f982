"""What the agent keeps of its chats: summaries of older messages, and variables of open turns."""
