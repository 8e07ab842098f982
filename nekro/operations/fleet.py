"""Workers, queues and dead letters."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import closing
from typing import TYPE_CHECKING, Any, TypeVar

from nekro.broker.dead_letters import DeadLetters, DeadMessage, DeadPosition
from nekro.operations.actor import Actor, Scope
from nekro.operations.pages import Beginning, Cursor, Limit, answer_of, cursor_of, number_of
from nekro_agent.errors import BrokerUnavailableError, NekroError
from nekro_client.models import Broker, DeadLetter, Page, Queue, Queues, RetryBody, Work, Worker

if TYPE_CHECKING:
    from nekro.app.services import Services
    from nekro.broker.broker_figures import BrokerFigures

__all__ = [
    "dead_letter_answer",
    "delete_dead_letter",
    "get_dead_letter",
    "get_queues",
    "list_dead_letters",
    "list_workers",
    "retry_dead_letter",
]

T = TypeVar("T")


async def list_workers(actor: Actor) -> Page[Worker]:
    """List the workers that published what they serve, the one that started last at the end."""
    actor.identity.require_all(Scope.ADMIN)
    catalogue = await actor.services.read_catalogue()
    async with actor.services.database.read() as transaction:
        rows = await transaction.worker_listing.by_id([one.id for one in catalogue.workers])
        calls, rounds, jobs = await transaction.worker_listing.running()
    return Page(
        items=[
            Worker(
                id=one.id,
                name=one.name,
                lane=one.lane,
                host=one.host,
                pid=one.pid,
                started_at=one.started_at,
                is_live=one.is_live,
                release=rows[one.id].release if one.id in rows else None,
                lease_until=rows[one.id].lease_until if one.id in rows else None,
                running_calls=calls[one.name],
                running_rounds=rounds[one.name],
                running_jobs=jobs[one.name],
            )
            for one in catalogue.workers
        ]
    )


async def get_queues(actor: Actor) -> Queues:
    """Show what waits and runs."""
    actor.identity.require_all(Scope.ADMIN)
    from nekro.broker.broker_figures import merge_queues

    brokers, dead = await asyncio.to_thread(_read_brokers, actor.services)
    async with actor.services.database.read() as transaction:
        overview = transaction.overview
        rounds, jobs, programs = await overview.rounds(), await overview.jobs(), await overview.programs()
    return Queues(
        queues=[
            Queue(lane=one.lane, waiting=one.waiting, held=one.held, oldest_seconds=one.oldest_seconds)
            for one in merge_queues(brokers)
        ],
        brokers=[
            Broker(
                name=one.name,
                is_up=one.queues is not None,
                is_drained=one.is_drained,
                messages=one.messages,
            )
            for one in brokers
        ],
        rounds=answer_of(Work, rounds),
        jobs=answer_of(Work, jobs),
        programs=answer_of(Work, programs),
        dead_letters=dead,
    )


async def list_dead_letters(
    actor: Actor, beginning: Beginning = "", limit: Limit = 50, cursor: Cursor = None
) -> Page[DeadLetter]:
    """List dead letters, not verified: valid ones before refused ones, the newest first.

    With `id` a page may be shorter than `limit`, also empty, although another one follows.
    """
    actor.identity.require_all(Scope.ADMIN)
    after = None if cursor is None else _position(cursor)
    found, more = await _with_letters(actor, lambda letters: letters.page(limit=limit, after=after))
    # The last bit gives the kind, the others the number of older ones.
    next_cursor = None if more is None else cursor_of(more.older << 1 | more.is_refused)
    items = [dead_letter_answer(message) for message in found if message.id.startswith(beginning)]
    return Page(items=items, next_cursor=next_cursor)


async def get_dead_letter(actor: Actor, letter_id: str) -> DeadLetter:
    """Show a dead letter, with its signatures verified."""
    actor.identity.require_all(Scope.ADMIN)

    def show(letters: DeadLetters) -> DeadLetter:
        message = letters.find(letter_id)
        return dead_letter_answer(message, **letters.checked(message))

    return await _with_letters(actor, show)


async def retry_dead_letter(actor: Actor, letter_id: str, body: RetryBody) -> DeadLetter:
    """Send a dead letter again, under its id; no caller waits for its result."""
    actor.identity.require_all(Scope.ADMIN)

    def again(letters: DeadLetters) -> DeadLetter:
        message = letters.find(letter_id)
        letters.retry(letters.verify(message), timeout_seconds=body.timeout_seconds)
        return dead_letter_answer(message)

    async def work() -> DeadLetter:
        return await _act(actor, "dead_letter.retry", letter_id, again)

    return await actor.once.run(DeadLetter, work, is_repeatable=False)


async def delete_dead_letter(actor: Actor, letter_id: str) -> DeadLetter:
    """Delete a dead letter; returns what it was."""
    actor.identity.require_all(Scope.ADMIN)

    def drop_it(letters: DeadLetters) -> DeadLetter:
        message = letters.find(letter_id)
        letters.drop(message)
        return dead_letter_answer(message)

    return await _act(actor, "dead_letter.drop", letter_id, drop_it)


def _position(cursor: str) -> DeadPosition:
    older, is_refused = divmod(number_of(cursor), 2)
    return DeadPosition(is_refused=bool(is_refused), older=older)


async def _act(
    actor: Actor, action: str, letter_id: str, work: Callable[[DeadLetters], DeadLetter]
) -> DeadLetter:
    await _with_letters(actor, lambda letters: letters.find(letter_id))
    async with actor.services.database.begin() as transaction:
        await actor.record(transaction, action, letter_id)
    return await _with_letters(actor, work)


async def _with_letters(actor: Actor, work: Callable[[DeadLetters], T]) -> T:
    """Run ``work``, which blocks, on a thread."""

    def run() -> T:
        with closing(DeadLetters(actor.services.app, signer=actor.services.signer)) as letters:
            return work(letters)

    return await asyncio.to_thread(run)


def _read_brokers(services: Services) -> tuple[list[BrokerFigures], int | None]:
    from broker_config.redis_library import redis
    from nekro.broker.broker_figures import read_brokers, read_dead

    try:
        brokers = read_brokers(services.app)
        # The first one has the dead letters of all.
        return brokers, None if brokers[0].queues is None else read_dead(services.app)
    except NekroError:
        raise
    except (redis.RedisError, OSError, *services.app.connection().connection_errors) as exc:
        raise BrokerUnavailableError(f"the broker does not answer: {exc}") from exc


def dead_letter_answer(message: DeadMessage, **checked: Any) -> DeadLetter:
    """Return a dead letter; ``checked`` are the fields that its signatures cover."""
    return DeadLetter(
        id=message.id,
        task=message.task,
        lane=message.lane,
        source="broker" if message.refusal is None else "refused",
        reason=message.reason,
        deliveries=message.deliveries,
        bytes=message.size_bytes,
        **checked,
    )
