"""The plugin API: ``from nekro_agent.api import core, message, schemas, …``."""

from __future__ import annotations

from nekro_agent.api import core, i18n, message, plugin, recurring_timer, schemas, signal, timer

__all__ = ["core", "i18n", "message", "plugin", "recurring_timer", "schemas", "signal", "timer"]
