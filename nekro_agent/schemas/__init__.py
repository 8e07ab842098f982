"""Data that plugins meet, at the reference's import paths."""
