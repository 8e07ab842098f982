"""Import paths that plugins of Nekro Agent use."""
