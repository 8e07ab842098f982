"""The plugin API: ``from nekro_agent.api import core, message, schemas, …``."""

from __future__ import annotations

from nekro_agent.api import core, message, plugin, schemas

__all__ = ["core", "message", "plugin", "schemas"]
