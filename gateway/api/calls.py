"""Calls of methods."""

from __future__ import annotations

from http import HTTPStatus

from fastapi import APIRouter, Response

from gateway.dependencies import IdentityDep, ServicesDep
from gateway.idempotency import OnceDep
from gateway.identity import Scope
from gateway.views import awaiting_call, finished_call
from nekro_client.models import Call, CallBody
from runtime.plain import to_json_value
from workers.calls.results import value_of

__all__ = ["router"]

router = APIRouter(tags=["calls"])


@router.post(
    "/calls",
    response_model=Call,
    responses={HTTPStatus.ACCEPTED: {"model": Call, "description": "The call waits for approval."}},
)
async def call(body: CallBody, services: ServicesDep, identity: IdentityDep, once: OnceDep) -> Response:
    """Call a method and wait for its result; the result of an AGENT method starts no round.

    A call that requires approval waits for it, unless the key has the scope `approve`: the answer is 202 with
    `approval_id`, and the result goes to the chat.
    """
    identity.require(Scope.CALL, chat_key=body.chat_key)
    user_id = identity.user_for(body.user_id)
    approver = identity.name if Scope.APPROVE in identity.scopes else None
    method = await services.find_method(body.method)
    # A repetition after a crash is the same call, which has at most one effect.
    call_id = once.id

    async def ask() -> Call:
        row = await services.ask_approval(
            body.method,
            tuple(body.args),
            body.kwargs,
            chat_key=body.chat_key,
            user_id=user_id,
            call_id=call_id,
        )
        return awaiting_call(row, type_=method.type.value)

    async def work() -> Call:
        envelope = await services.invoke(
            body.method,
            tuple(body.args),
            body.kwargs,
            chat_key=body.chat_key,
            user_id=user_id,
            timeout_seconds=body.timeout_seconds,
            call_id=call_id,
            approver=approver,
        )
        value = value_of(envelope, max_bytes=services.settings.sandbox.return_bytes)
        return finished_call(envelope, method=method.task, value=to_json_value(value))

    if method.requires_approval and approver is None:
        return await once.run(ask, status=HTTPStatus.ACCEPTED)
    return await once.run(work)
