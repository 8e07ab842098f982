"""Routes of ``/api/v1``, one module per topic."""

from __future__ import annotations

from typing import Final

from fastapi import APIRouter

from nekro.gateway.api import (
    approvals,
    calls,
    catalogue,
    chats,
    files,
    fleet,
    jobs,
    keys,
    messages,
    streams,
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
    approvals.router,
    catalogue.router,
    jobs.router,
    fleet.router,
    keys.router,
)
