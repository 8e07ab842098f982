"""Packages that plugins ask for at run time."""
