"""Nekro Agent's SSE adapter protocol: programs that connect chats of other platforms."""

from __future__ import annotations

from typing import Final

from nekro.app.extensions import Extension

__all__ = ["EXTENSION"]

EXTENSION: Final = Extension(name="sse_adapter", gateway="nekro.extensions.sse_adapter.endpoint:GATEWAY_PART")
