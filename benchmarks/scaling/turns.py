"""Measure what the parts of a turn cost each process and the database.

A message comes in by the gateway; a scripted model answers with code a number of times, then with words.
Mixes of rounds and calls differ in one part each, so their differences are the costs of the parts.
"""

from __future__ import annotations

import asyncio
import os
import re
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

import httpx
import psycopg

from benchmarks.agents.systems import Running, our_system
from benchmarks.harness.usage import tree_cpu_seconds, tree_pss_bytes
from benchmarks.tool_use.endpoint import ChatEndpoint, completion

__all__ = ["CHECK", "FIT", "Mix", "Spent", "TurnCosts", "Turns", "measure_turns", "part_costs"]

_PLUGINS: Final = Path(__file__).with_name("turn_plugins")
_METHOD: Final = "bench.mix.report"
_QUESTION: Final = re.compile(r"mix-(\d+)-(\d+)-(\d+)-[0-9a-f]{8}")
_USAGE: Final = {"prompt_tokens": 100, "completion_tokens": 20, "total_tokens": 120}
_TURNS_OF_CHAT: Final = 5
_REQUEST_SECONDS: Final = 120.0
_SYNCS: Final = 200
_PAGE_BYTES: Final = 8192
_LOGGED: Final = re.compile(r"LOG:  (?:statement|execute [^:]*): (\w+)")


@dataclass(frozen=True, kw_only=True)
class Mix:
    """A kind of turn: rounds with code, each of which ends with an AGENT call, then a round with words."""

    code_rounds: int
    #: TOOL calls and BEHAVIOR calls in each round with code.
    tools: int = 0
    notes: int = 0

    def name(self) -> str:
        """Return words for a table."""
        if not self.code_rounds:
            return "words"
        return f"{self.code_rounds} × (code, {self.tools} TOOL, {self.notes} BEHAVIOR, 1 AGENT), words"


#: The mixes from which the costs of the parts are computed.
FIT: Final = (
    Mix(code_rounds=0),
    Mix(code_rounds=1),
    Mix(code_rounds=1, tools=20),
    Mix(code_rounds=1, notes=10),
)
#: The mix that the costs have to predict.
CHECK: Final = Mix(code_rounds=3, tools=5, notes=2)


@dataclass(frozen=True, kw_only=True)
class Spent:
    """What a turn, or a part of it, takes."""

    #: CPU time by process, with the processes below it.
    cpu_seconds: Mapping[str, float]
    #: Transactions that write, bytes of the write-ahead log, and statements.
    commits: float
    wal_bytes: float
    statements: float
    redis_commands: float
    #: Announcements of events, which every gateway receives.
    announcements: float

    @property
    def total_cpu_seconds(self) -> float:
        """CPU time of all processes."""
        return sum(self.cpu_seconds.values())

    def plus(self, other: Spent, times: float) -> Spent:
        """Return this with ``times`` times the other added."""
        names = {*self.cpu_seconds, *other.cpu_seconds}
        return Spent(
            cpu_seconds={
                name: self.cpu_seconds.get(name, 0.0) + times * other.cpu_seconds.get(name, 0.0)
                for name in sorted(names)
            },
            **{
                name: getattr(self, name) + times * getattr(other, name)
                for name in ("commits", "wal_bytes", "statements", "redis_commands", "announcements")
            },
        )

    def scaled(self, factor: float) -> Spent:
        """Return a multiple."""
        return self.plus(self, factor - 1)


@dataclass(frozen=True, kw_only=True)
class TurnCosts:
    """What the parts of a turn take."""

    #: A turn with words only.
    words: Spent
    #: A round with code and an AGENT call, and the request to the model that follows it.
    code_round: Spent
    tool: Spent
    #: A call whose row is recorded.
    note: Spent

    def busy(self, redis_seconds_per_command: float) -> TurnCosts:
        """Return the costs where Redis reads many commands at once, so that each costs it less."""

        def priced(spent: Spent) -> Spent:
            redis = redis_seconds_per_command * spent.redis_commands
            return replace(spent, cpu_seconds={**spent.cpu_seconds, "redis": redis})

        return TurnCosts(**{name: priced(spent) for name, spent in vars(self).items()})

    def of(self, mix: Mix) -> Spent:
        """Return what a mix takes."""
        rounds = mix.code_rounds
        with_code = self.words.plus(self.code_round, rounds)
        return with_code.plus(self.tool, rounds * mix.tools).plus(self.note, rounds * mix.notes)


