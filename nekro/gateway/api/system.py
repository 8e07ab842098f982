"""Approvals, catalogue, jobs, timers, workers, dead letters, costs, keys; probes of the gateway."""

from __future__ import annotations

from http import HTTPStatus

from fastapi import APIRouter, Request, Response

from nekro.app.http_server import METRICS_TYPE
from nekro.base.metrics import start_metrics
from nekro.gateway.dependencies import IdentityDep, ServicesDep
from nekro.gateway.operation_routes import route
from nekro.gateway.web.bodies import KeyedRoute
from nekro.operations import approvals, catalogue, costs, fleet, keys, work
from nekro.operations.actor import RefusedError, Scope

__all__ = ["ROUTERS", "probe_router"]


def _router(tag: str) -> APIRouter:
    return APIRouter(route_class=KeyedRoute, tags=[tag])


_approvals = _router("approvals")
route(_approvals, "GET", "/approvals", approvals.list_approvals)
route(_approvals, "GET", "/approvals/{approval_id}", approvals.get_approval)
route(_approvals, "POST", "/approvals/{approval_id}/decision", approvals.decide_approval)
route(_approvals, "POST", "/approvals/{approval_id}/revoke", approvals.revoke_approval)

_catalogue = _router("catalogue")
route(_catalogue, "GET", "/catalogue", catalogue.get_catalogue)
route(_catalogue, "GET", "/methods", catalogue.list_methods)
route(_catalogue, "PUT", "/lanes/{name}", catalogue.put_lane)
route(_catalogue, "DELETE", "/lanes/{name}", catalogue.delete_lane)
route(_catalogue, "GET", "/plugins", catalogue.list_plugins)
route(_catalogue, "GET", "/chats/{chat_key}/plugins", catalogue.list_chat_plugins)
route(_catalogue, "PUT", "/chats/{chat_key}/plugins/{plugin_key}", catalogue.put_chat_plugin)
route(_catalogue, "GET", "/plugins/{plugin_key}/config", catalogue.get_plugin_config)
route(_catalogue, "PATCH", "/plugins/{plugin_key}/config", catalogue.change_plugin_config)
route(_catalogue, "POST", "/plugins/{plugin_key}/enable", catalogue.enable_plugin)
route(_catalogue, "POST", "/plugins/{plugin_key}/disable", catalogue.disable_plugin)

_work = _router("work")
route(_work, "GET", "/jobs", work.list_jobs)
route(_work, "GET", "/jobs/{job_id}", work.get_job)
route(_work, "GET", "/jobs/{job_id}/log", work.get_job_log)
route(_work, "POST", "/jobs/{job_id}/retry", work.retry_job, status=HTTPStatus.CREATED)
route(_work, "POST", "/jobs/{job_id}/cancel", work.cancel_job)
route(_work, "POST", "/jobs/{job_id}/signals", work.signal_job, status=HTTPStatus.ACCEPTED)
route(_work, "GET", "/timers", work.list_timers)
route(_work, "PATCH", "/timers/{timer_id}", work.change_timer)
route(_work, "DELETE", "/timers/{timer_id}", work.delete_timer)

_fleet = _router("operations")
route(_fleet, "GET", "/workers", fleet.list_workers)
route(_fleet, "GET", "/queues", fleet.get_queues)
route(_fleet, "GET", "/dead-letters", fleet.list_dead_letters)
route(_fleet, "GET", "/dead-letters/{letter_id}", fleet.get_dead_letter)
route(_fleet, "POST", "/dead-letters/{letter_id}/retry", fleet.retry_dead_letter)
route(_fleet, "DELETE", "/dead-letters/{letter_id}", fleet.delete_dead_letter)
route(_fleet, "GET", "/costs", costs.get_costs)
route(_fleet, "GET", "/series", costs.get_series)

_keys = _router("keys")
route(_keys, "GET", "/keys", keys.list_keys)
route(_keys, "POST", "/keys", keys.create_key, status=HTTPStatus.CREATED)
route(_keys, "DELETE", "/keys/{key_id}", keys.revoke_key)
route(_keys, "GET", "/audit", keys.list_acts)

#: In the order of the OpenAPI document.
ROUTERS = (_approvals, _catalogue, _work, _fleet, _keys)

probe_router = APIRouter(tags=["probes"])


@probe_router.get("/healthz")
async def get_health() -> dict[str, bool]:
    """Answer while the event loop responds."""
    return {"ok": True}


@probe_router.get("/readyz")
async def get_readiness(request: Request, services: ServicesDep) -> dict[str, bool]:
    """Answer 200 if the database answers and the gateway is not stopping, else 503."""
    if request.app.state.stopping.is_set():
        raise RefusedError(HTTPStatus.SERVICE_UNAVAILABLE, "stopping", "the gateway is stopping")
    await services.read_catalogue()
    return {"ok": True}


@probe_router.get("/metrics", response_class=Response)
async def get_metrics(identity: IdentityDep) -> Response:
    """Metrics of this gateway, for Prometheus; those of the fleet are served by `nekro metrics`."""
    from prometheus_client import generate_latest

    identity.require_all(Scope.ADMIN)
    return Response(generate_latest(start_metrics().registry), media_type=METRICS_TYPE)
