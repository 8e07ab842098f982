"""The ends of turns: recorded once each, in the transaction after which no round of the turn will run.

A turn is open while one of its rounds is, or is merged into a round that is. The writers of rounds hold the
chat's lock, so of several rounds of a turn exactly one finds itself to be the last.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from storage.repositories.events import NewEvent
from storage.repositories.rounds import ClaimedRound, Round
from storage.states import EventType, RoundState
from storage.transaction import Transaction

__all__ = ["Fault", "turn_ends"]


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
    """Return the events of the turns that the end of some rounds of one chat ends.

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
    ends: dict[str, NewEvent] = {}
    for item in ended:
        if item.turn_id not in open_turns:
            ends[item.turn_id] = _event(item.turn_id, item, fault)
    for item in merged:
        if item.turn_id not in open_turns and item.turn_id not in ends:
            ends[item.turn_id] = _event(item.turn_id, by_id[item.merged_into or ""], fault)
    return list(ends.values())


def _event(turn_id: str, last: Round, fault: Fault | None) -> NewEvent:
    data: dict[str, Any] = {"state": last.state.value}
    if fault is not None and last.state is not RoundState.CANCELLED:
        data = {
            "state": RoundState.FAILED.value,
            "error": {"code": fault.code, "text": fault.text},
        }
    if last.turn_id != turn_id:
        data["merged_into"] = last.turn_id
    return NewEvent(type=EventType.TURN_ENDED, turn_id=turn_id, round_id=last.id, data=data)
