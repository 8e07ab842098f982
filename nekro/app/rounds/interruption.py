"""What is known of a round whose worker died after the model had answered."""

from __future__ import annotations

from collections.abc import Sequence

from nekro.sandbox.models import STOPS, StopType
from storage.repositories.calls import Call
from storage.states import CallState, TriggerKind
from storage.transaction import Transaction

__all__ = ["interruption_of", "woken_by"]


async def woken_by(transaction: Transaction, rows: Sequence[Call]) -> StopType | None:
    """Return the stop type of a call whose result has requested the next round or will do so, else None."""
    for row in rows:
        if row.state is CallState.AWAITING or await transaction.approvals.of_call(row.id) is not None:
            return StopType.APPROVAL
        is_result = row.state is CallState.DONE and row.type in STOPS
        if is_result and await transaction.rounds.find_by_trigger(TriggerKind.CALL, row.id) is not None:
            return STOPS[row.type]
    return None


def interruption_of(rows: Sequence[Call]) -> str:
    """Return the text for the model: its program was interrupted, and the states of its recorded calls."""
    fates = "".join(f" `{row.method.rpartition('.')[2]}`: {_fate(row.state)}." for row in rows)
    return (
        "The host that ran the program went down, perhaps in the middle of it; what it printed is lost. "
        f"What it did before may stand.{fates} Look at the chat before you repeat anything."
    )


def _fate(state: CallState) -> str:
    if state is CallState.DONE:
        return "done"
    if state is CallState.AWAITING:
        return "waits for approval"
    if state in (CallState.QUEUED, CallState.RUNNING):
        return "still running"
    return "outcome unknown" if state is CallState.UNKNOWN else "failed"
