"""Older import paths of the message API."""

from __future__ import annotations

import sys

from nekro_agent.api import message

__all__ = ["message"]

# `import nekro_agent.services.message.message` returns the module itself, not a copy of its names.
sys.modules[f"{__name__}.message"] = message
