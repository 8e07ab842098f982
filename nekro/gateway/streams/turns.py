"""The events of one turn, until it ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress

from nekro.gateway.streams.events import StreamEvent
from nekro.gateway.streams.hub import EventHub, EventsLostError
from nekro.operations.actor import Identity
from nekro_client.models import Event, EventType
from storage.engine import Database
from storage.repositories.rounds import Round

__all__ = ["turn_end", "turn_events"]


async def turn_events(
    hub: EventHub,
    database: Database,
    turn_id: str,
    *,
    owner: Identity | None = None,
    with_live: bool = False,
) -> AsyncGenerator[StreamEvent, None]:
    """Yield the kept events of a turn up to its end, which is the last one.

    They stop without it if the gateway stops, if the owner's key is no longer valid, or if the database loses
    events that were yielded.

    A turn whose round was merged into a round of another turn is answered there, so the events of that
    round are included.

    Args:
        owner: see ``EventHub.stream``.
        with_live: also its live events, which may be missing.

    Raises:
        NotFoundError: there is no such turn.
        SlowReaderError: as from ``EventHub.stream``.
    """
    first, begin = await _beginning(database, turn_id)
    if begin is None:  # retention has deleted its events, so it ended long ago
        return
    takers: set[str] = set()
    stream = hub.stream(first.chat_key, after=begin - 1, with_live=with_live, owner=owner)
    with suppress(EventsLostError):
        async with aclosing(stream) as events:
            async for item in events:
                event = item.event
                if _takes(event, turn_id):
                    takers.add(event.round_id or "")
                is_own = event.turn_id == turn_id
                is_of_taker = event.round_id in takers and event.type != EventType.TURN_ENDED
                if is_own or is_of_taker:
                    yield item
                if is_own and event.type == EventType.TURN_ENDED:
                    return


async def turn_end(
    hub: EventHub, database: Database, turn_id: str, *, seconds: float | None = None
) -> Event | None:
    """Wait for the end of a turn; returns its event ``turn.ended``.

    None if it has not ended in time, or ended so long ago that its events were deleted.

    Raises:
        NotFoundError: there is no such turn.
        SlowReaderError: as from ``EventHub.stream``.
    """
    last: Event | None = None
    try:
        async with (
            asyncio.timeout(seconds),
            aclosing(turn_events(hub, database, turn_id)) as events,
        ):
            async for item in events:
                last = item.event
    except TimeoutError:
        return None
    return last if last is not None and last.type == EventType.TURN_ENDED else None


async def _beginning(database: Database, turn_id: str) -> tuple[Round, int | None]:
    """Return the first round of a turn and the number of its oldest event; None if all have expired."""
    async with database.read() as transaction:
        first = await transaction.rounds.get(turn_id)
        return first, await transaction.events.begin_of_turn(turn_id)


def _takes(event: Event, turn_id: str) -> bool:
    """Whether a round began that a round of the turn was merged into."""
    if event.type != EventType.ROUND_STARTED or event.turn_id == turn_id:
        return False
    return any(item.get("turn_id") == turn_id for item in event.data.get("merged", ()))
