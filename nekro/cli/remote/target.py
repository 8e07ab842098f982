"""The gateway that ``NEKRO_URL`` and ``NEKRO_KEY`` name, and its errors as those of commands."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, TypeVar

from nekro_agent import errors
from nekro_agent.errors import (
    MethodFailedError,
    NekroError,
    NotFoundError,
    ServiceError,
    UploadQuotaError,
    UsageError,
)
from nekro_client import ApiError, Client, ClientError
from nekro_client.models import Page

__all__ = ["newest", "open_client"]

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
    """Open the client of the gateway.

    Raises:
        NekroError: the gateway refused a request inside the block, with the class that the command would
            raise on a host of the fleet; ServiceError if it did not answer.
    """
    try:
        # A person waits, who can repeat the command.
        with Client(retry_seconds=_RETRY_SECONDS) as client:
            yield client
    except ApiError as exc:
        raise _translated(exc) from exc
    except ClientError as exc:
        raise ServiceError(f"{os.environ.get('NEKRO_URL')}: {exc}") from exc
    except ValueError as exc:
        raise UsageError(str(exc)) from exc


def _translated(error: ApiError) -> NekroError:
    kind = _BY_CODE.get(error.code) or _BY_STATUS.get(error.status, ServiceError)
    text = error.detail
    if kind is MethodFailedError:
        name, _, message = text.partition(": ")
        return MethodFailedError(name, message)
    if error.request_id and kind is ServiceError:
        text += f" (request {error.request_id})"
    return kind(text)


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
