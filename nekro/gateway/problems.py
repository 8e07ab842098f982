"""Errors as problem documents (RFC 9457).

Every error of the API has this form, with the stable code of its error class. An extension may state another
form for its own paths, whose clients read no other. Unexpected errors are answered by
``nekro.gateway.web.requests.RequestContext``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from nekro.gateway.web.responses import JsonAnswer
from nekro.operations.actor import RefusedError
from nekro_agent.errors import (
    AlreadyDecidedError,
    ArgumentError,
    BrokerUnavailableError,
    BudgetExceededError,
    CallCancelledError,
    CallTimeoutError,
    ConflictError,
    FencedError,
    FilesQuotaError,
    InvalidValueError,
    LLMError,
    MessageRefusedError,
    MethodDisabledError,
    MethodNotFoundError,
    NekroError,
    NotApprovedError,
    NotFoundError,
    OutcomeUnknownError,
    OverloadedError,
    PluginError,
    SandboxError,
    StorageQuotaError,
    StorageUnavailableError,
    UploadQuotaError,
    UsageError,
)
from nekro_client.models import Problem

__all__ = [
    "PROBLEM_TYPE",
    "ErrorForm",
    "install",
    "problem_of",
    "problem_response",
    "shown_text",
    "status_of",
]

PROBLEM_TYPE: Final = "application/problem+json"
#: Most characters of a detail, which may quote the request.
_MOST_CHARS: Final = 4000

#: The first match wins, so subclasses come before their parents.
_STATUS: Final[tuple[tuple[type[NekroError], HTTPStatus], ...]] = (
    (MethodNotFoundError, HTTPStatus.NOT_FOUND),
    (MethodDisabledError, HTTPStatus.CONFLICT),
    (ArgumentError, HTTPStatus.UNPROCESSABLE_ENTITY),
    (InvalidValueError, HTTPStatus.UNPROCESSABLE_ENTITY),
    (UsageError, HTTPStatus.UNPROCESSABLE_ENTITY),
    (UploadQuotaError, HTTPStatus.INSUFFICIENT_STORAGE),
    (CallTimeoutError, HTTPStatus.GATEWAY_TIMEOUT),
    (CallCancelledError, HTTPStatus.CONFLICT),
    (OutcomeUnknownError, HTTPStatus.BAD_GATEWAY),
    (NotApprovedError, HTTPStatus.FORBIDDEN),
    # The plugin's own failure, which no other gateway or worker would avoid: no outage.
    (PluginError, HTTPStatus.UNPROCESSABLE_ENTITY),
    (OverloadedError, HTTPStatus.SERVICE_UNAVAILABLE),
    (BrokerUnavailableError, HTTPStatus.SERVICE_UNAVAILABLE),
    (MessageRefusedError, HTTPStatus.CONFLICT),
    (NotFoundError, HTTPStatus.NOT_FOUND),
    (ConflictError, HTTPStatus.CONFLICT),
    (AlreadyDecidedError, HTTPStatus.CONFLICT),
    (FencedError, HTTPStatus.CONFLICT),
    (FilesQuotaError, HTTPStatus.INSUFFICIENT_STORAGE),
    (StorageQuotaError, HTTPStatus.INSUFFICIENT_STORAGE),
    (StorageUnavailableError, HTTPStatus.SERVICE_UNAVAILABLE),
    (SandboxError, HTTPStatus.SERVICE_UNAVAILABLE),
    (BudgetExceededError, HTTPStatus.TOO_MANY_REQUESTS),
    (LLMError, HTTPStatus.SERVICE_UNAVAILABLE),
)


@dataclass(frozen=True, kw_only=True)
class ErrorForm:
    """The form of errors below a path."""

    #: Returns the body that describes a problem.
    body_of: Callable[[Problem], dict[str, Any]]
    #: The response in the OpenAPI document.
    documented: Mapping[str, Any]


def status_of(error: NekroError) -> HTTPStatus:
    """Return the HTTP status of an error."""
    for kind, status in _STATUS:
        if isinstance(error, kind):
            return status
    return HTTPStatus.INTERNAL_SERVER_ERROR


def shown_text(request: Request, error: NekroError) -> str:
    """Return an error's text without secrets: it may quote paths of this host, or values of settings."""
    redact: Callable[[str], str] = request.app.state.services.redactor
    return redact(str(error))


