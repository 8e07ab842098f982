"""Turns of a chat, for lists."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Final, TypeVar

from gateway.streams.turn_states import TurnEnd, turn_cause
from nekro_client.models import TurnSummary
from storage.listings.turns import ListedRound
from storage.repositories.events import ChatEvent
from storage.states import TriggerKind
from storage.transaction import Transaction

__all__ = ["read_turns"]

#: Characters of the message that caused a turn.
_TEXT_CHARS: Final = 200
Number = TypeVar("Number", int, float)


async def read_turns(
    transaction: Transaction, chat_key: str, *, limit: int, before: int | None
) -> list[tuple[int, TurnSummary]]:
    """Return the newest turns of a chat, the newest first, each with its position among all rounds.

    Args:
        before: only turns with a smaller position; None begins.
    """
    listing = transaction.turn_listing
    firsts = await listing.first_rounds(chat_key, limit=limit, before=before)
    ids = [item.id for item in firsts]
    rounds: defaultdict[str, list[ListedRound]] = defaultdict(list)
    for item in await listing.rounds(ids):
        rounds[item.turn_id].append(item)
    merged = (item.merged_into for many in rounds.values() for item in many)
    takers = await listing.by_id({taker for taker in merged if taker is not None})
    ends = await listing.ends(ids)
    texts = await listing.texts(
        [item.trigger_id for item in firsts if item.trigger_kind is TriggerKind.MESSAGE]
    )
    return [
        (
            first.sequence,
            _summary(
                chat_key,
                first,
                rounds[first.id],
                [takers[item.merged_into] for item in rounds[first.id] if item.merged_into in takers],
                ends.get(first.id),
                texts.get(first.trigger_id),
            ),
        )
        for first in firsts
    ]


def _summary(
    chat_key: str,
    first: ListedRound,
    rounds: Sequence[ListedRound],
    takers: Sequence[ListedRound],
    end: ChatEvent | None,
    text: str | None,
) -> TurnSummary:
    turn = TurnEnd(rounds, takers, end)
    return TurnSummary(
        id=first.id,
        chat_key=chat_key,
        state=turn.state,
        cause=turn_cause(first),
        merged_into=next((taker.turn_id for taker in takers if taker.turn_id != first.id), None),
        text=None if text is None else text[:_TEXT_CHARS],
        user_id=first.user_id,
        requested_at=first.requested_at,
        started_at=turn.started_at,
        finished_at=turn.finished_at,
        error=turn.error,
        rounds=len(rounds),
        has_retries=any(item.attempt > 1 for item in rounds),
        models=sorted({item.model for item in rounds if item.model}),
        prompt_tokens=_sum(item.prompt_tokens for item in rounds),
        completion_tokens=_sum(item.completion_tokens for item in rounds),
        cost=_sum(item.cost for item in rounds),
    )


def _sum(values: Iterable[Number | None]) -> Number | None:
    """Return the sum of the known values; None if none is."""
    known = [value for value in values if value is not None]
    return sum(known[1:], known[0]) if known else None
