"""The HTTP API in front of the workers: it writes rows and publishes, and imports no plugin."""
