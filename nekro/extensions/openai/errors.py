"""Errors in the form that clients of OpenAI's API read."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from http import HTTPStatus
from typing import Any, Final

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from nekro.gateway.problems import ProblemError, openai_error, shown_text, status_of
from nekro.gateway.routing import KeyedRoute
from nekro.gateway.web.responses import JsonAnswer
from nekro_agent.errors import NekroError

__all__ = ["NO_RETRY", "APIError", "OpenAIRoute"]

#: OpenAI's client repeats requests that failed; one whose message is recorded must not be repeated.
NO_RETRY: Final = {"x-should-retry": "false"}


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
            except (APIError, ProblemError, NekroError, RequestValidationError, HTTPException) as exc:
                return _answer(request, exc)

        return guarded


def _answer(request: Request, error: Exception) -> Response:
    headers: Mapping[str, str] | None = None
    param = None
    if isinstance(error, APIError):
        status, code, param, headers = error.status, error.code, error.param, error.headers
        message = str(error)
    elif isinstance(error, ProblemError):
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
