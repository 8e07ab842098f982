"""Packages for sandboxed code: asked for inside, decided and built outside, mounted read-only."""

from sandbox.packages.service import PackageService

__all__ = ["PackageService"]
