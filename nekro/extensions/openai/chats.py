"""Which chat a request is for, the posting of its message, and errors in the form that clients read."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from http import HTTPStatus
from typing import Any, Final

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from nekro.app.rounds.intake import AlsoWrite
from nekro.app.services import Services
from nekro.gateway.idempotency import IdempotentRequest, once_of
from nekro.gateway.problems import ErrorForm, shown_text, status_of
from nekro.gateway.web.bodies import KeyedRoute
from nekro.gateway.web.responses import JsonAnswer
from nekro.operations.actor import Identity, RefusedError, Scope
from nekro.operations.posting import post_message, stored_content
from nekro_agent.errors import NekroError
from nekro_agent.ports import IncomingMessage
from nekro_agent.shared_clock import shared_time
from nekro_client.models import NewPart
from storage.listings.chats import TRANSIENT

__all__ = [
    "ERROR_FORM",
    "MODEL",
    "NO_RETRY",
    "APIError",
    "OpenAIRoute",
    "Posted",
    "chosen_chat",
    "has_many_chats",
    "once_for",
    "openai_error",
    "post",
    "require_model",
    "stated_conversation",
    "stated_person",
    "transient_chat",
]


#: OpenAI's client repeats requests that failed; one whose message is recorded must not be repeated.
NO_RETRY: Final = {"x-should-retry": "false"}


_ERROR_TYPES: Final = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
}


def openai_error(status: int, code: str, message: str, *, param: str | None = None) -> dict[str, Any]:
    """Return an error as OpenAI's API words it; ``param`` names the wrong field, None for none."""
    kind = _ERROR_TYPES.get(HTTPStatus(status), "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


#: Clients of this API read no other form, also where no route is.
ERROR_FORM: Final = ErrorForm(
    body_of=lambda problem: openai_error(problem.status, problem.code, problem.detail),
    documented={
        "description": "An error, in the form of OpenAI's API.",
        "content": {
            "application/json": {
                "schema": {"type": "object", "required": ["error"]},
                "example": openai_error(
                    HTTPStatus.BAD_REQUEST,
                    "model_not_found",
                    "model: there is one model, 'nekro'",
                    param="model",
                ),
            }
        },
    },
)


class APIError(Exception):
    """Ends a request with an error."""

    def __init__(
        self,
        status: HTTPStatus,
        code: str,
        message: str,
        *,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """``code`` is stable; ``message`` says what to do; ``param`` names the wrong field, None for none."""
        super().__init__(message)
        self.status, self.code, self.param = status, code, param
        self.headers = dict(headers or {})


class OpenAIRoute(KeyedRoute):
    """A route whose errors have OpenAI's form."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the handler of requests."""
        handle = super().get_route_handler()

        async def guarded(request: Request) -> Response:
            try:
                return await handle(request)
            except (APIError, RefusedError, NekroError, RequestValidationError, HTTPException) as exc:
                return _answer(request, exc)

        return guarded


def _answer(request: Request, error: Exception) -> Response:
    headers: Mapping[str, str] | None = None
    param = None
    if isinstance(error, APIError):
        status, code, param, headers = error.status, error.code, error.param, error.headers
        message = str(error)
    elif isinstance(error, RefusedError):
        status, code, message, headers = error.status, error.code, error.detail, error.headers
    elif isinstance(error, RequestValidationError):
        first = error.errors()[0]
        status, code = HTTPStatus.BAD_REQUEST, "invalid_request"
        param = ".".join(str(part) for part in first["loc"][1:]) or None
        message = f"{param or 'the body'}: {first['msg']}"
    elif isinstance(error, HTTPException):
        status, message, headers = HTTPStatus(error.status_code), str(error.detail), error.headers
        code = status.name.lower()
    elif isinstance(error, NekroError):
        status, code, message = status_of(error), error.code, shown_text(request, error)
        headers = NO_RETRY if status is HTTPStatus.INSUFFICIENT_STORAGE else None
    else:
        raise error
    text = message.encode("utf-8", "backslashreplace").decode()
    return JsonAnswer(openai_error(status, code, text, param=param), status_code=status, headers=headers)


#: The one model: the agent, with the language model of its settings.
MODEL: Final = "nekro"
#: How the keys of chats begin that a key of all chats makes.
_START: Final = "openai-"
#: Person of a request that states none.
_PERSON: Final = "openai-user"
#: Longest id of a person or a conversation in a header.
_MOST_HEADER_CHARS: Final = 512


def require_model(model: str) -> None:
    """Return if a model exists.

    Raises:
        APIError: it does not.
    """
    if model != MODEL:
        raise APIError(
            HTTPStatus.NOT_FOUND,
            "model_not_found",
            f"there is no model {model[:100]!r}; the agent is {MODEL!r}",
            param="model",
        )


def chosen_chat(identity: Identity, header: str | None, *conversation: str | None) -> str:
    """Return the key of the chat of a request.

    Args:
        header: value of ``X-Nekro-Chat``, which names the chat itself.
        conversation: what the client states about it: user, conversation. The same key with the same
            values gets the same chat, and no other key does, unless its chats are only one.

    Raises:
        RefusedError: the key may not post, or not to this chat.
    """
    if header is not None:
        key = header.strip()
        if not key:
            raise APIError(HTTPStatus.BAD_REQUEST, "invalid_value", "the header X-Nekro-Chat is empty")
    else:
        key = _derived(identity, conversation)
    try:
        identity.require(Scope.POST, chat_key=key)
        identity.require(Scope.READ)
    except RefusedError as exc:
        if header is None and exc.status is HTTPStatus.NOT_FOUND:
            detail = "the key has none of the chats that requests without X-Nekro-Chat get; send that header"
            raise RefusedError(HTTPStatus.NOT_FOUND, "not_found", detail) from exc
        raise
    return key


def has_many_chats(identity: Identity) -> bool:
    """Whether a key has more than one chat."""
    return identity.chat_prefix != identity.chats


def transient_chat(identity: Identity, request_id: str) -> str:
    """Return the key of a chat for one request alone, which lists leave out.

    Raises:
        APIError: the key has one chat only.
        RefusedError: the key may not post.
    """
    if not has_many_chats(identity):
        detail = "this request needs a chat of its own, and the key has one only"
        raise APIError(HTTPStatus.BAD_REQUEST, "no_chat_for_request", detail)
    digest = _digest(identity, (None, request_id))
    key = f"{identity.chat_prefix or _START}{TRANSIENT}{digest}"
    identity.require(Scope.POST, chat_key=key)
    identity.require(Scope.READ)
    return key


def stated_person(request: Request, person: str | None) -> str | None:
    """Return the person that a request states, in its body or as Open WebUI does."""
    return person or _header(request, "x-openwebui-user-id")


def stated_conversation(request: Request) -> str | None:
    """Return the conversation that Open WebUI states."""
    return _header(request, "x-openwebui-chat-id")


def _header(request: Request, name: str) -> str | None:
    value = request.headers.get(name, "").strip()
    if len(value) > _MOST_HEADER_CHARS:
        detail = f"the header {name} has more than {_MOST_HEADER_CHARS} characters"
        raise APIError(HTTPStatus.BAD_REQUEST, "invalid_value", detail)
    return value or None


@dataclass(frozen=True, kw_only=True)
class Posted:
    """What a posted message has caused; repetitions of its request get the same."""

    #: None when it starts no turn.
    turn_id: str | None
    created_at: datetime
    #: False: a plugin's hook blocked the message.
    is_recorded: bool = True


async def once_for(request: Request, chat_key: str) -> IdempotentRequest:
    """Return a request; its repetition must have the same body and chat."""
    chat = chat_key.encode("utf-8", "surrogatepass")
    return await once_of(request, body=b"%d:%s%s" % (len(chat), chat, await request.body()))


async def post(
    services: Services,
    identity: Identity,
    chat_key: str,
    parts: Sequence[NewPart],
    user: str | None,
    *,
    once: IdempotentRequest,
    also: AlsoWrite | None = None,
) -> Posted:
    """Post a person's message, and what is kept with it; a repetition of the request finds it.

    Raises:
        RefusedError: a part is not valid, or as from ``post_message``.
    """

    async def message() -> IncomingMessage:
        person = identity.user_id or user or _PERSON
        content = await stored_content(services, identity, chat_key, parts)
        return IncomingMessage(
            chat_key=chat_key,
            text=content.text,
            user_id=person,
            user_name=person,
            content_data=content.segments,
        )

    receipt = await post_message(
        services, identity, chat_key, message, once=once.name, digest=once.body_digest, also=also
    )
    if receipt is None:
        return Posted(turn_id=None, created_at=shared_time(), is_recorded=False)
    return Posted(turn_id=receipt.turn_id, created_at=receipt.message.created_at)


def _derived(identity: Identity, conversation: Sequence[str | None]) -> str:
    """Return a chat key that fits the pattern of the key: its fixed beginning, then a digest."""
    if not has_many_chats(identity):
        return identity.chats
    return f"{identity.chat_prefix or _START}private_{_digest(identity, conversation)}"


def _digest(identity: Identity, conversation: Sequence[str | None]) -> str:
    text = repr((identity.key_id, *conversation))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:24]