@dataclass(frozen=True, kw_only=True)
class Turns:
    """What was measured."""

    #: Per turn, in the order of ``FIT``.
    fit: tuple[Spent, ...]
    #: Per turn of ``CHECK``; None when it was not measured.
    check: Spent | None
    #: Of a second without turns.
    idle: Spent
    #: Proportional memory by process, without turns.
    idle_bytes: Mapping[str, int]
    #: Until a page of a file is on the disk (median), where the database lies.
    sync_seconds: float
    #: Load of the machine while the mixes ran.
    load_1m: float


def part_costs(fit: tuple[Spent, ...]) -> TurnCosts:
    """Return the costs of the parts from those of the mixes of ``FIT``; none is negative."""
    words, one, tools, notes = fit
    return TurnCosts(
        words=_positive(words),
        code_round=_positive(one.plus(words, -1)),
        tool=_positive(tools.plus(one, -1).scaled(1 / FIT[2].tools)),
        note=_positive(notes.plus(one, -1).scaled(1 / FIT[3].notes)),
    )


def _positive(spent: Spent) -> Spent:
    values = {name: max(0.0, value) for name, value in vars(spent).items() if name != "cpu_seconds"}
    return Spent(cpu_seconds={name: max(0.0, cpu) for name, cpu in spent.cpu_seconds.items()}, **values)


def measure_turns(
    *, mixes: tuple[Mix, ...], turns: int, chats: int = 4, idle_seconds: float = 10.0
) -> tuple[list[Spent], Turns]:
    """Start a system with PostgreSQL and take turns of each mix, in two rounds; returns their costs per turn.

    The second value lacks ``fit`` and ``check``.

    Raises:
        NotAvailableError: PostgreSQL cannot run here.
    """
    with tempfile.TemporaryDirectory(prefix="scale-turns-", ignore_cleanup_errors=True) as name:
        return asyncio.run(_measured(Path(name), mixes, turns, chats, idle_seconds))


class _Model(ChatEndpoint):
    """Answers the newest question of a prompt, by the reports that the prompt shows."""

    async def answer(self, body: dict[str, Any]) -> tuple[HTTPStatus, dict[str, Any]]:
        """Return code or words."""
        prompt = "\n".join(str(message.get("content")) for message in body["messages"])
        found = list(_QUESTION.finditer(prompt))[-1]
        rounds, tools, notes = map(int, found.groups())
        done = sum(f"found {number} for {found[0]}" in prompt for number in range(rounds))
        text = f"The answer to {found[0]}." if done == rounds else _code(done, tools, notes, found[0])
        return HTTPStatus.OK, completion({"content": text}, model="bench", usage=_USAGE)


def _code(number: int, tools: int, notes: int, mark: str) -> str:
    lines = [
        *(f"for at in range({tools}): count(at)" for _ in range(tools > 0)),
        *(f"for at in range({notes}): note(at)" for _ in range(notes > 0)),
        f'print(report({number}, "{mark}"))',
    ]
    return "I look it up.\n\n```python\n" + "\n".join(lines) + "\n```\n"


class _Observed:
    """A running system, and its counters."""

    def __init__(self, system: Running, http: httpx.AsyncClient) -> None:
        import redis

        if system.database is None or system.redis_url is None:
            raise ValueError("a system of ours with PostgreSQL")
        self._system, self._http = system, http
        self._database = psycopg.connect(system.database.url, autocommit=True)
        self._redis = redis.Redis.from_url(system.redis_url)
        self._events = self._redis.pubsub(ignore_subscribe_messages=True)  # type: ignore[no-untyped-call]
        self._events.psubscribe("*events")
        self._announced = 0
        self._log = Path(str(self._one("SHOW data_directory")[0])) / "log"

    def close(self) -> None:
        self._database.close()
        self._events.close()
        self._redis.close()

    def _one(self, statement: str) -> tuple[Any, ...]:
        row = self._database.execute(statement).fetchone()
        assert row is not None
        return tuple(row)

    def spent(self) -> Spent:
        """Return what the system has taken so far."""
        # A snapshot's limit is the next transaction's id, which only transactions that write take.
        commits, wal = self._one(
            "SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint,"
            " pg_current_wal_insert_lsn() - '0/0'"
        )
        logged = Counter(_LOGGED.findall(self._log.read_text("utf-8", "replace")))
        return Spent(
            cpu_seconds={name: tree_cpu_seconds(pids) for name, pids in self._system.processes().items()},
            commits=float(commits),
            wal_bytes=float(wal),
            statements=float(logged.total()),
            redis_commands=float(self._redis.info("stats")["total_commands_processed"]),
            announcements=float(self._count_announcements()),
        )

    def _count_announcements(self) -> int:
        # None also for the answer to the subscription.
        quiet = 0
        while quiet < 2:
            quiet = quiet + 1 if self._events.get_message(timeout=0.01) is None else 0
            self._announced += not quiet
        return self._announced

    def log_statements(self, on: bool) -> None:
        """Let the server log statements, for all sessions."""
        self._database.execute(f"ALTER SYSTEM SET log_statement = '{'all' if on else 'none'}'")
        self._one("SELECT pg_reload_conf()")

    def bytes(self) -> dict[str, int]:
        """Return the proportional memory of the processes."""
        return {name: tree_pss_bytes(pids) for name, pids in self._system.processes().items()}

    async def turns(self, mix: Mix, count: int, chats: int) -> None:
        """Take turns, ``count`` of them in each of the chats at once."""

        async def chat() -> None:
            for number in range(count):
                if number % _TURNS_OF_CHAT == 0:
                    key = f"chat-{uuid4().hex[:12]}"
                mark = f"mix-{mix.code_rounds}-{mix.tools}-{mix.notes}-{uuid4().hex[:8]}"
                path, body = self._system.request(key, f"Please look {mark} up.")
                answer = await self._http.post(path, json=body)
                if not answer.is_success or f"The answer to {mark}" not in answer.text:
                    raise RuntimeError(f"{answer.status_code}: {answer.text[-500:]}")

        async with asyncio.TaskGroup() as group:
            for _ in range(chats):
                group.create_task(chat())


