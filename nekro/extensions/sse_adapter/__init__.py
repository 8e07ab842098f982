"""Nekro Agent's SSE adapter protocol: programs that connect chats of other platforms."""

from __future__ import annotations

from typing import Final

from nekro.app.extensions import Extension

__all__ = ["EXTENSION", "SSE_ADAPTER"]

#: Nekro Agent's adapter for programs that connect over Server-Sent Events; chats are ``sse-<channel id>``.
SSE_ADAPTER: Final = "sse"

EXTENSION: Final = Extension(
    name="sse_adapter", adapters=(SSE_ADAPTER,), gateway="nekro.extensions.sse_adapter.endpoint:GATEWAY_PART"
)
