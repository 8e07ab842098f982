"""Outgoing webhooks: URLs that receive events of chats, as Standard Webhooks describes it."""

from __future__ import annotations

from typing import Final

from nekro.app.extensions import Extension

__all__ = ["EXTENSION"]

EXTENSION: Final = Extension(name="webhooks", gateway="nekro.extensions.webhooks.routes:GATEWAY_PART")
