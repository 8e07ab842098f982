"""Calls of each caller and faults with their times, derived from a seed."""

from __future__ import annotations

import itertools
import random
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

DATABASES: Final = ("sqlite", "postgres")
#: Visibility timeout of the fleet, in seconds: after it, messages of a silent worker are redelivered.
LEASE_SECONDS: Final = 4.0
#: Time limit of a call that should not reach its deadline, in seconds.
LIMIT_SECONDS: Final = 30.0
#: How long code waits for a call that it detaches then, in seconds.
DETACH_SECONDS: Final = 0.3


class FaultKind(StrEnum):
    """Kinds of faults; `Nemesis` has a method for each."""

    #: SIGKILL of a worker, which is replaced.
    KILL = "kill"
    #: SIGTERM of a worker, which is replaced.
    STOP = "stop"
    #: SIGSTOP of a worker, longer than its leases or shortly, then SIGCONT.
    FREEZE = "freeze"
    #: SIGKILL of a caller, which is replaced.
    KILL_CALLER = "kill-caller"
    #: SIGKILL of an MCP server's process, which its owner starts again.
    KILL_SERVER = "kill-server"
    #: Reset of every connection to Redis.
    CUT = "cut"
    #: Redis executes commands but its replies are lost; then the connections break.
    LOSE = "lose"
    #: SIGSTOP of Redis, then SIGCONT.
    REDIS_FREEZE = "redis-freeze"
    #: Redis stops and restarts with its data.
    REDIS_RESTART = "redis-restart"
    #: SIGKILL of Redis; it restarts with its data up to a second before.
    REDIS_ROLLBACK = "redis-rollback"
    #: SIGKILL of Redis; it restarts empty.
    REDIS_EMPTY = "redis-empty"
    #: SQLite: another process holds an exclusive lock.
    DB_LOCK = "db-lock"
    #: PostgreSQL: connections are cut and refused for a while.
    DB_AWAY = "db-away"
    #: PostgreSQL: an immediate stop, and a start that recovers.
    DB_CRASH = "db-crash"
    #: PostgreSQL executes statements but its answers are lost; then the connections break.
    DB_LOSE = "db-lose"


_SQLITE_ONLY: Final = {FaultKind.DB_LOCK}
_POSTGRES_ONLY: Final = {FaultKind.DB_AWAY, FaultKind.DB_CRASH, FaultKind.DB_LOSE}
#: Shortest and longest duration, in seconds; the other faults take no time.
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
#: Shortest and longest pause between the starts of two faults, in seconds.
_PAUSES: Final = (0.5, 4.0)


@dataclass(frozen=True, kw_only=True)
class Options:
    """One run; its command line repeats exactly these values."""

    seed: int
    database: str
    seconds: float = 30.0
    faults: tuple[FaultKind, ...] = tuple(FaultKind)
    #: Lanes with one worker each; methods of ``rounds`` or ``long`` are called only if listed.
    lanes: tuple[str, ...] = ("methods", "methods", "rounds", "long")
    callers: int = 2
    #: Most open calls of each caller.
    at_once: int = 20
    #: Calls in total; 0: as many as fit into ``seconds``.
    calls: int = 0
    #: Share of the calls that their caller cancels.
    cancels: float = 0.1
    #: Whether there is an MCP server, and calls of its tools.
    server: bool = False
    #: Kinds of calls that are made, by their methods; none: all kinds.
    methods: tuple[str, ...] = ()

    def kinds(self) -> list[FaultKind]:
        """The faults that apply to a database, in a fixed order."""
        other = _POSTGRES_ONLY if self.database == "sqlite" else _SQLITE_ONLY
        other = other if self.server else other | {FaultKind.KILL_SERVER}
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
        words += ["--server"] if self.server else []
        words += ["--methods", ",".join(self.methods)] if self.methods else []
        return shlex.join(words)


@dataclass(frozen=True, kw_only=True)
class PlannedFault:
    """One fault: time, kind, target and duration."""

    at_seconds: float
    kind: FaultKind
    #: From 0 to 1: selects one of the workers or callers present at that time.
    choice: float
    length_seconds: float


