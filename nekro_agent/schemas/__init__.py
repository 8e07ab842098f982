"""Data types of plugins, at the reference's import paths."""
