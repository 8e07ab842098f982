"""Shared by the chaos tests: named calls, the journal of executions, and the final comparison of both."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fleet_probes import ask, left_in_lane
from fleet_probes import client_of as client_of
from fleet_probes import key as key
from waiting import WAIT_SECONDS, eventually
from worker_fleet import Fleet, Worker, call_in

from broker_config.keys import Keys
from broker_config.urls import is_redis
from nekro.app import use_cases
from nekro.app.calls.dispatch import CallScope
from nekro.app.services import Services
from nekro.wire.invocation import Envelope
from nekro.wire.values import decode_value, encode_arguments
from nekro_agent.errors import NekroError, OutcomeUnknownError

CHAT = "chaos"
#: Duration of calls that end when the test releases them.
HELD = -1.0
#: Visibility timeout of the chaos fleets.
LEASE_SECONDS = 4.0


@contextlib.asynccontextmanager
async def opened(fleet: Fleet) -> AsyncIterator[Services]:
    """Services of the calling side."""
    services = fleet.services()
    await services.start()
    try:
        yield services
    finally:
        await _end_own_tasks()
        await services.close()


async def _end_own_tasks() -> None:
    """Cancel what a test that failed still runs, such as its load, while its calls can be revoked.

    The loop would cancel it at its end, after the services were closed: each call would then wait in vain.
    """
    own = [task for task in asyncio.all_tasks() - {asyncio.current_task()} if _is_of_tests(task)]
    for task in own:
        task.cancel()
    if own:
        await asyncio.wait(own, timeout=WAIT_SECONDS)


def _is_of_tests(task: asyncio.Task[Any]) -> bool:
    code = getattr(task.get_coro(), "cr_code", None)
    return code is not None and Path(code.co_filename).is_relative_to(Path(__file__).parents[1])


def publish_methods(fleet: Fleet) -> None:
    """Start a worker and stop it again, for tests that send calls while no worker runs.

    Callers learn the methods from what the last workers have published. All messages then lie in the queue's
    own list, as if the worker had stopped long ago.
    """
    (worker,) = fleet.start("methods")
    assert worker.stop() == 0
    if is_redis(fleet.settings.broker.url or ""):
        with client_of(fleet) as client:
            client.hdel(Keys(prefix=fleet.settings.broker.key_prefix).seen("methods"), "fair")


async def call(
    services: Services, method: str, *args: Any, chat_key: str = CHAT, seconds: float = 60
) -> object:
    """Call a method; returns its decoded value."""
    envelope = await use_cases.invoke(
        services, method, args, {}, chat_key=chat_key, user_id="u", timeout_seconds=seconds
    )
    return decode_value(envelope.value_bytes(), max_bytes=1 << 20) if envelope.value else envelope.text


async def invoke(services: Services, method: str, *args: Any, call_id: str, seconds: float = 60) -> Envelope:
    """Call under a given id, as a round does."""
    scope = CallScope(chat=await services.chat(CHAT), user_id=None, wakes_agent=True)
    return await call_in(
        services,
        await services.find_method(method),
        encode_arguments(args, {}),
        scope,
        call_id=call_id,
        seconds=seconds,
    )


def data_of(fleet: Fleet) -> Path:
    """Data directory of the chaos plugin."""
    from storage.files.areas import DataAreas

    return DataAreas(fleet.settings.data_dir).plugin_dir("tests.chaos")


def release(fleet: Fleet) -> None:
    """Let the calls that were made with ``HELD`` end, those of later deliveries too."""
    data_of(fleet).joinpath("released").touch()


def journal(fleet: Fleet) -> list[list[str]]:
    """Lines of the chaos plugin: event, name, process, time."""
    path = data_of(fleet) / "journal.txt"
    if not path.exists():
        return []
    return [line.split() for line in path.read_text().splitlines()]


def times(fleet: Fleet, event: str) -> Counter[str]:
    """How often an event occurs for each name."""
    return Counter(line[1] for line in journal(fleet) if line[0] == event)


async def started(fleet: Fleet, *names: str) -> None:
    """Wait until methods of these names have started."""
    await eventually(lambda: set(names) <= set(times(fleet, "start")), what=f"{names} to start")


def worker_that_runs(fleet: Fleet, name: str) -> Worker:
    """The worker whose process last started a method of this name."""
    pid = next(int(line[2]) for line in reversed(journal(fleet)) if line[:2] == ["start", name])
    return next(worker for worker in fleet.workers if worker.pid == pid)


async def until_quiet(
    fleet: Fleet, lane: str = "methods", *, seconds: float = WAIT_SECONDS, what: str = "the acknowledgements"
) -> None:
    """Wait until a lane has no queued and no held messages; a failure shows what is left."""

    with client_of(fleet) as client:
        await eventually(
            lambda: not left_in_lane(fleet, client, lane),
            seconds=seconds,
            what=lambda: f"{what}; left: {left_in_lane(fleet, client, lane)}, {time.time()=}",
        )


async def rows(services: Services, query: str, **values: Any) -> Sequence[Any]:
    """Run a query on the database."""
    return await ask(services.database, query, **values)


async def accepted(services: Services, count: int) -> None:
    """Wait until the broker has accepted that many of this process's pending calls."""
    await eventually(
        lambda: sum(p.place is not None for p in services._caller._pending.values()) >= count,
        what=f"{count} calls to be taken by the broker",
    )


@dataclass
class Account:
    """Outcome of each call, compared with the journal and the database."""

    ok: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    errors: dict[str, str] = field(default_factory=dict)
    #: Calls that ended in an error outside of the project's tree.
    wild: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    async def follow(self, name: str, outcome: Awaitable[object]) -> None:
        """Wait for a call and record its outcome."""
        begin = time.monotonic()
        try:
            await outcome
            self.ok.append(name)
        except OutcomeUnknownError:
            self.unknown.append(name)
        except NekroError as exc:
            self.errors[name] = f"{type(exc).__name__}: {exc}"[:160]
        except Exception as exc:
            self.wild[name] = repr(exc)
        self.seconds[name] = time.monotonic() - begin

    @property
    def error_kinds(self) -> Counter[str]:
        """Errors by class."""
        return Counter(error.partition(":")[0] for error in self.errors.values())

    @property
    def count(self) -> int:
        """Calls that have an outcome."""
        return len(self.ok) + len(self.unknown) + len(self.errors) + len(self.wild)

    async def doubled_and_missing(self, services: Services, fleet: Fleet) -> tuple[list[str], list[str]]:
        """Effects that happened more than once, and confirmed effects that are missing."""
        starts = times(fleet, "start")
        written = Counter(
            str(row[0]).rpartition(" ")[2]
            for row in await rows(
                services, "SELECT text FROM messages WHERE text LIKE 'effect %' OR text LIKE 'wake %'"
            )
        )
        effects = [name for name in starts if name[0] in "EA"]
        doubled = [name for name in effects if starts[name] > 1 or written[name] > 1]
        missing = [name for name in self.ok if (written[name] if name[0] in "EA" else starts[name]) < 1]
        return doubled, missing
