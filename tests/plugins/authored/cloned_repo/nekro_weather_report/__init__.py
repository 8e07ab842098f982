"""A package in a sub-folder of a cloned repository."""

from .plugin import plugin

__all__ = ["plugin"]
