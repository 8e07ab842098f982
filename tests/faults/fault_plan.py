"""What a seed stands for: the calls of each caller, and the faults with their times."""

from __future__ import annotations

import itertools
import random
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

DATABASES: Final = ("sqlite", "postgres")
#: Visibility timeout of the fleet: how long a message stays with a worker that gives no sign of life.
LEASE_SECONDS: Final = 4.0
#: Limit of a call that is not to meet its deadline.
LIMIT_SECONDS: Final = 30.0


class FaultKind(StrEnum):
    """What is done to the system; `Nemesis` has a method for each."""

    #: SIGKILL of a worker; another one takes its place.
    KILL = "kill"
    #: SIGTERM of a worker; another one takes its place.
    STOP = "stop"
    #: SIGSTOP of a worker, beyond its leases or for a moment, then SIGCONT.
    FREEZE = "freeze"
    #: SIGKILL of a caller; another one takes its place.
    KILL_CALLER = "kill-caller"
    #: Reset of every connection to Redis.
    CUT = "cut"
    #: Redis executes what it is sent and its replies are lost; then the connections break.
    LOSE = "lose"
    #: SIGSTOP of Redis, then SIGCONT.
    REDIS_FREEZE = "redis-freeze"
    #: Redis ends and comes back with its data.
    REDIS_RESTART = "redis-restart"
    #: SIGKILL of Redis; it comes back as it was up to a second before.
    REDIS_ROLLBACK = "redis-rollback"
    #: SIGKILL of Redis; it comes back empty.
    REDIS_EMPTY = "redis-empty"
    #: SQLite: another process holds an exclusive lock.
    DB_LOCK = "db-lock"
    #: PostgreSQL: connections are cut and refused for a while.
    DB_AWAY = "db-away"
    #: PostgreSQL: an immediate stop, and a start that recovers.
    DB_CRASH = "db-crash"
    #: PostgreSQL executes what it is sent and its answers are lost; then the connections break.
    DB_LOSE = "db-lose"


_SQLITE_ONLY: Final = {FaultKind.DB_LOCK}
_POSTGRES_ONLY: Final = {FaultKind.DB_AWAY, FaultKind.DB_CRASH, FaultKind.DB_LOSE}
#: Shortest and longest duration, in seconds; faults without one are over at once.
_LENGTHS: Final = {
    FaultKind.FREEZE: (0.2, LEASE_SECONDS * 1.6),
    FaultKind.LOSE: (0.1, 2.0),
    FaultKind.REDIS_FREEZE: (0.2, 8.0),
    FaultKind.REDIS_RESTART: (0.0, 2.5),
    FaultKind.REDIS_ROLLBACK: (0.1, 1.0),
    FaultKind.REDIS_EMPTY: (0.0, 2.0),
    FaultKind.DB_LOCK: (0.3, 6.0),
    FaultKind.DB_AWAY: (0.3, 4.0),
    FaultKind.DB_CRASH: (0.0, 2.0),
    FaultKind.DB_LOSE: (0.1, 1.0),
}
#: Shortest and longest pause between the beginnings of two faults.
_PAUSES: Final = (0.5, 4.0)


@dataclass(frozen=True, kw_only=True)
class Options:
    """One run; the command line that repeats it holds exactly these."""

    seed: int
    database: str
    seconds: float = 30.0
    faults: tuple[FaultKind, ...] = tuple(FaultKind)
    #: One worker for each; without ``rounds`` or ``long`` nothing is called that needs them.
    lanes: tuple[str, ...] = ("methods", "methods", "rounds", "long")
    callers: int = 2
    #: Calls that each caller has under way at most.
    at_once: int = 20
    #: Calls in total; 0: as many as fit into ``seconds``.
    calls: int = 0
    #: Share of the calls that their caller gives up.
    cancels: float = 0.1

    def kinds(self) -> list[FaultKind]:
        """The faults that this database can have, in an order that the seed can rely on."""
        other = _POSTGRES_ONLY if self.database == "sqlite" else _SQLITE_ONLY
        return sorted(set(self.faults) - other)

    def command(self) -> str:
        """The command line that repeats the run."""
        words = ["python", "-m", "tests.faults", "--seed", str(self.seed), "--database", self.database]
        words += ["--seconds", f"{self.seconds:g}", "--faults", ",".join(self.faults) or "none"]
        words += [
            "--lanes",
            ",".join(self.lanes),
            "--callers",
            str(self.callers),
            "--at-once",
            str(self.at_once),
        ]
        words += ["--calls", str(self.calls), "--cancels", f"{self.cancels:g}"]
        return shlex.join(words)


