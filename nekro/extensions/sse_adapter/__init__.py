"""Nekro Agent's SSE adapter protocol: programs that connect chats of other platforms."""
