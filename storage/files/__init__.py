"""Directories of chats, sandboxes and plugins below the data directory."""
