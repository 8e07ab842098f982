"""Liveness, readiness and metrics of a gateway."""

from __future__ import annotations

from http import HTTPStatus

from fastapi import APIRouter, Request, Response

from nekro.app.ops.http_server import METRICS_TYPE
from nekro.base.metrics import start_metrics
from nekro.gateway.dependencies import IdentityDep, ServicesDep
from nekro.gateway.identity import Scope
from nekro.gateway.problems import ProblemError

__all__ = ["router"]

router = APIRouter(tags=["probes"])


@router.get("/healthz")
async def get_health() -> dict[str, bool]:
    """Answer while the event loop responds."""
    return {"ok": True}


@router.get("/readyz")
async def get_readiness(request: Request, services: ServicesDep) -> dict[str, bool]:
    """Answer 200 if the database answers and the gateway is not stopping, else 503."""
    if request.app.state.stopping.is_set():
        raise ProblemError(HTTPStatus.SERVICE_UNAVAILABLE, "stopping", "the gateway is stopping")
    await services.read_catalogue()
    return {"ok": True}


@router.get("/metrics", response_class=Response)
async def get_metrics(identity: IdentityDep) -> Response:
    """Metrics of this gateway, for Prometheus; those of the fleet are served by `nekro metrics`."""
    from prometheus_client import generate_latest

    identity.require_all(Scope.ADMIN)
    return Response(generate_latest(start_metrics().registry), media_type=METRICS_TYPE)