def fault_schedule(options: Options) -> list[PlannedFault]:
    """The faults of a run in order of time."""
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
    """Kinds of calls; the value is the method, its first letter starts the call's id."""

    TOOL = "work"
    EFFECT = "effect"
    AGENT = "wake"
    FAIL = "fail"
    KEEP = "keep"
    JOB = "begin_job"
    #: A call that requires approval, which its caller gives.
    APPROVED = "approved"
    #: Tools of an MCP server: one that may run again, and one that may not.
    SERVER_TOOL = "mcp.marks.repeat"
    SERVER_ONCE = "mcp.marks.once"
    #: A user's message, whose round calls methods from a sandbox; not a call of a method.
    PERSON = "person"


_WEIGHTS: Final = {
    CallKind.TOOL: 30, CallKind.EFFECT: 30, CallKind.AGENT: 4, CallKind.FAIL: 6,
    CallKind.KEEP: 20, CallKind.JOB: 6, CallKind.APPROVED: 10, CallKind.PERSON: 1,
    CallKind.SERVER_TOOL: 30, CallKind.SERVER_ONCE: 30,
}  # fmt: skip
_LANES: Final = {CallKind.AGENT: "rounds", CallKind.PERSON: "rounds", CallKind.JOB: "long"}
#: Calls that are not recorded, and may run again after a death.
REPEATED: Final = frozenset({CallKind.TOOL, CallKind.SERVER_TOOL})
#: Calls of the MCP server.
OF_SERVER: Final = frozenset({CallKind.SERVER_TOOL, CallKind.SERVER_ONCE})
#: Duration of a method in seconds, and its weight of 100.
_WORK: Final = ((0, 50), (0.01, 20), (0.1, 20), (0.5, 7), (2, 3))
#: For calls that are cancelled: the last is far from its end, unless it ignores the cancellation.
_LONG_WORK: Final = (0.1, 0.5, 6)
#: Share of calls with a deadline close enough to be reached.
_SHORT_SHARE: Final = 0.08
#: Share of calls that are made as by a program in a sandbox: they are detached if they take long.
_DETACH_SHARE: Final = 0.12
#: Duration of their methods, in seconds; the shorter ones end while they are detached.
_DETACHED_WORK: Final = (DETACH_SECONDS, DETACH_SECONDS + 0.05, 1)
#: Kinds of calls that only their own path makes.
_NEVER_DETACHED: Final = frozenset({CallKind.APPROVED, CallKind.PERSON})
_CHATS: Final = 20


@dataclass(frozen=True, kw_only=True)
class CallPlan:
    """One planned call."""

    call_id: str
    kind: CallKind
    chat_key: str
    work_seconds: float
    limit_seconds: float
    #: Seconds until its caller cancels it; None: never.
    cancel_after_seconds: float | None
    #: Whether it is detached after ``DETACH_SECONDS``.
    detaches: bool = False


def runs_in(kind: CallKind, options: Options) -> bool:
    """Whether the workers of a run serve calls of a kind."""
    is_chosen = not options.methods or kind.value in options.methods
    return (
        is_chosen
        and _LANES.get(kind, "methods") in options.lanes
        and (options.server or kind not in OF_SERVER)
    )


def call_plans(options: Options, caller: int) -> Iterator[CallPlan]:
    """An infinite sequence of one caller's calls; ``caller`` makes their ids unique."""
    rng = random.Random(f"{options.seed} caller {caller}")
    kinds = [kind for kind in CallKind if runs_in(kind, options)]
    weights = [_WEIGHTS[kind] for kind in kinds]
    for number in itertools.count():
        kind = rng.choices(kinds, weights)[0]
        call_id = f"{kind[0].upper()}{caller}-{number}"
        work = rng.choices([seconds for seconds, _ in _WORK], [weight for _, weight in _WORK])[0]
        limit, cancel, detaches = LIMIT_SECONDS, None, False
        chat_key = f"calls/{rng.randrange(_CHATS)}"
        if kind is CallKind.PERSON:
            chat_key = f"people/{call_id}"
        elif rng.random() < options.cancels:
            # Early cancellations hit the queue and the claim, late ones the method and the record.
            cancel = rng.choice((0, rng.uniform(0, 0.02), rng.uniform(0, 0.3)))
            work = rng.choice((work, rng.choice(_LONG_WORK)))
        elif rng.random() < _SHORT_SHARE:
            limit = rng.uniform(0.02, 1.5)
        elif kind not in _NEVER_DETACHED and rng.random() < _DETACH_SHARE:
            detaches, work = True, rng.choice(_DETACHED_WORK)
        yield CallPlan(
            call_id=call_id, kind=kind, chat_key=chat_key, work_seconds=work,
            limit_seconds=limit, cancel_after_seconds=cancel, detaches=detaches,
        )  # fmt: skip
