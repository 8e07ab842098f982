"""Events of chats, and the ends of turns, for a command without a gateway."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager, suppress
from typing import TYPE_CHECKING

from nekro_agent.durations import PROGRAM_SECONDS
from nekro_agent.errors import ServiceError

if TYPE_CHECKING:
    from nekro.gateway.streams.hub import EventHub
    from nekro.operations.actor import Actor
    from nekro_client.models import Event, Turn

__all__ = ["chat_events", "ended_turn", "last_event_number"]


async def chat_events(
    actor: Actor,
    chat_key: str,
    *,
    after: int | None = None,
    live: bool = True,
    give_up_seconds: float | None = PROGRAM_SECONDS,
) -> AsyncGenerator[Event, None]:
    """Yield the events of a chat, without end.

    Args:
        after: number of the last event that was read; 0 for all kept ones; None for those from now on.
        live: whether to yield events that are not kept, which have no number.
        give_up_seconds: how long the broker may be out of reach; None: for ever.

    Raises:
        BrokerUnavailableError: the broker did not answer, or was out of reach for ``give_up_seconds``.
    """
    from nekro.gateway.streams.events import lost_event
    from nekro.gateway.streams.hub import EventsLostError, SlowReaderError

    async with _event_hub(actor) as hub:
        if after is None:
            after = (await hub.newest(chat_key)).number
        while True:
            stream = hub.stream(chat_key, after=after, with_live=live, give_up_seconds=give_up_seconds)
            try:
                async with aclosing(stream) as events:
                    async for item in events:
                        after = after if item.number is None else item.number
                        yield item.event
            except SlowReaderError:
                continue
            except EventsLostError:
                after = 0
                yield lost_event(chat_key)


async def last_event_number(actor: Actor, chat_key: str) -> int:
    """Return the number of a chat's newest event; 0 if it has none."""
    async with actor.services.database.read() as transaction:
        return (await transaction.events.newest_numbers([chat_key])).get(chat_key, 0)


async def ended_turn(actor: Actor, turn_id: str, *, timeout_seconds: float | None = None) -> Turn:
    """Return a turn when it has ended or waits for a person.

    Raises:
        ServiceError: it has not after ``timeout_seconds``; None waits without end.
    """
    from nekro.gateway.streams.hub import SlowReaderError
    from nekro.gateway.streams.turns import turn_end
    from nekro.operations.turns import get_turn

    turn = await get_turn(actor, turn_id)
    try:
        async with asyncio.timeout(timeout_seconds), _event_hub(actor) as hub:
            while turn.finished_at is None:
                with suppress(SlowReaderError):
                    await turn_end(hub, actor.services.database, turn_id)
                turn = await get_turn(actor, turn_id)
    except TimeoutError:
        raise ServiceError(f"turn {turn_id} is {turn.state} after {timeout_seconds:g} s") from None
    return turn


@asynccontextmanager
async def _event_hub(actor: Actor) -> AsyncIterator[EventHub]:
    from broker_config.embedded import resolve_settings
    from nekro.gateway.streams.hub import EventHub

    hub = EventHub(resolve_settings(actor.services.settings), actor.services.database)
    hub.start()
    try:
        yield hub
    finally:
        await hub.close()
