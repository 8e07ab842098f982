"""Results of tools as values for code; pictures, sounds and binary resources become files of the chat."""

from __future__ import annotations

import asyncio
import base64
import binascii
import mimetypes
from collections.abc import Callable
from typing import Any, Final

from mcp_types import (
    AudioContent,
    BlobResourceContents,
    CallToolResult,
    EmbeddedResource,
    ImageContent,
    ResourceLink,
    TextContent,
)

from connectors.mcp.texts import line, plain
from nekro_agent.errors import MethodFailedError
from nekro_agent.schemas.agent_ctx import AgentCtx

__all__ = ["TOOL_ERROR", "value_of"]

#: Type of the error that code gets when a tool reports one.
TOOL_ERROR: Final = "McpToolError"
_MOST_PARTS: Final = 1_000
_MOST_FILES: Final = 32
_MOST_ERROR_CHARS: Final = 4_000


async def value_of(
    result: CallToolResult, ctx: AgentCtx, *, file_name: str, hide: Callable[[str], str]
) -> Any:
    """Return the value of a result.

    The structured content if there is one. Otherwise its parts: of one part the part itself, of several a
    list, of none None. A text is a ``str``, a file its path in the sandbox, a link to a resource a ``dict``.

    Args:
        file_name: beginning of the names of files.

    Raises:
        MethodFailedError: the tool reports an error, with its text.
    """
    if result.is_error:
        texts = [part.text for part in result.content[:_MOST_PARTS] if isinstance(part, TextContent)]
        text = "\n".join(texts)[: 4 * _MOST_ERROR_CHARS] or "the tool reports an error without a text"
        raise MethodFailedError(TOOL_ERROR, hide(plain(text, _MOST_ERROR_CHARS)))
    if result.structured_content is not None:
        return result.structured_content
    if len(result.content) > _MOST_PARTS:
        raise MethodFailedError(
            "ResultError", f"the result has {len(result.content)} parts; the limit is {_MOST_PARTS}"
        )
    store = _Files(ctx, file_name)
    values = [await _value(part, store) for part in result.content]
    return values[0] if len(values) == 1 else values or None


async def _value(part: Any, store: _Files) -> Any:
    if isinstance(part, TextContent):
        return part.text
    if isinstance(part, ImageContent | AudioContent):
        return await store.add(part.data, part.mime_type)
    if isinstance(part, EmbeddedResource):
        resource = part.resource
        if isinstance(resource, BlobResourceContents):
            return await store.add(resource.blob, resource.mime_type)
        return resource.text
    if isinstance(part, ResourceLink):
        link = {
            "uri": part.uri,
            "name": part.name,
            "mime_type": part.mime_type,
            "description": part.description,
        }
        return {key: value for key, value in link.items() if value is not None}
    return part.model_dump(mode="json", by_alias=True, exclude_none=True)


class _Files:
    """The files of one result."""

    def __init__(self, ctx: AgentCtx, name: str) -> None:
        self._ctx, self._name, self._count = ctx, name, 0

    async def add(self, data: str, mime_type: str | None) -> str:
        """Store a file and return its path in the sandbox."""
        self._count += 1
        if self._count > _MOST_FILES:
            raise MethodFailedError("ResultError", f"the result has more than {_MOST_FILES} files")
        try:
            content = await asyncio.to_thread(base64.b64decode, data, validate=True)
        except (binascii.Error, ValueError) as exc:
            raise MethodFailedError(
                "ResultError", f"a file of the result is not base64: {line(exc, 100)}"
            ) from None
        suffix = mimetypes.guess_extension((mime_type or "").partition(";")[0].strip()) or ".bin"
        return await self._ctx.fs.mixed_forward_file(content, f"{self._name}-{self._count}{suffix}")
