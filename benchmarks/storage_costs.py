"""Measure the cost of the database for a call: ``python -m benchmarks.storage_costs --help``.

Measures claims, outcomes and plugin values one by one and 200 at a time, on SQLite with both settings of
``sqlite_synchronous`` and on a database given by URL. Needs no broker.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import uvloop

from benchmarks.harness.processes import interrupted_by_sigterm
from broker_config.settings import DatabaseSettings, StoreSettings
from nekro_agent.methods import SandboxMethodType
from nekro_agent.ports import MessageKind
from storage.engine import Database
from storage.kv import SqlKeyValueStore
from storage.migrate import upgrade
from storage.repositories.calls import CallRequest
from storage.repositories.messages import NewMessage
from storage.repositories.rounds import RoundRequest
from storage.states import TriggerKind, new_id

__all__ = ["main", "parse"]

_AT_ONCE = 200
_WARM_UP = 20


class Ledger:
    """The measured operations."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._store = SqlKeyValueStore(database, StoreSettings())
        self._numbers = itertools.count()

    async def claim_and_finish(self) -> None:
        """The statements of a call without an observation: claim and outcome."""
        call = await self._claim()
        async with self._database.autocommit() as tx:
            await tx.calls.finish(call.id, fence=1, outcome={"value": "x" * 100})

    async def claim_and_wake(self) -> None:
        """The statements of an AGENT call: claim; then outcome, observation and round in one transaction."""
        call = await self._claim()
        async with self._database.begin() as tx:
            await tx.calls.finish(call.id, fence=1, outcome={"text": "x" * 100})
            await tx.messages.append(
                NewMessage(chat_key="chat", kind=MessageKind.SYSTEM, text="x", once_key=call.id)
            )
            await tx.rounds.request(
                RoundRequest(chat_key="chat", trigger_kind=TriggerKind.CALL, trigger_id=call.id)
            )

    async def set_value(self) -> None:
        """``plugin.store.set`` of one of 50 keys."""
        key = str(next(self._numbers) % 50)
        await self._store.set("a.b", chat_key="c", user_key="", store_key=key, value="v" * 100)

    async def get_value(self) -> None:
        """``plugin.store.get`` of one of 50 keys."""
        key = str(next(self._numbers) % 50)
        await self._store.get("a.b", chat_key="c", user_key="", store_key=key)

    async def _claim(self) -> CallRequest:
        call = CallRequest(id=new_id(), method="a.b.c", type=SandboxMethodType.BEHAVIOR, chat_key="chat")
        async with self._database.autocommit() as tx:
            await tx.calls.claim(call, worker="w", lease_seconds=30)
        return call


async def _measure(name: str, settings: DatabaseSettings, count: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        await upgrade(settings, Path(directory))
        database = Database(settings, Path(directory))
        async with database.begin() as tx:
            await tx.chats.ensure("chat")
        ledger = Ledger(database)
        for operation in (
            ledger.claim_and_finish,
            ledger.claim_and_wake,
            ledger.set_value,
            ledger.get_value,
        ):
            alone = await _one_by_one(operation, count)
            rate = await _at_once(operation, count)
            print(
                f"{name:16} {operation.__name__:18} {statistics.median(alone) * 1e6:7.0f}"
                f" {statistics.quantiles(alone, n=20)[-1] * 1e6:7.0f} {rate:8.0f}"
            )
        await database.dispose()


async def _one_by_one(operation: Callable[[], Awaitable[None]], count: int) -> list[float]:
    seconds = []
    for _ in range(count + _WARM_UP):
        started = time.perf_counter()
        await operation()
        seconds.append(time.perf_counter() - started)
    return seconds[_WARM_UP:]


async def _at_once(operation: Callable[[], Awaitable[None]], count: int) -> float:
    """Return the operations per second with ``_AT_ONCE`` of them in flight."""
    places = asyncio.Semaphore(_AT_ONCE)

    async def one() -> None:
        async with places:
            await operation()

    started = time.perf_counter()
    await asyncio.gather(*(one() for _ in range(count)))
    return count / (time.perf_counter() - started)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line; ends the process with code 2 when it is wrong."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.storage_costs", description=__doc__)
    parser.add_argument("--url", help="also measure this database, for example postgresql://host/scratch")
    parser.add_argument("--count", type=int, default=500, help="operations per figure (default: 500)")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print a table."""
    interrupted_by_sigterm()
    options = parse(argv)
    databases = {
        "sqlite normal": DatabaseSettings(sqlite_synchronous="normal"),
        "sqlite full": DatabaseSettings(sqlite_synchronous="full"),
    }
    if options.url:
        databases[options.url.split(":")[0]] = DatabaseSettings(url=options.url)
    print(f"{'database':16} {'operation':18} {'median':>7} {'p95 us':>7} {'per sec':>8}")
    for name, settings in databases.items():
        uvloop.run(_measure(name, settings, options.count))
    return 0


if __name__ == "__main__":
    sys.exit(main())
