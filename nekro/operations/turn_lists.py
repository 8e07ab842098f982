"""Lists of turns."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Final, TypeVar

from nekro.operations.actor import Actor, Scope
from nekro.operations.chats import require_chat
from nekro.operations.pages import cursor_invalid, cursor_of, place_of, place_text
from nekro.operations.turn_states import TurnEnd, awaited, awaited_calls, turn_cause
from nekro_client.models import Page, TurnState, TurnSummary
from storage.listings.chats import ListedRound, TurnFilter, TurnPosition
from storage.repositories.events import ChatEvent
from storage.states import ApprovalState, CallState, TriggerKind
from storage.transaction import Transaction

__all__ = ["list_turns"]

#: Characters of the message that caused a turn.
_TEXT_CHARS: Final = 200
#: Turns that are read at once where not all of them may be listed, and at most for one page.
_BATCH: Final = 200
_MOST_SEEN: Final = 2000
#: Recorded states of the turns in a state, for the database; None: they have not ended. A turn that
#: has ended as waiting is done or cancelled when people have decided.
_RECORDED: Final[Mapping[TurnState, tuple[str | None, ...]]] = {
    TurnState.WAITING: (None, TurnState.WAITING),
    TurnState.RUNNING: (None,),
    TurnState.DONE: (TurnState.DONE, TurnState.WAITING),
    TurnState.FAILED: (TurnState.FAILED,),
    TurnState.CANCELLED: (TurnState.CANCELLED, TurnState.WAITING),
}
Number = TypeVar("Number", int, float)


async def list_turns(
    actor: Actor,
    chat_key: str | None = None,
    *,
    state: TurnState | None = None,
    since: datetime | None = None,
    until: datetime | None = None,
    model: str | None = None,
    plugin: str | None = None,
    min_cost: float | None = None,
    beginning: str = "",
    limit: int = 50,
    cursor: str | None = None,
) -> Page[TurnSummary]:
    """List the turns of a chat, or of all chats that the actor has, the newest first.

    Args:
        state: only turns in this state; a page may then have fewer turns than ``limit``, and a next one.
        since, until, model, plugin, min_cost, beginning: as in ``TurnFilter``.

    Raises:
        RefusedError: 403, 404, the key may not; 422, the cursor is none of this list.
        NotFoundError: there is no such chat.
    """
    identity = actor.identity
    identity.require(Scope.READ, chat_key=chat_key)
    is_of_all = identity.is_of_all_chats or chat_key is not None
    wanted = TurnFilter(
        chat_key=chat_key,
        prefix="" if is_of_all else identity.chat_prefix,
        since=since,
        until=until,
        min_cost=min_cost,
        model=model,
        plugin=plugin,
        beginning=beginning,
    )
    async with actor.services.database.read() as transaction:
        if chat_key is not None:
            await require_chat(transaction, chat_key)
        found, at = await _read_turns(
            transaction,
            wanted,
            limit=limit,
            after=None if cursor is None else _position(cursor),
            state=state,
            has_chat=None if is_of_all else identity.has_chat,
        )
    more = None if at is None else cursor_of(place_text(at.requested_at, str(at.sequence)))
    return Page(items=found, next_cursor=more)


def _position(cursor: str) -> TurnPosition:
    requested_at, number = place_of(cursor)
    if not (number.isascii() and number.isdigit() and len(number) < 19):
        raise cursor_invalid()
    return TurnPosition(requested_at=requested_at, sequence=int(number))


async def _read_turns(
    transaction: Transaction,
    wanted: TurnFilter,
    *,
    limit: int,
    after: TurnPosition | None,
    state: TurnState | None = None,
    has_chat: Callable[[str], bool] | None = None,
) -> tuple[list[TurnSummary], TurnPosition | None]:
    """Return the turns that fit, the newest first, and where the next page begins.

    That is None if there are no more.

    Args:
        after: the last turn of the page before; None begins.
        state: only turns in this state.
        has_chat: only turns of chats that it accepts. With it, or with a state, at most ``_MOST_SEEN``
            turns are looked at, so a page may have fewer turns than ``limit``, and a next one.
    """
    states = None if state is None else _RECORDED[state]
    size = limit + 1 if state is None and has_chat is None else max(limit + 1, _BATCH)
    kept: list[TurnSummary] = []
    seen = 0
    while True:
        firsts = await transaction.turn_search.page(wanted, states=states, limit=size, after=after)
        own = [item for item in firsts if has_chat is None or has_chat(item.chat_key)]
        summaries = await _summaries(transaction, own)
        for first in firsts:
            turn = summaries.get(first.id)
            if turn is not None and state in (None, turn.state):
                if len(kept) == limit:
                    return kept, after
                kept.append(turn)
            after = TurnPosition(requested_at=first.requested_at, sequence=first.sequence)
        seen += len(firsts)
        if len(firsts) < size:
            return kept, None
        if seen >= _MOST_SEEN:
            return kept, after


async def _summaries(transaction: Transaction, firsts: Sequence[ListedRound]) -> dict[str, TurnSummary]:
    """Return turns by their ids."""
    listing = transaction.turn_listing
    ids = [item.id for item in firsts]
    rounds: defaultdict[str, list[ListedRound]] = defaultdict(list)
    for item in await listing.rounds(ids):
        rounds[item.turn_id].append(item)
    merged = (item.merged_into for many in rounds.values() for item in many)
    takers = await listing.by_id({taker for taker in merged if taker is not None})
    ends = await listing.ends(ids)
    approvals = await transaction.approvals.states({one for end in ends.values() for one in awaited(end)})
    calls = [one for end in ends.values() for one in awaited_calls(end)]
    waits = await transaction.parked_programs.states(calls)
    texts = await listing.texts(
        [item.trigger_id for item in firsts if item.trigger_kind is TriggerKind.MESSAGE]
    )
    return {
        first.id: _summary(
            first,
            rounds[first.id],
            [takers[item.merged_into] for item in rounds[first.id] if item.merged_into in takers],
            ends.get(first.id),
            approvals,
            waits,
            texts.get(first.trigger_id),
        )
        for first in firsts
    }


def _summary(
    first: ListedRound,
    rounds: Sequence[ListedRound],
    takers: Sequence[ListedRound],
    end: ChatEvent | None,
    approvals: Mapping[str, ApprovalState],
    waits: Mapping[str, CallState],
    text: str | None,
) -> TurnSummary:
    turn = TurnEnd(rounds, takers, end, approvals, waits)
    return TurnSummary(
        id=first.id,
        chat_key=first.chat_key,
        state=turn.state,
        waits_for=turn.waits_for,
        waits=turn.waits,
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
        tokens_estimated=any(item.tokens_estimated for item in rounds),
        cost=_sum(item.cost for item in rounds),
    )


def _sum(values: Iterable[Number | None]) -> Number | None:
    """Return the sum of the known values; None if none is."""
    known = [value for value in values if value is not None]
    return sum(known[1:], known[0]) if known else None