@dataclass(frozen=True, kw_only=True)
class PlannedFault:
    """One fault: when, what, to whom and for how long."""

    at_seconds: float
    kind: FaultKind
    #: From 0 to 1: which of the workers or callers that there are then.
    choice: float
    length_seconds: float


def fault_schedule(options: Options) -> list[PlannedFault]:
    """The faults of a run, by their times."""
    rng, kinds = random.Random(f"{options.seed} faults"), options.kinds()
    planned: list[PlannedFault] = []
    shortest, longest = _PAUSES
    longest = min(longest, max(shortest, options.seconds / 4))
    at = rng.uniform(shortest, longest)
    while kinds and at < options.seconds:
        kind = rng.choice(kinds)
        length = rng.uniform(*_LENGTHS.get(kind, (0, 0)))
        planned.append(PlannedFault(at_seconds=at, kind=kind, choice=rng.random(), length_seconds=length))
        at += rng.uniform(shortest, longest)
    return planned


class CallKind(StrEnum):
    """What is called; the value is the method, its first letter begins the call's id."""

    TOOL = "work"
    EFFECT = "effect"
    AGENT = "wake"
    FAIL = "fail"
    KEEP = "keep"
    JOB = "begin_job"
    #: A message of a person, whose round calls methods from a sandbox; no call of a method.
    PERSON = "person"


_WEIGHTS: Final = {
    CallKind.TOOL: 30, CallKind.EFFECT: 30, CallKind.AGENT: 4, CallKind.FAIL: 6,
    CallKind.KEEP: 20, CallKind.JOB: 2, CallKind.PERSON: 1,
}  # fmt: skip
_LANES: Final = {CallKind.AGENT: "rounds", CallKind.PERSON: "rounds", CallKind.JOB: "long"}
#: How long a method works, in seconds, and how often of 100.
_WORK: Final = ((0, 50), (0.01, 20), (0.1, 20), (0.5, 7), (2, 3))
#: For calls that are given up: the last is far from its end then, unless it is not stopped.
_LONG_WORK: Final = (0.1, 0.5, 6)
#: Share of calls whose deadline is close.
_SHORT_SHARE: Final = 0.08
_CHATS: Final = 20


@dataclass(frozen=True, kw_only=True)
class CallPlan:
    """One call as the seed wants it."""

    call_id: str
    kind: CallKind
    chat_key: str
    work_seconds: float
    limit_seconds: float
    #: When its caller gives it up; None: not at all.
    cancel_after_seconds: float | None


def call_plans(options: Options, caller: int) -> Iterator[CallPlan]:
    """The calls of one caller, without end; ``caller`` makes their ids unique."""
    rng = random.Random(f"{options.seed} caller {caller}")
    kinds = [kind for kind in CallKind if _LANES.get(kind, "methods") in options.lanes]
    weights = [_WEIGHTS[kind] for kind in kinds]
    for number in itertools.count():
        kind = rng.choices(kinds, weights)[0]
        call_id = f"{kind[0].upper()}{caller}-{number}"
        work = rng.choices([seconds for seconds, _ in _WORK], [weight for _, weight in _WORK])[0]
        limit, cancel = LIMIT_SECONDS, None
        chat_key = f"calls/{rng.randrange(_CHATS)}"
        if kind is CallKind.PERSON:
            chat_key = f"people/{call_id}"
        elif rng.random() < options.cancels:
            # Early ones meet the queue and the claim, late ones the method and the record.
            cancel = rng.choice((0, rng.uniform(0, 0.02), rng.uniform(0, 0.3)))
            work = rng.choice((work, rng.choice(_LONG_WORK)))
        elif rng.random() < _SHORT_SHARE:
            limit = rng.uniform(0.02, 1.5)
        yield CallPlan(
            call_id=call_id, kind=kind, chat_key=chat_key, work_seconds=work,
            limit_seconds=limit, cancel_after_seconds=cancel,
        )  # fmt: skip
