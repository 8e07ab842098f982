"""Calls of plugin methods in a worker: claim, execution, record."""
