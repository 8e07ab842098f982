"""A package: configuration, relative imports, a sub-module that registers methods."""

from . import methods as _methods
from .settings import plugin

__all__ = ["plugin"]
