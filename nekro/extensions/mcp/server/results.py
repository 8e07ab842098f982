"""Values and errors of methods as results of tools."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from typing import Any

from mcp_types import CallToolResult, ContentBlock, ImageContent, TextContent

from nekro.agent.multimodal import image_data
from nekro.app.calls.results import value_of
from nekro.app.composition import Services
from nekro.base.plain import encodable, to_json_value
from nekro.gateway.problems import ProblemError
from nekro.wire.invocation import Envelope
from nekro_agent.errors import NekroError

__all__ = ["data_result", "error_result", "failure_text", "method_result", "text_of"]


def method_result(envelope: Envelope, *, max_bytes: int) -> CallToolResult:
    """Return the result of a method: its value as text and as ``{"result": …}``.

    The text of an AGENT method is the value; the parts of a MULTIMODAL_AGENT method are contents.

    Args:
        max_bytes: of a value that is read.
    """
    value = encodable(to_json_value(value_of(envelope, max_bytes=max_bytes)))
    content = _parts(value) if envelope.segments is not None else [_text(text_of(value))]
    structured = None if envelope.segments is not None else {"result": value}
    return CallToolResult(content=content, structured_content=structured)


def data_result(data: Mapping[str, Any], text: str, *, is_error: bool = False) -> CallToolResult:
    """Return an object as a result, with a text for those who read no objects."""
    return CallToolResult(
        content=[_text(encodable(text))], structured_content=encodable(dict(data)), is_error=is_error
    )


def error_result(error: NekroError | ProblemError, services: Services) -> CallToolResult:
    """Return an error as a result, so that the model reads it."""
    return CallToolResult(content=[_text(failure_text(error, services))], is_error=True)


def failure_text(error: NekroError | ProblemError, services: Services) -> str:
    """Return the code and the redacted text of an error."""
    text = error.detail if isinstance(error, ProblemError) else services.redactor(str(error))
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
