"""Fixtures of the SDK's tests."""

from __future__ import annotations

from file_server import file_server

__all__ = ["file_server"]
