"""The gateway that ``NEKRO_URL`` and ``NEKRO_KEY`` name; its errors and messages as commands print them."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from nekro_agent import errors
from nekro_agent.durations import FRESH_SECONDS
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
    from broker_config.settings import Settings
    from nekro_agent.methods import Lane
    from nekro_client import AsyncClient
    from nekro_client.models import Turn

__all__ = [
    "error_of",
    "failure_of",
    "gateway_of_up",
    "invalid",
    "translated",
    "waiting_client",
]


#: Bytes of an answer that have its status.
_STATUS_LINE: Final = 12
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


def waiting_client(url: str | None = None) -> AsyncClient:
    """Return the asynchronous client of the gateway, for a person who waits.

    Args:
        url: of a gateway of this host that takes the local key; None: that of ``NEKRO_URL``.
    """
    from nekro_client import AsyncClient

    if url is not None:
        os.environ.pop("NEKRO_KEY", None)  # of another gateway
    return AsyncClient(url, retry_seconds=_RETRY_SECONDS)


def gateway_of_up(settings: Settings, lanes: Sequence[Lane] = ()) -> str | None:
    """Return the URL of the gateway of `nekro up` on the data directory; None if there is none that answers.

    Where the settings name a broker or a database, another system may be meant.

    Args:
        lanes: those that must have a worker there.
    """
    from nekro.cli.services.ownership import read_running

    if settings.broker.url is not None or settings.database.url is not None:
        return None
    running = read_running(settings.data_dir)
    if running is None or not running.gateway_url or not running.lanes.issuperset(lanes):
        return None
    return running.gateway_url if _answers(running.gateway_url) else None


def _answers(url: str) -> bool:
    """Whether a gateway answers at once; one that has crashed does not, although its socket is open."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=FRESH_SECONDS) as probe:
            probe.sendall(f"GET /healthz HTTP/1.0\r\nHost: {host}\r\n\r\n".encode())
            return probe.recv(_STATUS_LINE).startswith(b"HTTP/1.1 2")
    except OSError:
        return False


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
        raise ServiceError(f"{os.environ.get('NEKRO_URL') or 'gateway of `nekro up`'}: {exc}") from exc
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


def failure_of(turn: Turn) -> LLMError | None:
    """Return why a turn that has ended has not ended well; None if it has."""
    from nekro_client.models import TurnState

    if turn.state not in (TurnState.FAILED, TurnState.CANCELLED):
        return None
    verb = "failed" if turn.state is TurnState.FAILED else "was cancelled"
    last = turn.rounds[-1] if turn.rounds else None
    reason = turn.error or (last and last.error)
    return LLMError(
        f"the turn {verb} in round {last.number if last else 1}: "
        f"{reason.text if reason else 'no reason is recorded'}"
    )
