"""``POST /api/v1/adapters/sse/requests``: asks the client of a channel and returns its answer."""

from __future__ import annotations

import asyncio
from http import HTTPStatus

from fastapi import APIRouter, Response

from nekro.app.chats.adapters import SSE_ADAPTER
from nekro.app.composition import Services
from nekro.gateway.dependencies import IdentityDep, ServicesDep
from nekro.gateway.idempotency import OnceDep
from nekro.gateway.identity import Scope
from nekro.gateway.problems import ProblemError
from nekro.gateway.routing import KeyedRoute
from nekro_agent.durations import REFRESH_SECONDS
from nekro_client.models import AdapterAnswer, AdapterRequestBody
from storage.states import SendState

__all__ = ["router"]

router = APIRouter(route_class=KeyedRoute, prefix="/adapters/sse", tags=["adapters"])


@router.post("/requests", response_model=AdapterAnswer)
async def ask_client(
    body: AdapterRequestBody, services: ServicesDep, identity: IdentityDep, once: OnceDep
) -> Response:
    """Ask for a person, a channel or the agent's own account on the platform, or set a reaction."""
    identity.require(Scope.ADMIN, chat_key=f"{SSE_ADAPTER}-{body.channel_id}")
    request_id = once.id

    async def work() -> AdapterAnswer:
        await _ask(services, request_id, body)
        return await _answer(services, request_id, seconds=body.timeout_seconds)

    return await once.run(work)


async def _ask(services: Services, request_id: str, body: AdapterRequestBody) -> None:
    """Ask, unless an execution of the request before has asked."""
    async with services.database.begin() as transaction:
        if await transaction.adapters.get_send(request_id) is not None:
            return
        if not await transaction.adapters.clients_of(body.channel_id, adapter_key=SSE_ADAPTER):
            raise ProblemError(
                HTTPStatus.NOT_FOUND, "not_found", f"no client has subscribed to channel {body.channel_id!r}"
            )
        await transaction.adapters.ask(
            request_id,
            adapter_key=SSE_ADAPTER,
            channel_id=body.channel_id,
            event=body.request,
            data=body.data,
            seconds=body.timeout_seconds,
        )


async def _answer(services: Services, request_id: str, *, seconds: float) -> AdapterAnswer:
    try:
        async with asyncio.timeout(seconds):
            while True:
                await asyncio.sleep(REFRESH_SECONDS)
                async with services.database.read() as transaction:
                    send = await transaction.adapters.get_send(request_id)
                if send is not None and send.state is SendState.DONE:
                    return AdapterAnswer(data=send.answer or {})
                if send is None or send.state is SendState.FAILED:
                    reason = send.error if send else None
                    raise ProblemError(
                        HTTPStatus.BAD_GATEWAY, "client_failed", f"the client failed: {reason}"
                    )
    except TimeoutError:
        raise ProblemError(
            HTTPStatus.GATEWAY_TIMEOUT, "client_timeout", f"no client answered in {seconds:g} s"
        ) from None
