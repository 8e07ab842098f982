"""Limits and permissions of the SDK, as plain values that the application fills from its settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["DownloadPolicy", "PackagePolicy", "StorePolicy"]


@dataclass(frozen=True, kw_only=True)
class StorePolicy:
    """Limits of ``plugin.store``."""

    max_value_bytes: int = 16 << 20
    warn_value_bytes: int = 1 << 20
    max_key_chars: int = 1024


@dataclass(frozen=True, kw_only=True)
class DownloadPolicy:
    """Limits of downloads by URL.

    ``timeout_seconds`` is the longest silence of a server. ``allow_private`` lists host names
    and networks (CIDR) that may be fetched although private, loopback or link-local.
    """

    max_bytes: int = 20 << 30
    timeout_seconds: float = 60
    allow_private: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class PackagePolicy:
    """What ``dynamic_import_pkg`` may install; ``allow`` counts with ``"allow_list"`` only."""

    install: Literal["off", "allow_list", "on"] = "on"
    allow: tuple[str, ...] = ()
