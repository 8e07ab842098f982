"""What operators see and do: workers, queues, dead letters."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import closing
from typing import Any, TypeVar

from fastapi import APIRouter, Request, Response
from redis.exceptions import RedisError

from nekro.app.composition import Services
from nekro.broker.broker_figures import QueueFigures, read_dead, read_queues
from nekro.broker.dead_letters import DeadLetters, DeadPosition
from nekro.gateway.access.audit import record_act
from nekro.gateway.dependencies import IdentityDep, PathText, ServicesDep
from nekro.gateway.idempotency import OnceDep
from nekro.gateway.identity import Scope
from nekro.gateway.routing import KeyedRoute
from nekro.gateway.views import dead_letter_answer
from nekro.gateway.web.paging import Cursor, Limit, cursor_of, number_of
from nekro_agent.errors import BrokerUnavailableError, NekroError
from nekro_client.models import DeadLetter, Page, Queue, Queues, RetryBody, Work, Worker
from storage.listings.overview import OpenWork, OverviewRepository

__all__ = ["router"]

router = APIRouter(route_class=KeyedRoute, tags=["operations"])
T = TypeVar("T")


@router.get("/workers")
async def list_workers(services: ServicesDep, identity: IdentityDep) -> Page[Worker]:
    """List the workers that published what they serve, the one that started last at the end."""
    identity.require_all(Scope.ADMIN)
    catalogue = await services.read_catalogue()
    async with services.database.read() as transaction:
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


@router.get("/queues")
async def get_queues(services: ServicesDep, identity: IdentityDep) -> Queues:
    """Show what waits and runs."""
    identity.require_all(Scope.ADMIN)
    figures, dead = await asyncio.to_thread(_read_broker, services)
    async with services.database.read() as transaction:
        overview = OverviewRepository(transaction.connection)
        rounds, jobs = await overview.rounds(), await overview.jobs()
    return Queues(
        queues=[
            Queue(lane=one.lane, waiting=one.waiting, held=one.held, oldest_seconds=one.oldest_seconds)
            for one in figures
        ],
        rounds=_work(rounds),
        jobs=_work(jobs),
        dead_letters=dead,
    )


@router.get("/dead-letters")
async def list_dead_letters(
    services: ServicesDep, identity: IdentityDep, limit: Limit = 50, cursor: Cursor = None
) -> Page[DeadLetter]:
    """List dead letters, not verified: valid ones before refused ones, the newest first."""
    identity.require_all(Scope.ADMIN)
    after = None if cursor is None else _position(cursor)
    found, more = await _with_letters(services, lambda letters: letters.page(limit=limit, after=after))
    # The last bit gives the kind, the others the number of older ones.
    next_cursor = None if more is None else cursor_of(more.older << 1 | more.is_refused)
    return Page(items=[dead_letter_answer(message) for message in found], next_cursor=next_cursor)


@router.get("/dead-letters/{letter_id}")
async def get_dead_letter(letter_id: PathText, services: ServicesDep, identity: IdentityDep) -> DeadLetter:
    """Show a dead letter, with its signatures verified."""
    identity.require_all(Scope.ADMIN)

    def show(letters: DeadLetters) -> DeadLetter:
        message = letters.find(letter_id)
        return dead_letter_answer(message, **letters.checked(message))

    return await _with_letters(services, show)


@router.post("/dead-letters/{letter_id}/retry", response_model=DeadLetter)
async def retry_dead_letter(
    letter_id: PathText,
    body: RetryBody,
    request: Request,
    services: ServicesDep,
    identity: IdentityDep,
    once: OnceDep,
) -> Response:
    """Send a dead letter again, under its id; no caller waits for its result."""

    def again(letters: DeadLetters) -> DeadLetter:
        message = letters.find(letter_id)
        letters.retry(letters.verify(message), timeout_seconds=body.timeout_seconds)
        return dead_letter_answer(message)

    identity.require_all(Scope.ADMIN)
    return await once.run(
        lambda: _act(request, services, identity, "dead_letter.retry", letter_id, again), is_repeatable=False
    )


@router.delete("/dead-letters/{letter_id}")
async def delete_dead_letter(
    letter_id: PathText, request: Request, services: ServicesDep, identity: IdentityDep
) -> DeadLetter:
    """Delete a dead letter; returns what it was."""

    def drop_it(letters: DeadLetters) -> DeadLetter:
        message = letters.find(letter_id)
        letters.drop(message)
        return dead_letter_answer(message)

    return await _act(request, services, identity, "dead_letter.drop", letter_id, drop_it)


def _position(cursor: str) -> DeadPosition:
    older, is_refused = divmod(number_of(cursor), 2)
    return DeadPosition(is_refused=bool(is_refused), older=older)


async def _act(
    request: Request,
    services: Services,
    identity: IdentityDep,
    action: str,
    letter_id: str,
    work: Callable[[DeadLetters], DeadLetter],
) -> DeadLetter:
    identity.require_all(Scope.ADMIN)
    await _with_letters(services, lambda letters: letters.find(letter_id))
    async with services.database.begin() as transaction:
        await record_act(transaction.audit, request, identity, action, letter_id)
    return await _with_letters(services, work)


async def _with_letters(services: Services, work: Callable[[DeadLetters], T]) -> T:
    """Run ``work``, which blocks, on a thread."""

    def run() -> T:
        with closing(DeadLetters(services.app, signer=services.signer)) as letters:
            return work(letters)

    return await asyncio.to_thread(run)


def _read_broker(services: Services) -> tuple[list[QueueFigures], int | None]:
    try:
        return read_queues(services.app), read_dead(services.app)
    except NekroError:
        raise
    except (RedisError, OSError, *services.app.connection().connection_errors) as exc:
        raise BrokerUnavailableError(f"the broker does not answer: {exc}") from exc


def _work(open_work: OpenWork) -> Work:
    fields: dict[str, Any] = {name: getattr(open_work, name) for name in Work.model_fields}
    return Work(**fields)
