"""One run: start a system, put load on it, inject faults, judge the evidence."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from evidence import Evidence, Violation
from fault_plan import LIMIT_SECONDS, CallKind, Options, fault_schedule
from fault_world import world
from leftovers import adopting_orphans, descendants, left_over
from nemesis import Nemesis
from postgres_process import PostgresServer
from promises import violations


@dataclass(frozen=True, kw_only=True)
class Report:
    """Result of a run."""

    options: Options
    evidence: Evidence
    violations: list[Violation]

    def lines(self) -> list[str]:
        """Figures, then the violations and, if there are any, the command that repeats the run."""
        figures = [f"{name}: {value}" for name, value in figures_of(self.evidence).items()]
        broken = [str(violation) for violation in self.violations]
        repeat = [f"to repeat: {self.options.command()}"] if broken else []
        return [*figures, *broken, *repeat]


def run(options: Options, directory: Path, postgres: PostgresServer | None) -> Report:
    """Execute a run with its logs in a directory; blocks.

    Args:
        postgres: the server for the database ``postgres``; None for ``sqlite``.
    """
    with adopting_orphans():
        before = descendants()
        evidence = asyncio.run(_run(options, directory, postgres))
        for pid, words in left_over(before).items():
            evidence.noticed.append(Violation(rule="left-process", subject=str(pid), detail=words))
    return Report(options=options, evidence=evidence, violations=violations(evidence))


async def _run(options: Options, directory: Path, postgres: PostgresServer | None) -> Evidence:
    async with world(options, directory, postgres) as made:
        await made.start()
        await Nemesis(made).run(fault_schedule(options))
        return await made.finish()


def figures_of(evidence: Evidence) -> dict[str, object]:
    """Counts of a run."""
    calls = evidence.calls.values()
    given_up = [call.plan.call_id for call in calls if call.outcome == "cancelled"]
    stopped = [name for name in given_up if evidence.times(name, "start") and not evidence.times(name, "end")]
    seconds = sorted(
        call.answered_at - call.sent_at - call.plan.work_seconds
        for call in calls
        if call.answered_at is not None and call.plan.cancel_after_seconds is None
        and call.plan.limit_seconds == LIMIT_SECONDS and call.plan.kind is not CallKind.PERSON
    )  # fmt: skip
    waited = [
        call.plan.call_id for call in calls
        if call.outcome == "CallTimeoutError" and call.plan.limit_seconds == LIMIT_SECONDS
    ]  # fmt: skip
    repeated = [name for name in evidence.effects if len(evidence.times(name, "start")) > 1]
    return {
        "calls": len(evidence.calls),
        "outcomes": dict(Counter(str(call.outcome) for call in calls).most_common()),
        "given up": f"{len(given_up)}, of which {len(stopped)} while their method ran",
        "faults": dict(Counter(span.kind.value for span in evidence.faults).most_common()),
        "methods begun": sum(len(evidence.times(name, "start")) for name in evidence.effects),
        "begun more than once": len(repeated),
        "no answer within the whole limit": len(waited),
        "rows": dict(Counter(row.state for row in evidence.rows.values()).most_common()),
        "rounds": evidence.rounds,
        "seconds beside the method's own": _quantiles(seconds),
    }


def _quantiles(values: list[float]) -> str:
    if not values:
        return "none"
    p50, p99 = values[len(values) // 2], values[int(len(values) * 0.99)]
    return f"p50 {p50:.3f}, p99 {p99:.3f}, most {values[-1]:.2f}"
