"""Running one method, command or hook of a plugin."""
