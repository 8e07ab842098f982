"""Packages for sandboxed code: requested inside, checked and built by the host, mounted read-only."""

from sandbox.packages.service import PackageService

__all__ = ["PackageService"]
