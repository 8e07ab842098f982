"""The interface of a contender: command lines of its workers, and a client that calls them.

Every contender runs the same coroutine, ``probe``, with the same arguments, and each answer is
checked. Clients run in a process of their own, so that peak memory is only the contender's.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, Generic, Self, TypeVar

__all__ = [
    "CALL_SECONDS",
    "ROOT",
    "SETUP_VARIABLE",
    "TEXT",
    "AsyncClient",
    "Client",
    "Contender",
    "Latencies",
    "NotAvailableError",
    "Setup",
    "WindowClient",
    "WrongAnswerError",
    "check",
    "probe",
]

Ticket = TypeVar("Ticket")

#: The folder of the packages; child processes import from it in any working directory.
ROOT = Path(__file__).resolve().parents[2]
#: Without the prefix ``NEKRO_``, as the settings refuse unknown names with it.
SETUP_VARIABLE = "RPC_BENCH_SETUP"
#: Longest wait for one answer.
CALL_SECONDS = 30.0
TEXT = "a short text argument, as long as a chat message may well be: 80 characters ...."

Latencies = list[float]


class WrongAnswerError(Exception):
    """A contender returned another value than ``probe``."""


class NotAvailableError(Exception):
    """A contender is installed but cannot run on this machine; the message says why."""


async def probe(number: int, text: str) -> dict[str, Any]:
    """The method that every contender runs."""
    return {"number": number + 1, "text": text}


def check(number: int, answer: object) -> None:
    """Compare an answer with what ``probe`` returns for ``number``.

    Raises:
        WrongAnswerError: it differs.
    """
    if answer != {"number": number + 1, "text": TEXT}:
        raise WrongAnswerError(f"call {number} was answered {answer!r}")


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The environment of one turn; workers and clients read it from ``SETUP_VARIABLE``."""

    redis_url: str
    http_port: int
    #: An empty directory, used only by this turn.
    directory: str
    #: Number of worker processes, for contenders that can have several.
    workers: int
    in_flight: int

    def environment(self) -> dict[str, str]:
        """Return the environment of a child process, which includes this setup.

        ``NEKRO_…`` variables of the shell are left out: a run must not depend on them.
        """
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("NEKRO_")}
        path = [str(ROOT), *filter(None, [inherited.get("PYTHONPATH")])]
        return {**inherited, "PYTHONPATH": os.pathsep.join(path), SETUP_VARIABLE: json.dumps(asdict(self))}

    @classmethod
    def from_environment(cls) -> Self:
        """Read what ``environment`` wrote."""
        return cls(**json.loads(os.environ[SETUP_VARIABLE]))


class Client(ABC):
    """Calls ``probe`` through one contender; used from one thread."""

    def first(self) -> None:
        """Make one call, which waits until a worker can answer it."""
        self.sequential(1, warm_up=0)

    @abstractmethod
    def sequential(self, calls: int, *, warm_up: int) -> Latencies:
        """Make sequential calls; return each call's seconds, without those of the warm-up."""

    @abstractmethod
    def flood(self, calls: int, *, in_flight: int) -> float:
        """Make ``calls`` calls with ``in_flight`` of them in flight; return the total seconds."""

    def peak_bytes(self) -> int:
        """Return the peak memory of helper processes that have ended; 0 when there were none."""
        return 0

    def close(self) -> None:
        """Close connections."""
        return


class WindowClient(Client, Generic[Ticket]):
    """A blocking client with a window: it sends the next call when the oldest answer has arrived.

    One thread with a window is the fastest mode of the blocking clients here; a thread per call in
    flight costs them more than waiting for the oldest answer.
    """

    @abstractmethod
    def send(self, number: int) -> Ticket:
        """Send one call."""

    @abstractmethod
    def receive(self, ticket: Ticket) -> object:
        """Wait for one call's answer, at most ``CALL_SECONDS``."""

    def sequential(self, calls: int, *, warm_up: int) -> Latencies:
        latencies = []
        for number in range(warm_up + calls):
            began = perf_counter()
            answer = self.receive(self.send(number))
            latencies.append(perf_counter() - began)
            check(number, answer)
        return latencies[warm_up:]

    def flood(self, calls: int, *, in_flight: int) -> float:
        window: deque[tuple[int, Ticket]] = deque()
        began = perf_counter()
        for number in range(calls):
            if len(window) == in_flight:
                self._take_oldest(window)
            window.append((number, self.send(number)))
        while window:
            self._take_oldest(window)
        return perf_counter() - began

    def _take_oldest(self, window: deque[tuple[int, Ticket]]) -> None:
        number, ticket = window.popleft()
        check(number, self.receive(ticket))


class AsyncClient(Client):
    """A client on one event loop of its own (uvloop, like the workers of the asyncio contenders)."""

    def __init__(self) -> None:
        import uvloop

        self._runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        self._runner.run(self.open())

    @abstractmethod
    async def open(self) -> None:
        """Connect."""

    @abstractmethod
    async def shut(self) -> None:
        """Disconnect."""

    @abstractmethod
    async def call(self, number: int) -> object:
        """Make one call and return its answer, after at most ``CALL_SECONDS``."""

    def sequential(self, calls: int, *, warm_up: int) -> Latencies:
        return self._runner.run(self._sequential(calls, warm_up))

    def flood(self, calls: int, *, in_flight: int) -> float:
        return self._runner.run(self._flood(calls, in_flight))

    def close(self) -> None:
        self._runner.run(self.shut())
        self._runner.close()

    async def _sequential(self, calls: int, warm_up: int) -> Latencies:
        latencies = []
        for number in range(warm_up + calls):
            began = perf_counter()
            answer = await self.call(number)
            latencies.append(perf_counter() - began)
            check(number, answer)
        return latencies[warm_up:]

    async def _flood(self, calls: int, in_flight: int) -> float:
        numbers = iter(range(calls))

        async def caller() -> None:
            for number in numbers:
                check(number, await self.call(number))

        began = perf_counter()
        async with asyncio.TaskGroup() as group:
            for _ in range(in_flight):
                group.create_task(caller())
        return perf_counter() - began


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One way to call a method in another process."""

    name: str
    #: One line for the report: the components and their options.
    about: str
    #: Modules that must be importable; without one of them, the contender is "not installed".
    modules: Sequence[str]
    #: Command lines of the worker processes of a turn.
    worker_commands: Callable[[Setup], list[list[str]]]
    open_client: Callable[[Setup], Client]
    #: Command that installs the modules.
    install: str = "pip install -e '.[bench]'"
    #: Whether it is one of this project: those are compared with every peer, peers not with each other.
    ours: bool = False
    #: Runs once before the workers start, in the client's process.
    prepare: Callable[[Setup], None] = lambda setup: None
    #: Variables for the worker and the client.
    environment: Callable[[Setup], dict[str, str]] = lambda setup: {}

    def missing(self) -> str | None:
        """Return which modules are missing and how to install them; None when none is."""
        missing = [module for module in self.modules if not _importable(module)]
        return f"not installed: {', '.join(missing)} ({self.install})" if missing else None


def _importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False
