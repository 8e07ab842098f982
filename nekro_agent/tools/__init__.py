"""Helpers that plugins import by name."""
