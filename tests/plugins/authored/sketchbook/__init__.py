"""画图: a package whose plugin object lies in another module."""

from .handler import plugin

__all__ = ["plugin"]
