"""Evidence of a run: lines of methods, lines of callers, rows of the database, times of the faults."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from fault_plan import CallKind, CallPlan, FaultKind
from fleet_probes import ROUND_FAULTS, ask

from storage.engine import Database

#: Longest duration of a fault's consequences, in seconds: leases, retries of records, connections.
AFTERMATH_SECONDS: Final = 30.0


@dataclass(frozen=True, kw_only=True)
class Effect:
    """Start or end of a method (``call_id``) or job (``job <name>``). Times are seconds since the epoch.

    The event of a job whose start failed, so that it does not run, is ``refused``.
    """

    call_id: str
    name: str
    event: str
    pid: int
    at: float


@dataclass(kw_only=True)
class Call:
    """A call as recorded by its caller."""

    plan: CallPlan
    sent_at: float
    deadline: float
    #: Seconds since the epoch; None: the caller recorded no end.
    answered_at: float | None = None
    #: ``ok``, ``detached``, ``cancelled``, ``none`` when no answer came in time, or the class of an error.
    outcome: str | None = None
    #: The value, or the error's text.
    detail: str = ""
    #: Whether its caller was killed.
    is_orphan: bool = False


@dataclass(frozen=True, kw_only=True)
class Row:
    """A recorded call as the database has it."""

    id: str
    type: str
    state: str
    error_type: str | None
    #: Texts of its outcome in the chat's history.
    observations: int
    #: Whether its end is reported to the chat, because its caller does not wait.
    is_detached: bool = False
    #: Whether a worker has claimed it, so that it may have started.
    is_claimed: bool = False


@dataclass(frozen=True, kw_only=True)
class Span:
    """Start and end of a fault."""

    kind: FaultKind
    began: float
    ended: float


@dataclass(frozen=True, kw_only=True)
class Violation:
    """A broken promise."""

    rule: str
    #: Id of the call, or another subject.
    subject: str
    detail: str

    def __str__(self) -> str:
        return f"VIOLATION {self.rule} {self.subject}: {self.detail}"


@dataclass(kw_only=True)
class Evidence:
    """All evidence of a run; ``promises.violations`` judges it."""

    calls: dict[str, Call] = field(default_factory=dict)
    effects: dict[str, list[Effect]] = field(default_factory=dict)
    rows: dict[str, Row] = field(default_factory=dict)
    #: Ids of users' messages.
    messages: set[str] = field(default_factory=set)
    #: Names that plugins stored.
    stored: set[str] = field(default_factory=set)
    #: States of the jobs, by name.
    jobs: dict[str, list[str]] = field(default_factory=dict)
    #: States of calls in the list of jobs, by id.
    listed: dict[str, str] = field(default_factory=dict)
    #: Number of rounds by state.
    rounds: dict[str, int] = field(default_factory=dict)
    faults: list[Span] = field(default_factory=list)
    #: Violations that the run itself detected.
    noticed: list[Violation] = field(default_factory=list)

    @cached_property
    def disturbed(self) -> list[tuple[float, float]]:
        """Periods of the faults and their consequences, merged where they overlap."""
        merged: list[tuple[float, float]] = []
        for span in sorted(self.faults, key=lambda span: span.began):
            began, ended = span.began, span.ended + AFTERMATH_SECONDS
            if merged and merged[-1][1] >= began:
                began, ended = merged[-1][0], max(ended, merged.pop()[1])
            merged.append((began, ended))
        return merged

    def times(self, call_id: str, event: str) -> list[float]:
        """Starts (``start``) or ends (``end``) of a method or job, earliest first."""
        return sorted(effect.at for effect in self.effects.get(call_id, ()) if effect.event == event)


def _lines(path: Path) -> Iterable[dict[str, Any]]:
    if path.exists():
        yield from map(json.loads, path.read_text().splitlines())


def read_effects(*paths: Path) -> dict[str, list[Effect]]:
    """Read the logs of the plugin methods and of the MCP server, by call."""
    found = defaultdict(list)
    for line in itertools.chain.from_iterable(map(_lines, paths)):
        found[line["call_id"]].append(Effect(**line))
    return dict(found)


def read_calls(logs: dict[Path, bool]) -> dict[str, Call]:
    """Read the logs of callers.

    Args:
        logs: whether its caller was killed, by log.
    """
    calls: dict[str, Call] = {}
    names = [item.name for item in fields(CallPlan)]
    for path, was_killed in logs.items():
        for line in _lines(path):
            if line["event"] == "sent":
                plan = CallPlan(**{name: line[name] for name in names} | {"kind": CallKind(line["kind"])})
                call = Call(plan=plan, sent_at=line["at"], deadline=line["deadline"], is_orphan=was_killed)
                calls[plan.call_id] = call
            elif line["event"] == "answered":
                call = calls[line["call_id"]]
                call.answered_at, call.outcome, call.detail = line["at"], line["outcome"], line["detail"]
    return calls


_CALLS = """
    SELECT c.id, c.type, c.state, c.error_type, (
        SELECT count(*) FROM messages m WHERE m.once_key = 'observation:' || c.id
    ) AS observations, c.detached_at IS NOT NULL AS is_detached, c.fence > 0 AS is_claimed FROM calls c"""
#: Open work by table; a quiet system has none.
OPEN = {
    "calls": "SELECT id FROM calls WHERE state IN ('awaiting', 'queued', 'running')",
    "rounds": "SELECT id FROM rounds WHERE state IN ('requested', 'running')",
    "jobs": "SELECT task_id FROM jobs WHERE state IN ('queued', 'running')",
}


async def open_rows(database: Database) -> list[Violation]:
    """Open work, by table."""
    found = {table: await ask(database, query) for table, query in OPEN.items()}
    return [
        Violation(rule="left-open", subject=row[0], detail=f"still open in table {table}")
        for table, rows in found.items()
        for row in rows
    ]


async def read_ledger(evidence: Evidence, database: Database) -> None:
    """Add the database's rows."""
    names = [one.name for one in fields(Row)]
    for values in await ask(database, _CALLS):
        row = Row(**dict(zip(names, values, strict=True)))
        evidence.rows[row.id] = row
    evidence.messages = _first(await ask(database, "SELECT id FROM messages WHERE kind = 'user'"))
    evidence.stored = _first(await ask(database, "SELECT store_key FROM plugin_values"))
    for task_id, state in await ask(database, "SELECT task_id, state FROM jobs WHERE args IS NOT NULL"):
        evidence.jobs.setdefault(task_id, []).append(state)
    evidence.listed = dict(await ask(database, "SELECT id, state FROM jobs WHERE args IS NULL"))
    evidence.rounds = dict(await ask(database, "SELECT state, count(*) FROM rounds GROUP BY state"))
    for fault, query in ROUND_FAULTS.items():
        # A round may fail when the database is lost; open ones are reported separately.
        for row in await ask(database, query) if fault != "a round that is not over" else ():
            evidence.noticed.append(Violation(rule="rounds", subject=str(row[0]), detail=f"{fault}: {row}"))


def _first(rows: Sequence[Any]) -> set[str]:
    return {row[0] for row in rows}
