"""The ends of turns: recorded once each, in the transaction after which no round of the turn will run.

A turn whose last round ended with a call that a person has to approve ends as ``waiting``, and names the
requests. The decision is no second end: what it starts is a turn of its own.

A turn is open while one of its rounds is, or is merged into a round that is. The writers of rounds hold the
chat's lock, so of several rounds of a turn exactly one finds itself to be the last.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from nekro.sandbox.models import StopType
from storage.repositories.events import NewEvent
from storage.repositories.rounds import ClaimedRound, Round
from storage.states import EventType, RoundState
from storage.transaction import Transaction

__all__ = ["Fault", "turn_ends"]

#: State of a turn that ends while a person has to decide; ``nekro_client.models.TurnState.WAITING``.
TURN_WAITING: Final = "waiting"


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Why a turn failed: a stable code and a text."""

    code: str
    text: str


async def turn_ends(
    transaction: Transaction,
    ended: Sequence[Round],
    *,
    merged: Iterable[Round],
    following: ClaimedRound | None = None,
    fault: Fault | None = None,
) -> list[NewEvent]:
    """Return the events of the turns that the end of some rounds of one chat ends, and record it for lists.

    Call it after everything that the end of the rounds requests.

    Args:
        ended: rounds that have just ended.
        merged: the rounds that were merged into them.
        following: the chat's next round, if the transaction has started it. Everything that was requested is
            part of it, so no other turn is open.
        fault: why they failed, or why they ended their turn before its work was done; None if they did not.
    """
    if not ended:
        return []
    if following is None:
        open_turns = await transaction.rounds.open_turns(ended[0].chat_key)
    else:
        open_turns = {item.turn_id for item in following.triggers}
    by_id = {item.id: item for item in ended}
    last_rounds: dict[str, Round] = {}
    for item in ended:
        if item.turn_id not in open_turns:
            last_rounds[item.turn_id] = item
    for item in merged:
        if item.turn_id not in open_turns:
            last_rounds.setdefault(item.turn_id, by_id[item.merged_into or ""])
    for item in ended:
        await transaction.turn_search.add_round(item)
    ends = []
    for turn_id, last in last_rounds.items():
        ends.append(_event(turn_id, last, fault, await _pending(transaction, last)))
        await transaction.turn_search.end_turn(turn_id, ends[-1].data["state"])
    return ends


async def _pending(transaction: Transaction, last: Round) -> list[str]:
    """Return the requests for approval that a turn waits for after its last round."""
    if last.state is not RoundState.DONE or last.stop_type != StopType.APPROVAL:
        return []
    return await transaction.approvals.pending_of_turn(last.chat_key, last.turn_id)


def _event(turn_id: str, last: Round, fault: Fault | None, pending: list[str]) -> NewEvent:
    data: dict[str, Any] = {"state": last.state.value}
    if pending:
        data = {"state": TURN_WAITING, "waits_for": pending}
    if fault is not None and last.state is not RoundState.CANCELLED:
        data = {
            "state": RoundState.FAILED.value,
            "error": {"code": fault.code, "text": fault.text},
        }
    if last.turn_id != turn_id:
        data["merged_into"] = last.turn_id
    return NewEvent(type=EventType.TURN_ENDED, turn_id=turn_id, round_id=last.id, data=data)
