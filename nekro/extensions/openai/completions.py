"""``/v1/models`` and ``/v1/chat/completions``."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from http import HTTPStatus
from typing import Annotated, Any, Final

from fastapi import APIRouter, Header, Request, Response

from nekro.extensions.openai.answers import (
    QUEUED_SECONDS,
    AnswerEnd,
    AnswerReader,
    Part,
    Piece,
    ProgramStep,
    TurnUsage,
    Words,
)
from nekro.extensions.openai.bodies import CompletionBody, is_task, newest_message
from nekro.extensions.openai.chats import (
    MODEL,
    NO_RETRY,
    APIError,
    OpenAIRoute,
    Posted,
    chosen_chat,
    once_for,
    openai_error,
    post,
    require_model,
    stated_conversation,
    stated_person,
    transient_chat,
)
from nekro.gateway.dependencies import HubDep, IdentityDep, ServicesDep, take_stream
from nekro.gateway.streams.hub import SlowReaderError
from nekro.gateway.web.responses import EventResponse, JsonAnswer
from nekro_agent.errors import BudgetExceededError, NekroError

__all__ = ["router"]

router = APIRouter(route_class=OpenAIRoute, tags=["openai"])

#: Between two messages of an answer.
_BETWEEN: Final = "\n\n"
_STATUSES: Final = {
    "turn_timeout": HTTPStatus.GATEWAY_TIMEOUT,
    BudgetExceededError.code: HTTPStatus.TOO_MANY_REQUESTS,
}


@router.get("/v1/models")
async def list_models(identity: IdentityDep) -> dict[str, Any]:
    """List the one model, which is the agent."""
    return {"object": "list", "data": [_model()]}


@router.get("/v1/models/{model}")
async def get_model(model: str, identity: IdentityDep) -> dict[str, Any]:
    """Return the model."""
    require_model(model)
    return _model()


@router.post("/v1/chat/completions", response_class=Response)
async def complete_chat(
    body: CompletionBody,
    request: Request,
    services: ServicesDep,
    hub: HubDep,
    identity: IdentityDep,
    x_nekro_chat: Annotated[str | None, Header()] = None,
) -> Response:
    """Post the newest message of the user; the answer is what the agent sends to the chat in that turn.

    What a front end asks for itself, such as a title of a conversation, gets a chat of its own.

    A repetition with the same `Idempotency-Key` posts nothing and has the same answer.
    """
    require_model(body.model)
    body.refuse_demands()
    if body.n not in (None, 1):
        raise APIError(HTTPStatus.BAD_REQUEST, "invalid_value", "n: there is one answer", param="n")
    parts = newest_message(body.messages, param="messages")
    person, conversation = stated_person(request, body.person), stated_conversation(request)
    if body.stream:
        take_stream(request, identity)
    if is_task(body.messages):
        once = await once_for(request, "")
        chat_key = transient_chat(identity, once.id)
    else:
        stated = (person,) if conversation is None else (person, conversation)
        chat_key = chosen_chat(identity, x_nekro_chat, *stated)
        once = await once_for(request, chat_key)
    posted = await post(services, identity, chat_key, parts, person, once=once)
    completion = _Completion(posted, AnswerReader(request, services, hub))
    if body.stream:
        with_usage = bool(body.stream_options and body.stream_options.include_usage)
        return EventResponse(completion.chunks(with_usage=with_usage), sep="\n")
    return await completion.whole(seconds=services.settings.agent.turn_seconds + QUEUED_SECONDS)


class _Completion:
    """The answer to one request."""

    def __init__(self, posted: Posted, reader: AnswerReader) -> None:
        self._turn_id = posted.turn_id
        self._reader = reader
        self._created = int(posted.created_at.timestamp())
        self._id = f"chatcmpl-{posted.turn_id or 'none'}"

    async def whole(self, *, seconds: float) -> Response:
        """Wait for the end of the turn; return the answer."""
        texts: list[str] = []
        end: AnswerEnd | None = None
        try:
            async with asyncio.timeout(seconds):
                async for part in self._parts():
                    if isinstance(part, AnswerEnd):
                        end = part
                    elif isinstance(part, Piece) and part.text and not part.is_preface:
                        texts.append(part.text)
        except TimeoutError as exc:
            raise self._error("turn_timeout", f"the turn {self._turn_id} has not ended") from exc
        except SlowReaderError as exc:
            raise self._error("overloaded", str(exc)) from exc
        if end is None:
            raise self._error("stopping", _stopped(self._turn_id))
        if end.error is not None:
            raise self._error(*end.error)
        message = {"role": "assistant", "content": _BETWEEN.join(texts), "refusal": None}
        choice = {"index": 0, "message": message, "finish_reason": "stop", "logprobs": None}
        return JsonAnswer(
            {
                "id": self._id,
                "object": "chat.completion",
                "created": self._created,
                "model": MODEL,
                "choices": [choice],
                "usage": _usage(end.usage),
            }
        )

    async def chunks(self, *, with_usage: bool) -> AsyncIterator[dict[str, str]]:
        """Yield the answer in pieces: words as they are written, each message, programs as reasoning.

        Words that were withdrawn cannot be taken back; the messages follow them, as they follow each other.
        """
        yield self._chunk({"role": "assistant", "content": ""})
        content = _Content()
        try:
            async for part in self._parts(with_live=True):
                if isinstance(part, ProgramStep):
                    yield self._chunk({"reasoning_content": _reasoning(part)})
                    continue
                if not isinstance(part, AnswerEnd):
                    if text := content.grown_by(part):
                        yield self._chunk({"content": text})
                    continue
                if part.error is not None:
                    yield _failure(*part.error)
                    return
                yield self._chunk({}, finish_reason="stop")
                if with_usage:
                    yield self._chunk(None, usage=_usage(part.usage))
                yield {"data": "[DONE]"}
                return
            yield _failure("stopping", _stopped(self._turn_id))
        except SlowReaderError as exc:
            yield _failure("overloaded", str(exc))
        except NekroError as exc:
            yield _failure(exc.code, "the answer cannot be read at present; the turn goes on")

    async def _parts(self, *, with_live: bool = False) -> AsyncIterator[Part]:
        if self._turn_id is None:  # blocked, or not addressed to the agent
            yield AnswerEnd(state="done", error=None, usage=TurnUsage())
            return
        async for part in self._reader.read(self._turn_id, with_live=with_live):
            yield part

    def _chunk(
        self,
        delta: dict[str, Any] | None,
        *,
        finish_reason: str | None = None,
        usage: dict[str, Any] | None = None,
    ) -> dict[str, str]:
        choice = {"index": 0, "delta": delta, "finish_reason": finish_reason, "logprobs": None}
        chunk = {
            "id": self._id,
            "object": "chat.completion.chunk",
            "created": self._created,
            "model": MODEL,
            "choices": [] if delta is None else [choice],
            "usage": usage,
        }
        return {"data": json.dumps(chunk)}

    def _error(self, code: str, message: str) -> APIError:
        return APIError(_status_of(code), code, message, headers=NO_RETRY)


class _Content:
    """The text of a streamed answer."""

    def __init__(self) -> None:
        self._has_text = False
        #: Characters of the next piece that its words had.
        self._shown = 0

    def grown_by(self, part: Words | Piece) -> str:
        """Return the text that a part of the answer adds to it."""
        new = part.text if isinstance(part, Words) else part.text[self._shown :]
        begins = new and not self._shown and self._has_text
        self._shown = self._shown + len(new) if isinstance(part, Words) else 0
        self._has_text |= bool(new)
        return _BETWEEN + new if begins else new


def _reasoning(part: ProgramStep) -> str:
    return f"```python\n{part.code}\n```\n" if part.code else f"{part.method}\n"


def _failure(code: str, message: str) -> dict[str, str]:
    return {"data": json.dumps(openai_error(_status_of(code), code, message))}


def _stopped(turn_id: str | None) -> str:
    return f"the gateway stopped, or the key is no longer valid; the turn {turn_id} goes on"


def _status_of(code: str) -> HTTPStatus:
    """Return the status of a turn that ended with a code."""
    return _STATUSES.get(code, HTTPStatus.BAD_GATEWAY)


def _usage(usage: TurnUsage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        **usage.mark,
    }


def _model() -> dict[str, Any]:
    return {"id": MODEL, "object": "model", "created": 0, "owned_by": "nekro-workers"}
