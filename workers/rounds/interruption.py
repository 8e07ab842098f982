"""What is known of a round whose worker died after the model had answered."""

from __future__ import annotations

from collections.abc import Sequence

from sandbox.models import STOPS, StopType
from storage.repositories.calls import Call
from storage.states import CallState, TriggerKind
from storage.transaction import Transaction

__all__ = ["interruption_of", "woken_by"]


async def woken_by(transaction: Transaction, rows: Sequence[Call]) -> StopType | None:
    """Return the stop type of an AGENT result that already has its follow-up round, else None."""
    for row in rows:
        is_result = row.state is CallState.DONE and row.type in STOPS
        if is_result and await transaction.rounds.find_by_trigger(TriggerKind.CALL, row.id) is not None:
            return STOPS[row.type]
    return None


def interruption_of(rows: Sequence[Call]) -> str:
    """Tell the model that its program was interrupted, and what became of its recorded calls."""
    fates = "".join(f" `{row.method.rpartition('.')[2]}`: {_fate(row.state)}." for row in rows)
    return (
        "The host that ran the program went down, perhaps in the middle of it; what it printed is lost. "
        f"What it did before may stand.{fates} Look at the chat before you repeat anything."
    )


def _fate(state: CallState) -> str:
    if state is CallState.DONE:
        return "done"
    if state in (CallState.QUEUED, CallState.RUNNING):
        return "still running"
    return "outcome unknown" if state is CallState.UNKNOWN else "failed"
