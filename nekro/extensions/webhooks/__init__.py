"""Outgoing webhooks: URLs that receive events of chats, as Standard Webhooks describes it."""
