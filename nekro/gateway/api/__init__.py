"""Routes of ``/api/v1``, one module per topic."""

from __future__ import annotations

from typing import Final

from fastapi import APIRouter

from nekro.gateway.api import (
    approvals,
    calls,
    changes,
    chats,
    events,
    files,
    keys,
    messages,
    runs,
    tickets,
    turn_lists,
    turns,
)
from nekro.gateway.api.fleet import catalogue, costs, mcp, operations, series, work

__all__ = ["ROUTERS"]

#: Routers below ``/api/v1``.
ROUTERS: Final[tuple[APIRouter, ...]] = tuple(
    module.router
    for module in (
        chats,
        messages,
        files,
        events,
        changes,
        tickets,
        turn_lists,
        turns,
        runs,
        calls,
        approvals,
        catalogue,
        work,
        operations,
        costs,
        series,
        keys,
        mcp,
    )
)
