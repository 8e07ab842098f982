"""What a server may do while it serves a call: report progress, ask a language model, ask a person."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, Protocol

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

from connectors.mcp.declarations import Sampling
from connectors.mcp.servers import McpServer
from connectors.mcp.session import Exchange
from connectors.mcp.texts import line
from nekro_agent.errors import InvalidValueError, NekroError
from nekro_agent.execution.payer import current_payer, payer_of, paying
from nekro_agent.schemas.agent_ctx import AgentCtx

__all__ = ["Completion", "Desk", "Prompt", "Question", "Reply", "exchange_of"]

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


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A server's request to a language model."""

    #: In the form of OpenAI's chat API; every word is the server's.
    messages: list[dict[str, Any]]
    #: Longest answer, at most what the declaration allows.
    max_tokens: int
    temperature: float | None
    stop: list[str] | None
    #: Estimate of the tokens of ``messages``.
    tokens: int


@dataclass(frozen=True, kw_only=True)
class Completion:
    """A model's answer."""

    text: str
    model: str


@dataclass(frozen=True, kw_only=True)
class Question:
    """A server's question to a person; every text is the server's."""

    server: str
    #: Name of the method that was called.
    tool: str
    text: str
    #: JSON schema of the fields of the answer, of simple types; None for a question with a URL.
    schema: Mapping[str, Any] | None = None
    #: Address that the person is asked to open.
    url: str | None = None
    #: Progress of the call so far.
    percent: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What a person answered; ``cancel`` without an answer."""

    action: Literal["accept", "decline", "cancel"]
    content: dict[str, Any] | None = None


class Desk(Protocol):
    """Serves what servers ask for."""

    async def complete(self, prompt: Prompt, *, server: str, sampling: Sampling) -> Completion:
        """Ask a language model, within the budget of the declaration.

        Raises:
            NekroError: the budget is used up, the group of models is unknown, or the model did not answer.
        """
        ...

    async def ask(self, question: Question, ctx: AgentCtx, *, seconds: float) -> Reply:
        """Ask the people of the call's chat, and wait for an answer.

        Raises:
            NekroError: the call belongs to no chat, or the database does not answer.
        """
        ...


def exchange_of(ctx: AgentCtx, *, server: McpServer, tool: str, desk: Desk | None) -> Exchange:
    """Return what the server may do during a call with this context.

    Args:
        tool: name of the method.
        desk: None refuses every request of the server.
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
            if desk is not None and limits is not None:
                if isinstance(request, CreateMessageRequest) and limits.sampling is not None:
                    with paying(replace(payer, tokens_per_day=limits.sampling.tokens_per_day)):
                        return await _sampled(desk, request.params, server.name, limits.sampling)
                if isinstance(request, ElicitRequest) and limits.elicitation_seconds is not None:
                    question = _question(request.params, server=server.name, tool=tool, percent=last)
                    reply = await desk.ask(question, ctx, seconds=limits.elicitation_seconds)
                    return ElicitResult(action=reply.action, content=reply.content)
        except InvalidValueError as exc:
            return ErrorData(code=INVALID_PARAMS, message=line(exc, _MOST_ERROR_CHARS))
        except NekroError as exc:
            return ErrorData(code=INVALID_REQUEST, message=line(exc, _MOST_ERROR_CHARS))
        return ErrorData(code=INVALID_REQUEST, message=_refusal(request.method))

    return Exchange(on_progress=on_progress, on_input=on_input, chat_key=ctx.from_chat_key)


async def _sampled(
    desk: Desk, params: CreateMessageRequestParams, server: str, sampling: Sampling
) -> CreateMessageResult:
    answer = await desk.complete(_prompt(params, sampling), server=server, sampling=sampling)
    return CreateMessageResult(
        role="assistant",
        content=TextContent(type="text", text=answer.text),
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
