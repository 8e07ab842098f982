"""Packages for sandboxed code: those of every sandbox of a host, and those that code requests."""
