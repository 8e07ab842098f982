"""Older import paths of the message API."""

from __future__ import annotations

from nekro_agent.api import message

__all__ = ["message"]
