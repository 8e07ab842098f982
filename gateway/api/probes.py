"""Liveness and readiness of a gateway."""

from __future__ import annotations

from fastapi import APIRouter

from gateway.dependencies import ServicesDep

__all__ = ["router"]

router = APIRouter()


@router.get("/healthz")
async def healthz() -> dict[str, bool]:
    """Answer while the event loop responds."""
    return {"ok": True}


@router.get("/readyz")
async def readyz(services: ServicesDep) -> dict[str, bool]:
    """Answer 200 if the database answers, else 503 as a problem document."""
    await services.read_catalogue()
    return {"ok": True}