async def _measured(
    directory: Path, mixes: tuple[Mix, ...], turns: int, chats: int, idle_seconds: float
) -> tuple[list[Spent], Turns]:
    model = _Model()
    started = our_system(directory, await model.start(), postgresql=True, plugins=_PLUGINS, method=_METHOD)
    system = await asyncio.to_thread(started.__enter__)
    limits = httpx.Limits(max_connections=chats + 1, keepalive_expiry=2)
    http = httpx.AsyncClient(
        base_url=system.url, headers=system.headers, limits=limits, timeout=_REQUEST_SECONDS
    )
    try:
        observed = _Observed(system, http)
        try:
            return await _all_mixes(observed, directory, mixes, turns, chats, idle_seconds)
        finally:
            observed.close()
    finally:
        await http.aclose()
        await asyncio.to_thread(started.__exit__, None, None, None)
        model.stop()


async def _all_mixes(
    observed: _Observed, directory: Path, mixes: tuple[Mix, ...], turns: int, chats: int, idle_seconds: float
) -> tuple[list[Spent], Turns]:
    each, warm_turns = max(1, turns // chats // 2), max(1, turns // chats)
    for mix in mixes:
        # A connection prepares a statement when it has run five times.
        await observed.turns(mix, warm_turns, chats)
    idle = await _idle(observed, idle_seconds)
    memory = observed.bytes()
    found: list[list[Spent]] = [[] for _ in mixes]
    for _ in range(2):  # in turns, so that a change of the load meets all of them
        for number, mix in enumerate(mixes):
            found[number].append(await _per_turn(observed, mix, each, chats, idle))
    load = os.getloadavg()[0]
    costs = [one.scaled(0.5).plus(other, 0.5) for one, other in found]
    observed.log_statements(True)
    logged_idle = await _idle(observed, idle_seconds / 2)
    for number, mix in enumerate(mixes):
        statements = (await _per_turn(observed, mix, 2, chats, logged_idle)).statements
        costs[number] = replace(costs[number], statements=statements)
    observed.log_statements(False)
    return costs, Turns(
        fit=(),
        check=None,
        idle=replace(idle, statements=logged_idle.statements),
        idle_bytes=memory,
        sync_seconds=_sync_seconds(directory),
        load_1m=load,
    )


async def _idle(observed: _Observed, seconds: float) -> Spent:
    before, began = observed.spent(), time.perf_counter()
    await asyncio.sleep(seconds)
    return observed.spent().plus(before, -1).scaled(1 / (time.perf_counter() - began))


async def _per_turn(observed: _Observed, mix: Mix, each: int, chats: int, idle: Spent) -> Spent:
    before, began = observed.spent(), time.perf_counter()
    await observed.turns(mix, each, chats)
    used = observed.spent().plus(before, -1)
    return used.plus(idle, began - time.perf_counter()).scaled(1 / (each * chats))


def _sync_seconds(directory: Path) -> float:
    taken = []
    with (directory / "sync").open("wb", buffering=0) as file:
        for _ in range(_SYNCS):
            file.write(bytes(_PAGE_BYTES))
            began = time.perf_counter()
            os.fdatasync(file.fileno())
            taken.append(time.perf_counter() - began)
    return sorted(taken)[len(taken) // 2]
