"""The system: everything but the plugin SDK, the client and the worker process."""
