"""The tour as a timeline: messages, rounds and methods, with the process that ran each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Final

from nekro.cli.output import Output, one_line
from nekro.sandbox.models import StopType
from nekro_agent.ports import MessageKind

from .points import Evidence, Point, file_of

__all__ = ["TimelineEntry", "build", "show"]

_TEXT_COLUMNS: Final = 84
_SPEAKERS: Final = {
    MessageKind.USER: "Ada",
    MessageKind.ASSISTANT: "agent",
    MessageKind.SYSTEM: "history",
}


@dataclass(frozen=True, kw_only=True)
class TimelineEntry:
    """One message, the start or end of a round, or one task."""

    at: datetime
    #: Name of the worker, or the sender of a message.
    where: str
    #: Process id; None for messages.
    process: int | None
    what: str


def build(evidence: Evidence) -> list[TimelineEntry]:
    """Return the timeline, oldest entry first."""
    entries = [*_messages(evidence), *_rounds(evidence), *_tasks(evidence)]
    return sorted(entries, key=lambda entry: entry.at)


def _messages(evidence: Evidence) -> Iterator[TimelineEntry]:
    for message in evidence.messages:
        text = message.text or f"[file {file_of(message)}]"
        yield TimelineEntry(
            at=message.created_at,
            where=_SPEAKERS[message.kind],
            process=None,
            what=one_line(text, limit=_TEXT_COLUMNS),
        )


def _rounds(evidence: Evidence) -> Iterator[TimelineEntry]:
    for entry in evidence.rounds:
        if entry.started_at is None or entry.finished_at is None:
            continue
        process = evidence.pid_of(entry.worker)
        where = evidence.name_of(process)
        request = evidence.request_of(entry.id)
        asked = f", asks the model with {len(request.images)} images" if request and request.images else ""
        yield TimelineEntry(
            at=entry.started_at, where=where, process=process, what=f"round {entry.number} begins{asked}"
        )
        stop = StopType(entry.stop_type).name if entry.stop_type is not None else entry.state
        yield TimelineEntry(
            at=entry.finished_at, where=where, process=process, what=f"round {entry.number} ends with {stop}"
        )


def _tasks(evidence: Evidence) -> Iterator[TimelineEntry]:
    for task in evidence.tasks:
        # Rounds are in the timeline already.
        if task.name.startswith("nekro.rounds."):
            continue
        lasted = ""
        if task.ended_at is not None:
            lasted = f" ({(task.ended_at - task.received_at).total_seconds() * 1000:.0f} ms)"
        yield TimelineEntry(
            at=task.received_at,
            where=evidence.name_of(task.pid),
            process=task.pid,
            what=f"{task.name}{' failed' if task.failed else ''}{lasted}",
        )


def show(evidence: Evidence, checked: Sequence[Point], output: Output, *, as_json: bool) -> None:
    """Print the timeline and the points; as one JSON document, or as a table and lines."""
    entries = build(evidence)
    if as_json:
        output.json(
            {"timeline": [asdict(entry) for entry in entries], "points": [asdict(point) for point in checked]}
        )
        return
    start = entries[0].at if entries else None
    rows = [
        (f"+{(entry.at - start).total_seconds():.3f}s", entry.where, entry.process or "", entry.what)
        for entry in entries
        if start is not None
    ]
    output.table(("TIME", "WHERE", "PROCESS", "WHAT"), rows)
    output.report("")
    for point in checked:
        mark = "✓" if point.ok else "–" if point.is_left_out else "✗"
        output.report(f"{mark} {point.name}: {point.detail}")
