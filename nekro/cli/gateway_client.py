"""The gateway that ``NEKRO_URL`` and ``NEKRO_KEY`` name; its errors and messages as commands print them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, TypeVar

from nekro_agent import errors
from nekro_agent.errors import (
    LLMError,
    MethodFailedError,
    NekroError,
    NotFoundError,
    ServiceError,
    UploadQuotaError,
    UsageError,
)

if TYPE_CHECKING:
    from nekro_client import AsyncClient, Client
    from nekro_client.models import Page, Turn

__all__ = [
    "error_of",
    "failure_of",
    "invalid",
    "newest",
    "open_client",
    "translated",
    "waiting_client",
]


T = TypeVar("T")

#: A person waits at the terminal, so a command gives up sooner than a program.
_RETRY_SECONDS: Final = 5.0


def _codes() -> dict[str, type[NekroError]]:
    """Return the classes of errors by their codes."""
    kinds = [
        kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, NekroError)
    ]
    return {kind.code: kind for kind in kinds if kind is not UploadQuotaError}


_BY_CODE: Final = _codes()
#: For codes that only the gateway has.
_BY_STATUS: Final[dict[int, type[NekroError]]] = {
    400: UsageError,
    401: UsageError,
    403: UsageError,
    404: NotFoundError,
    409: UsageError,
    413: UsageError,
    415: UsageError,
    422: UsageError,
    429: UsageError,
    507: UsageError,
}


@contextmanager
def open_client() -> Iterator[Client]:
    """Open the client of the gateway; raises as ``translated``."""
    from nekro_client import Client

    # A person waits, who can repeat the command.
    with translated(), Client(retry_seconds=_RETRY_SECONDS) as client:
        yield client


def waiting_client() -> AsyncClient:
    """Return the asynchronous client of the gateway, for a person who waits."""
    from nekro_client import AsyncClient

    return AsyncClient(retry_seconds=_RETRY_SECONDS)


@contextmanager
def translated() -> Iterator[None]:
    """Translate the errors of a client.

    Raises:
        NekroError: the gateway refused a request inside the block, with the class that the command would
            raise on a host of the fleet; ServiceError if it did not answer.
    """
    from nekro_client import ApiError, ClientError

    try:
        yield
    except ApiError as exc:
        raise error_of(exc.code, exc.status, exc.detail, request_id=exc.request_id) from exc
    except ClientError as exc:
        raise ServiceError(f"{os.environ.get('NEKRO_URL')}: {exc}") from exc
    except ValueError as exc:
        raise invalid(exc) from exc


def invalid(error: ValueError) -> UsageError:
    """Return the error of a command for values that no request can have."""
    from pydantic import ValidationError

    if not isinstance(error, ValidationError):
        return UsageError(str(error))
    faults = (f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors())
    return UsageError("; ".join(faults))


def error_of(code: str, status: int, detail: str, *, request_id: str | None = None) -> NekroError:
    """Return the error of a command for a problem of the API."""
    kind = _BY_CODE.get(code) or _BY_STATUS.get(status, ServiceError)
    if kind is MethodFailedError:
        name, _, message = detail.partition(": ")
        return MethodFailedError(name, message)
    if request_id and kind is ServiceError:
        detail += f" (request {request_id})"
    return kind(detail)


def newest(page: Callable[[str | None, int], Page[T]], *, limit: int) -> list[T]:
    """Return up to ``limit`` items of the first pages; ``page`` gets a cursor and how many are missing."""
    items: list[T] = []
    cursor: str | None = None
    while len(items) < limit:
        answer = page(cursor, min(limit - len(items), 200))
        items += answer.items
        cursor = answer.next_cursor
        if cursor is None:
            break
    return items[:limit]


def failure_of(turn: Turn) -> LLMError | None:
    """Return why a turn that has ended has not ended well; None if it has."""
    from nekro_client.models import TurnState

    if turn.state not in (TurnState.FAILED, TurnState.CANCELLED):
        return None
    verb = "failed" if turn.state is TurnState.FAILED else "was cancelled"
    last = turn.rounds[-1].number if turn.rounds else 1
    return LLMError(
        f"the turn {verb} in round {last}: {turn.error.text if turn.error else 'no reason is recorded'}"
    )
