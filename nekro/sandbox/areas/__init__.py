"""The directories that a chat's sandboxes see."""
