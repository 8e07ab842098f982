"""Older import path of ``dynamic_import_pkg``."""

from __future__ import annotations

from nekro_agent.api.plugin import dynamic_import_pkg

__all__ = ["dynamic_import_pkg"]
