"""Routes of ``/api/v1``, one module per topic."""

from __future__ import annotations

from typing import Final

from fastapi import APIRouter

from nekro.gateway.api import (
    calls,
    chats,
    files,
    messages,
    streams,
    system,
)

__all__ = ["ROUTERS"]

#: Routers below ``/api/v1``.
ROUTERS: Final[tuple[APIRouter, ...]] = (
    chats.router,
    messages.router,
    files.router,
    streams.router,
    chats.turn_router,
    calls.run_router,
    calls.router,
    *system.ROUTERS,
)
