"""Progress of calls and output of runs, reported to the client that waits for them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TypeAlias

from loguru import logger

from nekro.base.tasks import end_tasks
from nekro.gateway.streams.channel import Reader
from nekro.gateway.streams.hub import EventHub
from nekro_agent.errors import NekroError
from nekro_client.models import Event, EventType

__all__ = ["Report", "reported"]

#: Reports a growing number, the number at the end (None: unknown) and a text.
Report: TypeAlias = Callable[[float, float | None, str], Awaitable[None]]
_PERCENT = 100.0


@asynccontextmanager
async def reported(hub: EventHub, chat_key: str, call_id: str, report: Report | None) -> AsyncIterator[None]:
    """Report the live events of a call or a run while the block runs; a slow client does not delay it.

    Args:
        report: None: the client asked for no reports.
    """
    async with AsyncExitStack() as closing:
        reader = None if report is None else await _reader(hub, chat_key, call_id, closing)
        if report is None or reader is None:
            yield
            return
        reporting = asyncio.create_task(_report_progress(reader, call_id, report), name="nekro-mcp-progress")
        try:
            yield
        finally:
            await end_tasks(reporting)


async def _reader(hub: EventHub, chat_key: str, call_id: str, closing: AsyncExitStack) -> Reader | None:
    try:
        hub.require_room()
        return await closing.enter_async_context(hub.live(chat_key))
    except NekroError as exc:  # the call does not depend on its reports
        logger.bind(call_id=call_id, error=str(exc)).info("mcp_progress_missing")
        return None


async def _report_progress(reader: Reader, call_id: str, report: Report) -> None:
    reported = -1.0
    while True:
        while reader.live:
            event = reader.live.popleft().event
            if event.call_id != call_id:
                continue
            number, end, text = _progress(event)
            # The protocol requires that the number grows.
            if number > reported:
                reported = number
                await report(number, end, text)
        await reader.wait()


def _progress(event: Event) -> tuple[float, float | None, str]:
    """Return percent and message of a call, or characters and text of what a run printed."""
    data = event.data
    if event.type == EventType.OUTPUT_CHUNK:
        text = str(data.get("text") or "")
        return float(data.get("offset") or 0) + len(text), None, text
    if event.type == EventType.CALL_PROGRESS:
        return float(data.get("percent") or 0), _PERCENT, str(data.get("message") or "")
    return -1.0, None, ""
