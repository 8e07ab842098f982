"""What the workers of a fleet serve: plain data that commands and other callers use instead of plugins."""
