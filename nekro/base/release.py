"""The version of the installed distribution; ``pyproject.toml`` is the only place that states it."""

from __future__ import annotations

import importlib.metadata

__all__ = ["release"]


def release() -> str:
    """Return the installed version; "(source tree)" when the distribution is not installed."""
    try:
        return importlib.metadata.version("nekro-workers")
    except importlib.metadata.PackageNotFoundError:
        return "(source tree)"
