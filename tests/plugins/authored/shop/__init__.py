"""A package with packages: relative imports both ways, configuration in classes of classes."""

from . import methods as _methods  # noqa: F401
from .base import plugin

__all__ = ["plugin"]
