"""Background jobs and timers."""

from __future__ import annotations

from http import HTTPStatus

from fastapi import APIRouter

from nekro.gateway.operation_routes import route
from nekro.gateway.web.bodies import KeyedRoute
from nekro.operations import jobs, timers

__all__ = ["router"]

router = APIRouter(route_class=KeyedRoute, tags=["work"])

route(router, "GET", "/jobs", jobs.list_jobs)
route(router, "GET", "/jobs/{job_id}", jobs.get_job)
route(router, "GET", "/jobs/{job_id}/log", jobs.get_job_log)
route(router, "POST", "/jobs/{job_id}/retry", jobs.retry_job, status=HTTPStatus.CREATED)
route(router, "POST", "/jobs/{job_id}/cancel", jobs.cancel_job)
route(router, "POST", "/jobs/{job_id}/signals", jobs.signal_job, status=HTTPStatus.ACCEPTED)
route(router, "GET", "/timers", timers.list_timers)
route(router, "PATCH", "/timers/{timer_id}", timers.change_timer)
route(router, "DELETE", "/timers/{timer_id}", timers.delete_timer)
