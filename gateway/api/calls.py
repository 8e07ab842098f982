"""Calls of methods."""

from __future__ import annotations

from fastapi import APIRouter, Response

from gateway.dependencies import IdentityDep, ServicesDep
from gateway.idempotency import OnceDep
from gateway.identity import Scope
from gateway.views import finished_call
from nekro_client.models import Call, CallBody
from runtime.plain import to_json_value
from workers.calls.results import value_of

__all__ = ["router"]

router = APIRouter(tags=["calls"])


@router.post("/calls", response_model=Call)
async def call(body: CallBody, services: ServicesDep, identity: IdentityDep, once: OnceDep) -> Response:
    """Call a method and wait for its result; the result of an AGENT method starts no round."""
    identity.require(Scope.CALL, chat_key=body.chat_key)
    user_id = identity.user_for(body.user_id)

    async def work() -> Call:
        method = await services.find_method(body.method)
        envelope = await services.invoke(
            body.method,
            tuple(body.args),
            body.kwargs,
            chat_key=body.chat_key,
            user_id=user_id,
            timeout_seconds=body.timeout_seconds,
            # A repetition after a crash is the same call, which has at most one effect.
            call_id=once.id,
        )
        value = value_of(envelope, max_bytes=services.settings.sandbox.return_bytes)
        return finished_call(envelope, method=method.task, value=to_json_value(value))

    return await once.run(work)
