"""Foreign tool servers as plugins."""
