"""The endpoint of the SSE adapter protocol, ``/api/adapters/sse/connect``, and questions to its clients.

Clients, their channels and what they are sent are rows, so any gateway answers any request of a client, and
nothing that is not confirmed is lost when a client or a gateway ends.

``POST /api/v1/adapters/sse/requests`` asks the client of a channel and returns its answer.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import re
import time
from functools import partial
from http import HTTPStatus
from typing import Annotated, Any, Final

from fastapi import APIRouter, Depends, Header, Query, Request, Response
from loguru import logger
from pydantic import ValidationError
from sse_starlette import EventSourceResponse

from nekro.app.services import Services
from nekro.extensions.sse_adapter import SSE_ADAPTER
from nekro.extensions.sse_adapter.models import (
    EXAMPLES,
    AtSegment,
    MediaSegment,
    MessageCommand,
    ReceivedMessage,
    RegisterCommand,
    ResponseCommand,
    SubscribeCommand,
    TextSegment,
    command_of,
)
from nekro.extensions.sse_adapter.stream import ClientStream, SseFiles
from nekro.gateway.dependencies import IdentityDep, ServicesDep, take_stream
from nekro.gateway.extensions import GatewayPart, Running, running
from nekro.gateway.idempotency import NOT_ONCE, OnceDep
from nekro.gateway.outgoing import OutgoingHttp
from nekro.gateway.web.bodies import KeyedRoute, require_few_values
from nekro.gateway.web.responses import EventResponse
from nekro.operations.actor import RefusedError, Scope
from nekro.wire.invocation import new_id
from nekro_agent.downloads.addresses import AddressPolicy
from nekro_agent.durations import REFRESH_SECONDS
from nekro_agent.ports import IncomingMessage
from nekro_client.models import AdapterAnswer, AdapterRequestBody
from storage.adapters import AdapterClient
from storage.states import SendState

__all__ = [
    "GATEWAY_PART",
    "SseAdapter",
]


#: How often a client may refuse a message before it is given up.
_ATTEMPTS: Final = 3
#: Before a refused message is sent again: the platform's limits on rates have passed by then.
_PAUSE_SECONDS: Final = 2.0

router = APIRouter(prefix="/api/adapters/sse", tags=["adapters"])


class SseAdapter(Running):
    """What the endpoint needs besides the services; one instance per gateway."""

    def __init__(self, services: Services) -> None:
        """Create it; ``close`` it."""
        settings = services.settings
        key = settings.gateway.sse_access_key
        self._access_key = _digest(key.get_secret_value()) if key is not None else None
        policy = AddressPolicy(settings.downloads.allow_private, setting="NEKRO_DOWNLOADS__ALLOW_PRIVATE")
        self._outgoing = OutgoingHttp(policy)
        self.files = SseFiles(services, self._outgoing)

    async def close(self) -> None:
        """Close its connections."""
        await self._outgoing.close()

    def admit(self, access_key: str | None) -> None:
        """Return if the access key is right.

        Raises:
            RefusedError: 404, the adapter is not opened; 401, the key is wrong.
        """
        if self._access_key is None:
            raise RefusedError(
                HTTPStatus.NOT_FOUND,
                "not_found",
                "the SSE adapter is not served; set NEKRO_GATEWAY__SSE_ACCESS_KEY",
            )
        # Digests have one length, so the time of the comparison does not tell that of the key.
        if not hmac.compare_digest(_digest(access_key or ""), self._access_key):
            raise RefusedError(
                HTTPStatus.UNAUTHORIZED, "access_key_invalid", "the access key is missing or wrong"
            )


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()


_COMMAND_BODY: Final = {
    "required": True,
    "content": {"application/json": {"schema": {"type": "object", "required": ["cmd"]}}},
}


async def _adapter(request: Request) -> SseAdapter:
    adapter = running(request, SseAdapter)
    return adapter


AdapterDep = Annotated[SseAdapter, Depends(_adapter)]


@router.get("/connect", response_class=EventSourceResponse)
async def connect_adapter(
    request: Request,
    services: ServicesDep,
    adapter: AdapterDep,
    client_name: Annotated[str, Query(max_length=500)] = "",
    platform: Annotated[str, Query(max_length=500)] = "unknown",
    client_id_query: str | None = None,
    client_id: str | None = None,
    access_key: str | None = None,
) -> EventResponse:
    """Stream requests to a client: ``connected`` first, then ``heartbeat`` every 5 s.

    Published clients send their id as ``client_id``, which the reference calls ``client_id_query``. A client
    that is not known gets a new id.
    """
    adapter.admit(access_key)
    take_stream(request)
    known = await _find(services, client_id_query or client_id)
    own_id = known.id if known else await _register(services, platform, client_name, "")
    stream = ClientStream(services, adapter.files, own_id, stopping=request.app.state.stopping)
    # The protocol has heartbeats of its own.
    return EventResponse(stream.events(), ping_seconds=3600)


@router.post("/connect", openapi_extra={"requestBody": _COMMAND_BODY, **NOT_ONCE})
async def send_adapter_command(
    request: Request,
    services: ServicesDep,
    adapter: AdapterDep,
    x_client_id: Annotated[str | None, Header()] = None,
    x_access_key: Annotated[str | None, Header()] = None,
) -> dict[str, Any]:
    """Process a command: ``register``, ``subscribe``, ``unsubscribe``, ``message`` or ``response``."""
    adapter.admit(x_access_key)
    body = await request.body()
    require_few_values(body)
    try:
        given = command_of(body)
    except ValidationError as exc:
        found = exc.errors(include_url=False, include_input=False)
        text = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in found)
        raise RefusedError(HTTPStatus.BAD_REQUEST, "invalid_request", text) from None
    except (ValueError, RecursionError) as exc:
        detail = f"the body is not valid JSON: {exc}"
        raise RefusedError(HTTPStatus.BAD_REQUEST, "invalid_request", detail) from None
    if isinstance(given, RegisterCommand):
        own_id = await _register(services, given.platform, given.client_name, given.client_version)
        return {"client_id": own_id, "message": f"client {given.client_name} is registered"}
    client = await _client(services, x_client_id)
    if isinstance(given, SubscribeCommand):
        return await _subscribe(services, client, given)
    if isinstance(given, MessageCommand):
        return await _receive(services, adapter, client, given.message)
    return await _answered(services, client, given)


async def _find(services: Services, client_id: str | None) -> AdapterClient | None:
    if not client_id:
        return None
    async with services.database.read() as transaction:
        return await transaction.adapters.find(client_id, adapter_key=SSE_ADAPTER)


async def _client(services: Services, client_id: str | None) -> AdapterClient:
    if not client_id:
        raise RefusedError(HTTPStatus.BAD_REQUEST, "invalid_request", "the header X-Client-ID is missing")
    client = await _find(services, client_id)
    if client is None:
        raise RefusedError(HTTPStatus.NOT_FOUND, "not_found", f"there is no client {client_id!r}")
    return client


async def _register(services: Services, platform: str, name: str, version: str) -> str:
    client_id = new_id()
    async with services.database.begin() as transaction:
        await transaction.adapters.register(
            client_id, adapter_key=SSE_ADAPTER, platform=platform, name=name, version=version
        )
    logger.bind(client_id=client_id, name=name, platform=platform).info("adapter_client_registered")
    return client_id


async def _subscribe(services: Services, client: AdapterClient, given: SubscribeCommand) -> dict[str, Any]:
    async with services.database.begin() as transaction:
        change = transaction.adapters.subscribe
        if given.cmd == "unsubscribe":
            change = transaction.adapters.unsubscribe
        await change(client.id, given.channel_ids)
    return {"message": f"{given.cmd}d {len(given.channel_ids)} channels"}


async def _answered(services: Services, client: AdapterClient, given: ResponseCommand) -> dict[str, Any]:
    """Record the answer to a request; clients also report failures inside their data."""
    is_done = given.success and given.data.get("success") is not False
    async with services.database.begin() as transaction:
        if is_done:
            found = await transaction.adapters.confirm(
                given.request_id, client_id=client.id, answer=given.data
            )
        else:
            found = await transaction.adapters.refuse(
                given.request_id,
                client_id=client.id,
                error=json.dumps(given.data, ensure_ascii=False)[:2000],
                attempts=_ATTEMPTS,
                pause_seconds=_PAUSE_SECONDS,
            )
    return {"success": found}


async def _receive(
    services: Services, adapter: SseAdapter, client: AdapterClient, message: ReceivedMessage
) -> dict[str, Any]:
    if message.is_self:
        return {"message": "a message of the agent itself is not received"}
    chat_key = f"{SSE_ADAPTER}-{message.channel_id}"
    await services.refresh()
    await services.intake.accept(
        partial(_incoming, adapter, client, message, chat_key),
        once_key=_once_key(chat_key, client, message),
        issuer=SSE_ADAPTER,
    )
    return {"message": "the message was received"}


async def _incoming(
    adapter: SseAdapter, client: AdapterClient, message: ReceivedMessage, chat_key: str
) -> IncomingMessage:
    """Return a message of a platform; its files are stored."""
    text, segments = "", []
    for segment in message.segments:
        if isinstance(segment, TextSegment):
            text += segment.content
            segments.append({"type": "text", "text": segment.content})
        elif isinstance(segment, AtSegment):
            name = segment.nickname or segment.user_id
            text += f"@{name} "
            at = {"target_platform_userid": segment.user_id, "target_nickname": name}
            segments.append({"type": "at", "text": f"@{name}", **at})
        elif isinstance(segment, MediaSegment):
            segments.append(await adapter.files.store(segment, chat_key))
    return IncomingMessage(
        chat_key=chat_key,
        text=text,
        user_id=message.from_id,
        user_name=message.from_name,
        nickname=message.from_nickname or "",
        is_tome=message.is_to_me,
        adapter_key=SSE_ADAPTER,
        channel_id=message.channel_id,
        channel_type="private" if message.channel_id.startswith("private_") else "group",
        channel_name=message.channel_name or None,
        platform_message_id=message.msg_id,
        content_data=segments,
        ext_data={"platform": message.platform_name or client.platform, "received_at": int(time.time())},
    )


def _once_key(chat_key: str, client: AdapterClient, message: ReceivedMessage) -> str | None:
    """Return what identifies a message of a platform: clients post a message again if its answer is lost."""
    if not message.msg_id:
        return None
    parts = json.dumps([chat_key, client.platform, message.from_id, message.msg_id])
    return f"sse:{hashlib.sha256(parts.encode()).hexdigest()}"


question_router = APIRouter(route_class=KeyedRoute, prefix="/adapters/sse", tags=["adapters"])


@question_router.post("/requests", response_model=AdapterAnswer)
async def ask_client(
    body: AdapterRequestBody, services: ServicesDep, identity: IdentityDep, once: OnceDep
) -> Response:
    """Ask for a person, a channel or the agent's own account on the platform, or set a reaction."""
    identity.require(Scope.ADMIN, chat_key=f"{SSE_ADAPTER}-{body.channel_id}")
    request_id = once.id

    async def work() -> AdapterAnswer:
        await _ask(services, request_id, body)
        return await _answer(services, request_id, seconds=body.timeout_seconds)

    return await once.respond(work)


async def _ask(services: Services, request_id: str, body: AdapterRequestBody) -> None:
    """Ask, unless an execution of the request before has asked."""
    async with services.database.begin() as transaction:
        if await transaction.adapters.get_send(request_id) is not None:
            return
        if not await transaction.adapters.clients_of(body.channel_id, adapter_key=SSE_ADAPTER):
            raise RefusedError(
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
                    raise RefusedError(
                        HTTPStatus.BAD_GATEWAY, "client_failed", f"the client failed: {reason}"
                    )
    except TimeoutError:
        raise RefusedError(
            HTTPStatus.GATEWAY_TIMEOUT, "client_timeout", f"no client answered in {seconds:g} s"
        ) from None


GATEWAY_PART: Final = GatewayPart(
    api=(question_router,),
    root=(router,),
    limits=((re.compile("/api/adapters/sse/connect"), lambda settings: settings.media_bytes),),
    build=lambda services, _hub: SseAdapter(services),
    examples=EXAMPLES,
)
