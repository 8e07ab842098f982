"""One call of a tool: what the server may do meanwhile, and its result as a value for code.

A server may report progress, ask a language model and ask a person. A result is read as the server sent it:
what is missing, null or of an unknown kind costs no other part. Pictures, sounds and binary resources become
files of the chat.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
import mimetypes
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final
from urllib.parse import unquote, unquote_to_bytes

from loguru import logger
from mcp_types import (
    INVALID_PARAMS,
    INVALID_REQUEST,
    CreateMessageRequest,
    CreateMessageRequestParams,
    CreateMessageResult,
    ElicitRequest,
    ElicitRequestParams,
    ElicitRequestURLParams,
    ElicitResult,
    ErrorData,
    ImageContent,
    InputRequest,
    InputResponse,
    TextContent,
)

from nekro.base.plain import encodable
from nekro.extensions.mcp.client.messages import VALUE
from nekro.extensions.mcp.client.session import Exchange
from nekro.extensions.mcp.client.tools import ListedTool, line, plain
from nekro.extensions.mcp.declarations import Sampling
from nekro.extensions.mcp.questions import Prompt, Question
from nekro.extensions.mcp.server_requests import ServerRequests
from nekro.extensions.mcp.servers import McpServer
from nekro_agent.errors import InvalidValueError, MethodFailedError, NekroError
from nekro_agent.execution.current import current_payer, payer_of, paying
from nekro_agent.files.names import HEAD_BYTES, suffix_of
from nekro_agent.schemas.agent_ctx import AgentCtx

__all__ = [
    "TOOL_ERROR",
    "exchange_of",
    "value_of",
]


_MOST_PROGRESS_CHARS: Final = 200

_MOST_REFUSAL_CHARS: Final = 500
#: Requests of a server during one call, so that it cannot flood a chat with questions.
_MOST_REQUESTS: Final = 20
#: What a picture counts in an estimate of tokens.
_PICTURE_TOKENS: Final = 1_000
#: Characters per token in an estimate.
_TOKEN_CHARS: Final = 3
#: Keys of declarations that allow requests.
_KEYS: Final = {"sampling/createMessage": "sampling", "elicitation/create": "elicitation_seconds"}


def exchange_of(ctx: AgentCtx, *, server: McpServer, tool: str, requests: ServerRequests | None) -> Exchange:
    """Return what the server may do during a call with this context.

    Args:
        tool: name of the method.
        requests: None refuses every request of the server.
    """
    last, asked = 0.0, 0
    # Read here, because requests of the server arrive in the task of its connection.
    payer = current_payer() or payer_of(server.plugin_key, ctx)

    async def on_progress(progress: float, total: float | None, message: str | None) -> None:
        nonlocal last
        if total:
            last = 100 * progress / total
        ctx.report_progress(last, line(message or "", _MOST_PROGRESS_CHARS))

    async def on_input(request: InputRequest) -> InputResponse | ErrorData:
        nonlocal asked
        asked += 1
        if asked > _MOST_REQUESTS:
            text = f"it asked for more than {_MOST_REQUESTS} answers in one call"
            return ErrorData(code=INVALID_REQUEST, message=text)
        limits = server.declaration.nekro if server.declaration is not None else None
        try:
            if requests is not None and limits is not None:
                if isinstance(request, CreateMessageRequest) and limits.sampling is not None:
                    with paying(replace(payer, tokens_per_day=limits.sampling.tokens_per_day)):
                        return await _sampled(requests, request.params, server.name, limits.sampling)
                if isinstance(request, ElicitRequest) and limits.elicitation_seconds is not None:
                    question = _question(request.params, server=server.name, tool=tool, percent=last)
                    reply = await requests.ask(question, ctx, seconds=limits.elicitation_seconds)
                    return ElicitResult(action=reply.action, content=encodable(reply.content))
        except InvalidValueError as exc:
            return ErrorData(code=INVALID_PARAMS, message=line(exc, _MOST_REFUSAL_CHARS))
        except NekroError as exc:
            return ErrorData(code=INVALID_REQUEST, message=line(exc, _MOST_REFUSAL_CHARS))
        return ErrorData(code=INVALID_REQUEST, message=_refusal(request.method))

    return Exchange(on_progress=on_progress, on_input=on_input, chat_key=ctx.from_chat_key)


async def _sampled(
    requests: ServerRequests, params: CreateMessageRequestParams, server: str, sampling: Sampling
) -> CreateMessageResult:
    answer = await requests.complete(_prompt(params, sampling), server=server, sampling=sampling)
    return CreateMessageResult(
        role="assistant",
        content=TextContent(type="text", text=encodable(answer.text)),
        model=answer.model,
        stop_reason="endTurn",
    )


def _prompt(params: CreateMessageRequestParams, sampling: Sampling) -> Prompt:
    """Return the request of a server; the context of chats that it may ask for is never included.

    Raises:
        InvalidValueError: it contains what is not supported.
    """
    if params.tools:
        raise InvalidValueError("the model cannot use tools for a server")
    messages: list[dict[str, Any]] = []
    tokens = 0
    if params.system_prompt:
        messages.append({"role": "system", "content": params.system_prompt})
        tokens += len(params.system_prompt) // _TOKEN_CHARS + 1
    for message in params.messages:
        parts: list[dict[str, Any]] = []
        for part in message.content_as_list:
            if isinstance(part, TextContent):
                parts.append({"type": "text", "text": part.text})
                tokens += len(part.text) // _TOKEN_CHARS + 1
            elif isinstance(part, ImageContent):
                url = f"data:{part.mime_type};base64,{part.data}"
                parts.append({"type": "image_url", "image_url": {"url": url}})
                tokens += _PICTURE_TOKENS
            else:
                raise InvalidValueError(f"a message may have texts and pictures, not {part.type}")
        is_text = len(parts) == 1 and parts[0]["type"] == "text"
        messages.append({"role": message.role, "content": parts[0]["text"] if is_text else parts})
    return Prompt(
        messages=messages,
        max_tokens=max(1, min(params.max_tokens, sampling.max_tokens)),
        temperature=params.temperature,
        stop=params.stop_sequences or None,
        tokens=tokens,
    )


def _question(params: ElicitRequestParams, *, server: str, tool: str, percent: float) -> Question:
    if isinstance(params, ElicitRequestURLParams):
        return Question(server=server, tool=tool, text=params.message, url=params.url, percent=percent)
    schema = params.requested_schema
    return Question(server=server, tool=tool, text=params.message, schema=schema, percent=percent)


def _refusal(method: str) -> str:
    key = _KEYS.get(method)
    reason = "which is not supported" if key is None else f"which needs `nekro.{key}` in its declaration"
    return f"it asked for {method}, {reason}"


#: Type of the error that code gets when a tool reports one.
TOOL_ERROR: Final = "McpToolError"

_MOST_PARTS: Final = 1_000

_MOST_FILES: Final = 32

_MOST_ERROR_CHARS: Final = 4_000

_DATA_URL: Final = re.compile(r"\A\s{0,32}data:([^,;]{0,100})((?:;[^,]{0,100})?),", re.IGNORECASE)

_SPACES: Final = re.compile(r"[\s\x00\ufeff]+")

_MIME_TYPE: Final = re.compile(r"[a-z]{1,40}/[a-z0-9.+_-]{1,80}", re.IGNORECASE)
#: JSON types of values, by the names that schemas have for them.
_KINDS: Final[Mapping[str, type | tuple[type, ...]]] = {
    "object": dict,
    "array": list,
    "string": str,
    "number": (int, float),
    "boolean": bool,
}


async def value_of(
    result: Mapping[str, Any], ctx: AgentCtx, *, tool: ListedTool, file_name: str, hide: Callable[[str], str]
) -> Any:
    """Return the value of a result.

    The structured content if there is one. Otherwise its parts: of one part the part itself, of several a
    list, of none None. A text is a ``str``, a file its path in the sandbox, a link to a resource and a part
    of an unknown kind a ``dict``.

    Args:
        result: as the server sent it.
        file_name: beginning of the names of files.

    Raises:
        MethodFailedError: the tool reports an error, with its text.
    """
    parts = _parts(result)
    if str(result.get("isError")).lower() in ("true", "1"):
        texts = [text for part in parts[:_MOST_PARTS] if (text := _text(part)) is not None]
        structured = result.get("structuredContent")
        if not texts and structured is not None:
            texts = [json.dumps(structured, ensure_ascii=False, default=str)]
        text = "\n".join(texts)[: 4 * _MOST_ERROR_CHARS] or "the tool reports an error without a text"
        raise MethodFailedError(TOOL_ERROR, hide(plain(text, _MOST_ERROR_CHARS)))
    structured = result.get("structuredContent")
    if structured is not None:
        if (fault := _mismatch(structured, tool.output_schema)) is not None:
            logger.bind(tool=line(tool.name, 100), fault=fault).warning("mcp_result_is_not_of_its_schema")
        return structured
    if len(parts) > _MOST_PARTS:
        raise MethodFailedError(
            "ResultError", f"the result has {len(parts)} parts; the limit is {_MOST_PARTS}"
        )
    store = _Files(ctx, file_name)
    values = [await _value(part, store) for part in parts]
    return values[0] if len(values) == 1 else values or None


def _parts(result: Mapping[str, Any]) -> list[Any]:
    """Return the parts of a result; a server may send one alone, or a value in place of the result."""
    content = result.get("content", result.get(VALUE))
    if content is None and "toolResult" in result:  # before the first version of the protocol
        content = result["toolResult"]
    if content is None:
        return []
    return content if isinstance(content, list) else [content]


def _text(part: Any) -> str | None:
    """Return the text of a part; None if it is not one."""
    text = part
    if isinstance(part, Mapping) and part.get("type", "text") == "text":
        text = part.get("text")
    return text if isinstance(text, str) else None


async def _value(part: Any, store: _Files) -> Any:
    if (text := _text(part)) is not None:
        return text
    if not isinstance(part, Mapping):
        return part
    kind = part.get("type")
    if kind == "text" and "text" in part:
        return part["text"] if part["text"] is not None else ""
    if kind in ("image", "audio") and isinstance(part.get("data"), str):
        return await store.add(part["data"], part.get("mimeType"))
    if kind == "resource":
        return await _resource(part, store)
    if kind == "resource_link":
        names = (("uri", "uri"), ("name", "name"), ("mime_type", "mimeType"), ("description", "description"))
        return {name: part[key] for name, key in names if part.get(key) is not None}
    return dict(part)


async def _resource(part: Mapping[str, Any], store: _Files) -> Any:
    """Return the content of a resource; its address, which it should have, is not needed for that."""
    resource = part.get("resource")
    if not isinstance(resource, Mapping):
        return dict(part)
    if isinstance(resource.get("text"), str):
        return resource["text"]
    if isinstance(resource.get("blob"), str):
        return await store.add(resource["blob"], resource.get("mimeType"))
    return dict(resource)


def _mismatch(value: Any, schema: Mapping[str, Any] | None) -> str | None:
    """Return how a value differs from its schema at the top; None if it does not.

    A whole check could take any time, as servers write the schemas.
    """
    if schema is None:
        return None
    kind = _KINDS.get(str(schema.get("type")))
    if kind is not None and not isinstance(value, kind):
        return f"a {type(value).__name__} in place of the type {schema['type']}"
    required = schema.get("required")
    if isinstance(value, Mapping) and isinstance(required, list):
        missing = [line(key, 60) for key in required if isinstance(key, str) and key not in value]
        if missing:
            return f"without {', '.join(missing[:10])}"
    return None


def decoded(data: str) -> tuple[bytes, str | None]:
    """Return the bytes of a base64 text as servers write it, and the type that a ``data:`` URL states.

    Line breaks, the URL-safe alphabet and missing padding are accepted.

    Raises:
        ValueError: it is not base64.
    """
    match, stated = _DATA_URL.match(data), None
    if match is not None:
        stated = match[1].strip() or None
        data = data[match.end() :]
        if not match[2].lower().endswith("base64"):
            return unquote_to_bytes(data), stated
        data = unquote(data)
    text = _SPACES.sub("", data).rstrip("=").replace("-", "+").replace("_", "/")
    return base64.b64decode(text + "=" * (-len(text) % 4), validate=True), stated


class _Files:
    """The files of one result."""

    def __init__(self, ctx: AgentCtx, name: str) -> None:
        self._ctx, self._name, self._count = ctx, name, 0

    async def add(self, data: str, mime_type: object) -> str:
        """Store a file and return its path in the sandbox."""
        self._count += 1
        if self._count > _MOST_FILES:
            raise MethodFailedError("ResultError", f"the result has more than {_MOST_FILES} files")
        try:
            content, stated = await asyncio.to_thread(decoded, data)
        except (binascii.Error, ValueError) as exc:
            raise MethodFailedError(
                "ResultError", f"a file of the result is not base64: {line(exc, 100)}"
            ) from None
        suffix = _suffix(content, mime_type, stated)
        return await self._ctx.fs.mixed_forward_file(content, f"{self._name}-{self._count}{suffix}")


def _suffix(content: bytes, *types: object) -> str:
    """Return the suffix of a file by its content, else by the first type that is one."""
    if (suffix := suffix_of(content[:HEAD_BYTES])) is not None:
        return suffix
    for stated in types:
        kind = str(stated or "").partition(";")[0].strip().lower()
        if _MIME_TYPE.fullmatch(kind) and (suffix := mimetypes.guess_extension(kind)) is not None:
            return suffix
    return ".bin"
