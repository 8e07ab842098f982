"""What a server may do while it serves a call: report progress, ask a language model, ask a person."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

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
from nekro.extensions.mcp.client.client_requests import ClientRequests, Prompt, Question
from nekro.extensions.mcp.client.declarations import Sampling
from nekro.extensions.mcp.client.servers import McpServer
from nekro.extensions.mcp.client.session import Exchange
from nekro.extensions.mcp.client.texts import line
from nekro_agent.errors import InvalidValueError, NekroError
from nekro_agent.execution.payer import current_payer, payer_of, paying
from nekro_agent.schemas.agent_ctx import AgentCtx

__all__ = ["exchange_of"]

_MOST_PROGRESS_CHARS: Final = 200
_MOST_ERROR_CHARS: Final = 500
#: Requests of a server during one call, so that it cannot flood a chat with questions.
_MOST_REQUESTS: Final = 20
#: What a picture counts in an estimate of tokens.
_PICTURE_TOKENS: Final = 1_000
#: Characters per token in an estimate.
_TOKEN_CHARS: Final = 3
#: Keys of declarations that allow requests.
_KEYS: Final = {"sampling/createMessage": "sampling", "elicitation/create": "elicitation_seconds"}


def exchange_of(
    ctx: AgentCtx, *, server: McpServer, tool: str, client_requests: ClientRequests | None
) -> Exchange:
    """Return what the server may do during a call with this context.

    Args:
        tool: name of the method.
        client_requests: None refuses every request of the server.
    """
    last, requests = 0.0, 0
    # Read here, because requests of the server arrive in the task of its connection.
    payer = current_payer() or payer_of(server.plugin_key, ctx)

    async def on_progress(progress: float, total: float | None, message: str | None) -> None:
        nonlocal last
        if total:
            last = 100 * progress / total
        ctx.report_progress(last, line(message or "", _MOST_PROGRESS_CHARS))

    async def on_input(request: InputRequest) -> InputResponse | ErrorData:
        nonlocal requests
        requests += 1
        if requests > _MOST_REQUESTS:
            text = f"it asked for more than {_MOST_REQUESTS} answers in one call"
            return ErrorData(code=INVALID_REQUEST, message=text)
        limits = server.declaration.nekro if server.declaration is not None else None
        try:
            if client_requests is not None and limits is not None:
                if isinstance(request, CreateMessageRequest) and limits.sampling is not None:
                    with paying(replace(payer, tokens_per_day=limits.sampling.tokens_per_day)):
                        return await _sampled(client_requests, request.params, server.name, limits.sampling)
                if isinstance(request, ElicitRequest) and limits.elicitation_seconds is not None:
                    question = _question(request.params, server=server.name, tool=tool, percent=last)
                    reply = await client_requests.ask(question, ctx, seconds=limits.elicitation_seconds)
                    return ElicitResult(action=reply.action, content=encodable(reply.content))
        except InvalidValueError as exc:
            return ErrorData(code=INVALID_PARAMS, message=line(exc, _MOST_ERROR_CHARS))
        except NekroError as exc:
            return ErrorData(code=INVALID_REQUEST, message=line(exc, _MOST_ERROR_CHARS))
        return ErrorData(code=INVALID_REQUEST, message=_refusal(request.method))

    return Exchange(on_progress=on_progress, on_input=on_input, chat_key=ctx.from_chat_key)


async def _sampled(
    client_requests: ClientRequests, params: CreateMessageRequestParams, server: str, sampling: Sampling
) -> CreateMessageResult:
    answer = await client_requests.complete(_prompt(params, sampling), server=server, sampling=sampling)
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
