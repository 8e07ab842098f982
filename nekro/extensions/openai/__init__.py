"""The API of OpenAI, for clients that speak it: one chat per conversation, one turn per request."""

from __future__ import annotations

from typing import Final

from nekro.app.extensions import Extension

__all__ = ["EXTENSION"]

EXTENSION: Final = Extension(name="openai", gateway="nekro.extensions.openai.responses:GATEWAY_PART")
