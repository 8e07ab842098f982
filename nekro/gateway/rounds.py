"""Whether code can run: rounds workers run it, gateways do not."""

from __future__ import annotations

from http import HTTPStatus
from typing import Final

from nekro.app.composition import Services
from nekro.gateway.problems import ProblemError

__all__ = ["require_rounds_worker"]

_NO_WORKER: Final = (
    "no rounds worker is live, and only these run code; start one with `nekro up --rounds 1` or `nekro worker"
    " --lane rounds`, or without a language model `nekro worker --lane rounds --without-model`"
)


async def require_rounds_worker(services: Services) -> None:
    """Return if a rounds worker is live.

    Raises:
        ProblemError: 503, none is.
    """
    if not await services.remote_runs.have_worker():
        raise ProblemError(
            HTTPStatus.SERVICE_UNAVAILABLE, "no_worker", _NO_WORKER, headers={"Retry-After": "1"}
        )
