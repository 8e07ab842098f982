"""Routes of ``/api/v1``, one module per topic."""

from __future__ import annotations

from typing import Final

from fastapi import APIRouter

from gateway.api import (
    approvals,
    calls,
    catalogue,
    events,
    files,
    keys,
    mcp,
    messages,
    operations,
    runs,
    tickets,
    turns,
    work,
)

__all__ = ["ROUTERS"]

#: Routers below ``/api/v1``.
ROUTERS: Final[tuple[APIRouter, ...]] = tuple(
    module.router
    for module in (
        messages,
        files,
        events,
        tickets,
        turns,
        runs,
        calls,
        approvals,
        catalogue,
        work,
        operations,
        keys,
        mcp,
    )
)