def problem_of(request: Request, error: NekroError | RefusedError) -> Problem:
    """Return the problem document of an error."""
    if isinstance(error, RefusedError):
        return _problem(request, error.status, error.code, error.detail)
    return _problem(request, status_of(error), error.code, shown_text(request, error))


def problem_response(
    request: Request, status: HTTPStatus, code: str, detail: str, *, headers: dict[str, str] | None = None
) -> JSONResponse:
    """Return an error as a response."""
    return _response(request, _problem(request, status, code, detail), headers)


def _problem(request: Request, status: HTTPStatus, code: str, detail: str) -> Problem:
    return Problem(
        title=status.phrase,
        status=status,
        detail=_printable(detail),
        code=code,
        request_id=getattr(request.state, "request_id", None),
    )


def _response(request: Request, problem: Problem, headers: dict[str, str] | None) -> JSONResponse:
    forms: Mapping[str, ErrorForm] = request.app.state.error_forms
    for prefix, form in forms.items():
        if request.url.path.startswith(prefix):
            return JsonAnswer(form.body_of(problem), status_code=problem.status, headers=headers)
    return JsonAnswer(
        problem.model_dump(mode="json"), status_code=problem.status, headers=headers, media_type=PROBLEM_TYPE
    )


def _fault_text(fault: Mapping[str, Any]) -> str:
    cause = fault.get("ctx", {}).get("error")
    if fault["type"] == "json_invalid" and cause is not None:
        where, at = fault["loc"]
        return f"{where}: it is not valid JSON: {cause} at character {at}"
    return f"{'.'.join(map(str, fault['loc']))}: {fault['msg'].removeprefix('Value error, ')}"


def _printable(text: str) -> str:
    """Return a text that can be encoded: a request may contain lone surrogates."""
    return text[:_MOST_CHARS].encode("utf-8", "backslashreplace").decode()


def install(app: FastAPI, forms: Mapping[str, ErrorForm]) -> None:
    """Answer every error of the app with a problem document.

    Args:
        forms: other forms of errors, by the prefix of their paths.
    """
    app.state.error_forms = forms

    @app.exception_handler(RefusedError)
    async def on_problem(request: Request, error: RefusedError) -> JSONResponse:
        return problem_response(request, error.status, error.code, error.detail, headers=error.headers)

    @app.exception_handler(NekroError)
    async def on_error(request: Request, error: NekroError) -> JSONResponse:
        problem = problem_of(request, error)
        waits = {"Retry-After": "1"} if problem.status == HTTPStatus.SERVICE_UNAVAILABLE else None
        return _response(request, problem, waits)

    @app.exception_handler(HTTPException)
    async def on_http(request: Request, error: HTTPException) -> JSONResponse:
        status = HTTPStatus(error.status_code)
        code = status.name.lower()
        detail = str(error.detail)
        if detail == status.phrase:  # of the router, which says no more
            asked = f"{request.method} {request.url.path}"
            detail = f"{asked}: nothing is served there; /openapi.json lists what is"
            if status is HTTPStatus.METHOD_NOT_ALLOWED:
                detail = f"{asked}: this path has other methods: {(error.headers or {}).get('Allow', '')}"
        return problem_response(request, status, code, detail, headers=dict(error.headers or {}))

    @app.exception_handler(ClientDisconnect)
    async def on_disconnect(request: Request, _error: ClientDisconnect) -> JSONResponse:
        return problem_response(
            request, HTTPStatus.BAD_REQUEST, "client_left", "the client left before the end of the body"
        )

    @app.exception_handler(RequestValidationError)
    async def on_invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        faults = error.errors()
        texts = [_fault_text(one) for one in faults]
        is_json = not any(one["type"] == "json_invalid" for one in faults)
        status = HTTPStatus.UNPROCESSABLE_ENTITY if is_json else HTTPStatus.BAD_REQUEST
        return problem_response(request, status, "invalid_request", "; ".join(texts))
