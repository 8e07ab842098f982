"""Start the worker and client processes of a contender, and measure its turns."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from benchmarks.harness.contender import CALL_SECONDS, Contender, Latencies, NotAvailableError, Setup
from benchmarks.harness.figures import Figures, percentile
from benchmarks.harness.processes import Child, peak_bytes

__all__ = ["Opened", "Plan", "TurnFailedError", "figures_of", "flood", "opened", "sequential", "take_turn"]

_WATCH_SECONDS = 0.2
#: Added to a call's own limit, so that the client can report its error before the turn fails.
_GRACE_SECONDS = 10.0


class TurnFailedError(Exception):
    """A worker or a client failed; the message ends with its last output."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How much is measured in one turn."""

    sequential_calls: int
    flood_calls: int
    in_flight: int
    workers: int
    #: Longest measurement of one figure.
    limit_seconds: float

    @property
    def sequential_warm_up(self) -> int:
        """Calls before the sequential measurement that are not measured."""
        return max(20, self.sequential_calls // 10)

    @property
    def flood_warm_up(self) -> int:
        """Calls before the flood that are not measured."""
        return max(2 * self.in_flight, self.flood_calls // 10)


class Conversation:
    """Sends commands to the client process and reads its answers, while it watches the workers."""

    def __init__(self, client: Child) -> None:
        self._client = client
        self._stdin, self._stdout = client.pipes()
        self._workers: list[Child] = []
        self._buffer = b""

    def watch(self, worker: Child) -> None:
        """Fail commands as soon as this worker ends."""
        self._workers.append(worker)

    def ask(self, command: dict[str, Any], *, limit_seconds: float) -> dict[str, Any]:
        """Send one command and return its answer.

        Raises:
            NotAvailableError: the contender cannot run on this machine.
            TurnFailedError: the command failed, a process ended or the limit passed.
        """
        self._stdin.write(json.dumps(command).encode() + b"\n")
        self._stdin.flush()
        answer: dict[str, Any] = json.loads(self._line(command["do"], limit_seconds))
        if answer["event"] == "unavailable":
            raise NotAvailableError(answer["reason"])
        if answer["event"] != "done":
            raise TurnFailedError(f"{command['do']}: {answer['reason']}{self._words()}")
        return answer

    def _line(self, doing: str, limit_seconds: float) -> bytes:
        deadline = time.monotonic() + limit_seconds
        while b"\n" not in self._buffer:
            if time.monotonic() > deadline:
                raise TurnFailedError(f"{doing}: no answer within {limit_seconds:.0f} s{self._words()}")
            ended = [worker.ended() for worker in self._workers if worker.ended() is not None]
            if ended:
                raise TurnFailedError(f"{doing}: a worker ended with exit code {ended[0]}{self._words()}")
            self._read(doing)
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _read(self, doing: str) -> None:
        if not wait([self._stdout.fileno()], _WATCH_SECONDS):
            return
        chunk = self._stdout.read1(1 << 20)  # type: ignore[attr-defined]
        if not chunk:
            raise TurnFailedError(f"{doing}: the client ended{self._words()}")
        self._buffer += chunk

    def _words(self) -> str:
        said = [child.last_words() for child in (self._client, *self._workers)]
        return "".join(f"\n{words}" for words in said if words)


@dataclass(frozen=True, kw_only=True)
class Opened:
    """A running contender that has answered one call."""

    talk: Conversation
    client: Child
    workers: list[Child]
    #: From the start of its workers to the first answered call.
    start_seconds: float


@contextmanager
def opened(contender: Contender, setup: Setup) -> Iterator[Opened]:
    """Start one contender; its processes end with the block.

    Raises:
        NotAvailableError: it cannot run on this machine.
        TurnFailedError: one of its processes failed or took too long.
    """
    directory = Path(setup.directory)
    environment = {**setup.environment(), **contender.environment(setup)}
    with ExitStack() as stack:

        def start(command: Sequence[str], name: str, *, piped: bool = False) -> Child:
            log = directory / f"{name}.log"
            child = Child(command, log=log, environment=environment, directory=directory, piped=piped)
            return stack.enter_context(child)

        client = start(
            [sys.executable, "-m", "benchmarks.harness.client", contender.name], "client", piped=True
        )
        talk = Conversation(client)
        # The client imports and connects before the workers start, so that only their start is measured.
        talk.ask({"do": "prepare"}, limit_seconds=CALL_SECONDS + _GRACE_SECONDS)
        began = time.perf_counter()
        commands = contender.worker_commands(setup)
        workers = [start(command, f"worker-{number}") for number, command in enumerate(commands)]
        for worker in workers:
            talk.watch(worker)
        talk.ask({"do": "first"}, limit_seconds=CALL_SECONDS + _GRACE_SECONDS)
        start_seconds = time.perf_counter() - began
        yield Opened(talk=talk, client=client, workers=workers, start_seconds=start_seconds)
        with suppress(TurnFailedError):  # it failed before; its processes end in any case
            talk.ask({"do": "close"}, limit_seconds=CALL_SECONDS + _GRACE_SECONDS)


def take_turn(contender: Contender, setup: Setup, plan: Plan) -> Figures:
    """Start one contender, measure one turn, stop it.

    Raises:
        NotAvailableError, TurnFailedError: as ``opened``.
    """
    with opened(contender, setup) as running:
        return figures_of(running, sequential(running, plan), flood(running, plan))


def sequential(running: Opened, plan: Plan) -> Latencies:
    """Make the sequential calls of a turn; return each call's seconds.

    Raises:
        TurnFailedError: a process of the contender failed.
    """
    ask = {"do": "sequential", "calls": plan.sequential_calls, "warm_up": plan.sequential_warm_up}
    latencies: Latencies = running.talk.ask(ask, limit_seconds=plan.limit_seconds + _GRACE_SECONDS)[
        "latencies"
    ]
    return latencies


def flood(running: Opened, plan: Plan) -> float:
    """Make the calls of a turn that are in flight at the same time; return calls per second.

    Raises:
        TurnFailedError: a process of the contender failed.
    """
    limit, ask = plan.limit_seconds + _GRACE_SECONDS, {"do": "flood", "in_flight": plan.in_flight}
    running.talk.ask({**ask, "calls": plan.flood_warm_up}, limit_seconds=limit)
    seconds = running.talk.ask({**ask, "calls": plan.flood_calls}, limit_seconds=limit)["seconds"]
    return plan.flood_calls / float(seconds)


def figures_of(running: Opened, latencies: Latencies, calls_per_second: float) -> Figures:
    """Return the figures of a turn; memory is the peak until now.

    Raises:
        TurnFailedError: a process of the contender failed.
    """
    # Measured while all processes run: an ended process has no size.
    worker_peak = peak_bytes([worker.pid for worker in running.workers])
    client_peak = peak_bytes([running.client.pid])
    helpers_peak = running.talk.ask({"do": "peak"}, limit_seconds=_GRACE_SECONDS)["helpers_peak_bytes"]
    return Figures(
        p50_seconds=percentile(latencies, 50),
        p95_seconds=percentile(latencies, 95),
        p99_seconds=percentile(latencies, 99),
        calls_per_second=calls_per_second,
        start_seconds=running.start_seconds,
        worker_peak_bytes=worker_peak,
        client_peak_bytes=None if client_peak is None else client_peak + helpers_peak,
    )
