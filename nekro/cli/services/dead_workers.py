"""What follows when a worker process that this process started has ended by itself."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from broker_config.app import create_app
from broker_config.settings import Settings
from broker_config.urls import is_redis
from nekro.broker.delivery.orphans import Orphan, Orphans
from nekro.cli.services.process import ChildProcess, describe_exit
from nekro_agent.errors import OutcomeUnknownError
from storage.engine import Database

__all__ = ["ReleasedCalls", "is_crash", "release_calls"]

#: Signals that another process sends; the others come from what the process itself did.
_FROM_OUTSIDE: Final = frozenset(
    {signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP}
)


@dataclass(frozen=True, kw_only=True)
class ReleasedCalls:
    """The calls that a worker ran when it ended."""

    calls: Sequence[Orphan] = ()
    #: Whether the only one was answered; otherwise they were delivered again.
    is_answered: bool = False


async def release_calls(settings: Settings, child: ChildProcess, code: int) -> ReleasedCalls:
    """Let the callers of a worker's calls know at once.

    If the worker ran one call and ended by itself (a crash, ``os._exit``), that call ended it: its caller
    gets ``OutcomeUnknownError`` with the reason, and the call is not repeated. Otherwise the calls are
    delivered again, as after the end of their leases: a worker may be killed for reasons of its host.

    Args:
        settings: with every URL filled.
        code: exit code, negative for a signal.

    Raises:
        NekroError: broker or database do not answer; the leases will expire.
    """
    url = settings.broker.url
    if not child.holder or url is None or not is_redis(url):
        return ReleasedCalls()  # not ready yet; RabbitMQ delivers again when a connection is lost
    await _end_claims(settings, f"{child.spec.lane}@{socket.gethostname()}:{child.pid}")
    is_own_end = code > 0 or is_crash(code)
    calls = await asyncio.to_thread(_take, settings, child, _reason(code) if is_own_end else None)
    return ReleasedCalls(calls=calls, is_answered=is_own_end and len(calls) == 1)


def is_crash(code: int) -> bool:
    """Whether a process with this exit code ended by a signal that it caused itself."""
    return code < 0 and -code not in _FROM_OUTSIDE


def _take(settings: Settings, child: ChildProcess, reason: str | None) -> Sequence[Orphan]:
    app = create_app(settings, lane=child.spec.lane)
    try:
        answer = None if reason is None else OutcomeUnknownError(reason)
        return Orphans(app, child.holder).take(answer=answer)
    finally:
        app.close()


def _reason(code: int) -> str:
    return (
        f"the call ended its worker process ({describe_exit(code)}), which ran no other call; it is not "
        "repeated, and its effect may or may not have happened"
    )


async def _end_claims(settings: Settings, worker: str) -> None:
    async with (
        Database(settings.database, settings.data_dir) as database,
        database.autocommit() as transaction,
    ):
        await transaction.calls.end_claims(worker)
