"""Errors of the client.

::

    ClientError
    ├── ApiError              the gateway answered with an error; ``code`` says which
    │   ├── AuthenticationError   401: the key is missing, unknown, expired or revoked
    │   ├── ForbiddenError        403: the key may not do this
    │   ├── NotFoundError         404
    │   ├── ConflictError         409
    │   ├── InvalidRequestError   400, 413, 415, 422
    │   ├── MethodFailedError     422 with a code of its own: the request was valid, the method failed
    │   ├── RateLimitedError      429
    │   └── UnavailableError      502, 503, 504
    ├── UnreachableError      no answer came
    ├── InvalidAnswerError    the response is not a valid gateway response
    └── WaitTimeoutError      what was awaited did not happen in time
"""

from __future__ import annotations

from nekro_client.models import Problem

__all__ = [
    "ApiError",
    "AuthenticationError",
    "ClientError",
    "ConflictError",
    "ForbiddenError",
    "InvalidAnswerError",
    "InvalidRequestError",
    "MethodFailedError",
    "NotFoundError",
    "RateLimitedError",
    "UnavailableError",
    "UnreachableError",
    "WaitTimeoutError",
    "api_error",
]


class ClientError(Exception):
    """Base of all errors of this package."""


class ApiError(ClientError):
    """The gateway answered with a problem document, or a proxy before it with an error status."""

    def __init__(self, problem: Problem, *, retry_after_seconds: float | None = None) -> None:
        """``retry_after_seconds`` is the value of the header ``Retry-After``, None if there was none."""
        self.problem = problem
        self.retry_after_seconds = retry_after_seconds
        named = f" (request {problem.request_id})" if problem.request_id else ""
        super().__init__(f"{problem.code}: {problem.detail}{named}")

    @property
    def status(self) -> int:
        """The HTTP status."""
        return self.problem.status

    @property
    def code(self) -> str:
        """Stable code of the error, for programs."""
        return self.problem.code

    @property
    def detail(self) -> str:
        """What went wrong, and what to do."""
        return self.problem.detail

    @property
    def request_id(self) -> str | None:
        """Identifies the request in logs and traces of the gateway; None if a proxy answered."""
        return self.problem.request_id


class AuthenticationError(ApiError):
    """401: the key is missing, unknown, expired or revoked."""


class ForbiddenError(ApiError):
    """403: the key may not do this."""


class NotFoundError(ApiError):
    """404: it does not exist, or the key does not have its chat."""


class ConflictError(ApiError):
    """409: the state of the object does not permit it."""


class InvalidRequestError(ApiError):
    """400, 413, 415 or 422: the request is not valid, or too large."""


class MethodFailedError(ApiError):
    """422 ``method_failed``, ``method_aborted`` or ``result``: the method of a plugin failed."""


class RateLimitedError(ApiError):
    """429: the key made too many requests, or its budget is spent."""


class UnavailableError(ApiError):
    """502, 503 or 504: the gateway, its database or its workers did not answer."""


class UnreachableError(ClientError):
    """No answer came: the gateway is down, or the network is."""


class InvalidAnswerError(ClientError):
    """The response is not a valid gateway response, or is of an incompatible version."""


class WaitTimeoutError(ClientError):
    """What was awaited did not happen in time; it may still happen."""


_BY_STATUS: dict[int, type[ApiError]] = {
    400: InvalidRequestError,
    401: AuthenticationError,
    403: ForbiddenError,
    404: NotFoundError,
    409: ConflictError,
    413: InvalidRequestError,
    415: InvalidRequestError,
    422: InvalidRequestError,
    429: RateLimitedError,
    502: UnavailableError,
    503: UnavailableError,
    504: UnavailableError,
}
_BY_CODE: dict[str, type[ApiError]] = dict.fromkeys(
    ("method_failed", "method_aborted", "result"), MethodFailedError
)


def api_error(problem: Problem, *, retry_after_seconds: float | None) -> ApiError:
    """Return the error of a problem document, by its status."""
    kind = _BY_CODE.get(problem.code) or _BY_STATUS.get(problem.status, ApiError)
    return kind(problem, retry_after_seconds=retry_after_seconds)
