"""The attempts of a job, from the entries of its log."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Final

from storage.repositories.job_log import JobLogEntry
from storage.states import JobLogKind

__all__ = ["JobAttempt", "attempts_of"]

_ENDS: Final = frozenset(
    {
        JobLogKind.RELEASED,
        JobLogKind.RESTARTED,
        JobLogKind.SUCCEEDED,
        JobLogKind.FAILED,
        JobLogKind.CANCELLED,
    }
)


@dataclass(frozen=True, kw_only=True)
class JobAttempt:
    """One attempt at a job, by one worker."""

    number: int
    worker: str | None
    started_at: datetime
    #: None while it runs, and if its worker died: no row records when.
    ended_at: datetime | None = None
    #: ``running``, ``released``, ``restarted``, ``succeeded``, ``failed``, ``cancelled`` or ``lost``.
    outcome: str = "running"
    message: str = ""
    #: When its newest entry was added.
    last_at: datetime


def attempts_of(entries: Sequence[JobLogEntry]) -> list[JobAttempt]:
    """Return the attempts in order; one that another follows without an end was lost with its worker."""
    attempts: list[JobAttempt] = []
    for entry in entries:
        if entry.kind is JobLogKind.STARTED:
            if attempts and attempts[-1].outcome == "running":
                attempts[-1] = replace(attempts[-1], outcome="lost", message="its worker died")
            attempts.append(
                JobAttempt(number=entry.attempt, worker=entry.worker, started_at=entry.at, last_at=entry.at)
            )
        elif attempts and attempts[-1].outcome == "running":
            changed = replace(attempts[-1], last_at=entry.at)
            if entry.kind in _ENDS:
                changed = replace(changed, outcome=entry.kind.value, message=entry.text, ended_at=entry.at)
            attempts[-1] = changed
    return attempts
