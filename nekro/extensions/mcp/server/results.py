"""Values and errors of methods as results of tools; progress and output while a client waits."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, TypeAlias

from loguru import logger
from mcp_types import CallToolResult, ContentBlock, ImageContent, TextContent

from nekro.agent.multimodal import image_data
from nekro.app.services import Services
from nekro.base.plain import encodable
from nekro.base.tasks import end_tasks
from nekro.gateway.streams.events import Reader
from nekro.gateway.streams.hub import EventHub
from nekro.operations.actor import RefusedError
from nekro_agent.errors import NekroError
from nekro_agent.methods import SandboxMethodType
from nekro_client.models import Call, Event, EventType

__all__ = [
    "Report",
    "data_result",
    "error_result",
    "failure_text",
    "method_result",
    "reported",
    "text_of",
]


def method_result(call: Call) -> CallToolResult:
    """Return the result of a call: its value as text and as ``{"result": …}``.

    The text of an AGENT method is the value; the parts of a MULTIMODAL_AGENT method are contents.
    """
    value = encodable(call.value)
    if call.type == SandboxMethodType.MULTIMODAL_AGENT.value and isinstance(value, list):
        return CallToolResult(content=_parts(value))
    return CallToolResult(content=[_text(text_of(value))], structured_content={"result": value})


def data_result(data: Mapping[str, Any], text: str, *, is_error: bool = False) -> CallToolResult:
    """Return an object as a result, with a text for those who read no objects."""
    return CallToolResult(
        content=[_text(encodable(text))], structured_content=encodable(dict(data)), is_error=is_error
    )


def error_result(error: NekroError | RefusedError, services: Services) -> CallToolResult:
    """Return an error as a result, so that the model reads it."""
    return CallToolResult(content=[_text(failure_text(error, services))], is_error=True)


def failure_text(error: NekroError | RefusedError, services: Services) -> str:
    """Return the code and the redacted text of an error."""
    text = error.detail if isinstance(error, RefusedError) else services.redactor(str(error))
    return str(encodable(f"{error.code}: {text}"))


def text_of(value: object) -> str:
    """Return a value as text: a string as it is, anything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, allow_nan=False)


def _parts(segments: Sequence[Any]) -> list[ContentBlock]:
    return [_part(segment) for segment in segments] or [_text("")]


def _part(segment: Any) -> ContentBlock:
    if isinstance(segment, Mapping) and segment.get("type") == "text":
        return _text(str(segment.get("text") or ""))
    image = segment.get("image_url") if isinstance(segment, Mapping) else None
    url = image.get("url") if isinstance(image, Mapping) else image
    decoded = image_data(url) if isinstance(url, str) and url.startswith("data:") else None
    if decoded is not None:
        media_type, content = decoded
        return ImageContent(data=base64.b64encode(content).decode(), mime_type=media_type)
    return _text(text_of(segment))


def _text(text: str) -> TextContent:
    return TextContent(text=text)


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
