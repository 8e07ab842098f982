"""Calls of methods for tools: progress, jobs, cancellation."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from typing import Any, TypeAlias

from loguru import logger
from mcp_types import CallToolResult

from codec.values import encode_arguments
from codec.wire import new_id
from gateway.identity import Scope
from gateway.mcp.callers import Caller
from gateway.mcp.jobs import job_uri
from gateway.mcp.results import data_result, method_result
from gateway.mcp.schemas import arguments_of
from gateway.streams.hub import EventHub, SlowReaderError
from messaging.tracing import span
from nekro_agent.errors import NekroError
from nekro_client.models import EventType
from workers.calls.dispatch import CallScope
from workers.catalogue.arguments import refuse_unfit
from workers.catalogue.entries import MethodEntry
from workers.composition import Services

__all__ = ["Progress", "call_id_of", "call_method"]

#: Reports percent and text to the client.
Progress: TypeAlias = Callable[[float, str], Awaitable[None]]
_ID_CHARS = 32


def call_id_of(caller: Caller, request_id: str | int | None) -> str:
    """Return the id of a request's call; in a session it is the same on every gateway."""
    if caller.session is None or request_id is None:
        return new_id()
    parts = (caller.identity.key_id or "", caller.session, type(request_id).__name__, str(request_id))
    return hashlib.sha256("\0".join(parts).encode("utf-8", "surrogatepass")).hexdigest()[:_ID_CHARS]


async def call_method(
    services: Services,
    hub: EventHub,
    caller: Caller,
    entry: MethodEntry,
    given: Mapping[str, Any],
    *,
    call_id: str,
    progress: Progress | None,
) -> CallToolResult:
    """Call a method. Cancelling the wait revokes the call.

    A call that takes longer than code waits for one (``NEKRO_WORKERS__WAIT_SECONDS``) continues as a job,
    and the result names it. The result of an AGENT method requests no round.

    Raises:
        ProblemError: the key may not call methods.
        NekroError: as from ``Dispatcher.invoke_patiently``.
    """
    caller.identity.require(Scope.CALL, chat_key=caller.chat_key)
    if getattr(entry, "requires_approval", False):
        return _needs_approval(entry)
    args, kwargs = arguments_of(entry, given)
    refuse_unfit(entry, len(args), kwargs)
    chat = await services.chat(caller.chat_key)
    scope = CallScope(chat=chat, user_id=caller.user_id, wakes_agent=False)
    lane = services.dispatcher.lane_of(entry)
    ids = {"call_id": call_id, "method": entry.task, "type": entry.type.value, "lane": lane}
    with span(f"call {entry.task}", ids, kind="client"):
        async with _reported(hub, caller.chat_key, call_id, progress):
            envelope = await services.dispatcher.invoke_patiently(
                entry, encode_arguments(args, kwargs), scope, call_id=call_id, lane=lane
            )
    if envelope is None:
        return _continues(entry, call_id)
    return method_result(envelope, max_bytes=services.settings.sandbox.return_bytes)


def _needs_approval(entry: MethodEntry) -> CallToolResult:
    text = f"{entry.name} requires the approval of a person, and calls over MCP have none: it did not run."
    return data_result({"method": entry.task, "state": "refused"}, text, is_error=True)


def _continues(entry: MethodEntry, call_id: str) -> CallToolResult:
    text = (
        f"{entry.name} is still running, as job {call_id}. Wait for it with wait_for_job, or read "
        f"{job_uri(call_id)}; its result will also appear in the chat. Do not call it again."
    )
    return data_result({"job_id": call_id, "state": "running"}, text)


@asynccontextmanager
async def _reported(
    hub: EventHub, chat_key: str, call_id: str, progress: Progress | None
) -> AsyncIterator[None]:
    """Report the progress of a call while the block runs; a client that reads slowly does not delay it."""
    if progress is None:
        yield
        return
    telling = asyncio.create_task(_tell(hub, chat_key, call_id, progress), name="nekro-mcp-progress")
    try:
        yield
    finally:
        telling.cancel()
        await asyncio.gather(telling, return_exceptions=True)


async def _tell(hub: EventHub, chat_key: str, call_id: str, progress: Progress) -> None:
    told = -1.0
    try:
        hub.require_room()
        stream = hub.stream(chat_key, types=(EventType.CALL_PROGRESS,))
        async with aclosing(stream) as events:
            async for each in events:
                percent = float(each.event.data.get("percent") or 0)
                # The protocol requires that the number grows.
                if each.event.call_id == call_id and percent > told:
                    told = percent
                    await progress(percent, str(each.event.data.get("message") or ""))
    except (NekroError, SlowReaderError) as exc:  # the call does not depend on its reports
        logger.bind(call_id=call_id, error=str(exc)).info("mcp_progress_ended")
