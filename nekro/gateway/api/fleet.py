"""What operators see and do: workers, queues, dead letters; costs and figures over time; probes."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, date, datetime, timedelta
from http import HTTPStatus
from typing import Annotated, Any, Final, TypeVar

from fastapi import APIRouter, Query, Request, Response
from redis.exceptions import RedisError

from nekro.app.budgets import day_of, read_budgets, read_costs
from nekro.app.http_server import METRICS_TYPE
from nekro.app.services import Services
from nekro.base.metrics import start_metrics
from nekro.broker.broker_figures import QueueFigures, read_dead, read_queues
from nekro.broker.dead_letters import DeadLetters, DeadPosition
from nekro.gateway.dependencies import IdentityDep, PathText, ServicesDep, record_act
from nekro.gateway.idempotency import OnceDep
from nekro.gateway.views import budget_answer, cost_answer, dead_letter_answer
from nekro.gateway.web.bodies import KeyedRoute
from nekro.gateway.web.paging import Cursor, Limit
from nekro.operations.actor import Identity, RefusedError, Scope
from nekro.operations.pages import Moment, cursor_of, number_of, text_of
from nekro_agent.errors import BrokerUnavailableError, NekroError
from nekro_agent.shared_clock import shared_time
from nekro_client.models import (
    CostGroup,
    Costs,
    DeadLetter,
    Page,
    Queue,
    Queues,
    RetryBody,
    Series,
    SeriesPoint,
    Work,
    Worker,
)
from storage.listings.series import OpenWork, SeriesRange
from storage.states import BudgetScope

__all__ = [
    "paying_key",
    "probe_router",
    "router",
]


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
        overview = transaction.overview
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
    return await once.respond(
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


@router.get("/costs")
async def get_costs(
    services: ServicesDep,
    identity: IdentityDep,
    by: Annotated[CostGroup, Query(description="what the sums are grouped by")] = "day",
    since: Annotated[date | None, Query(description="first day (UTC)")] = None,
    until: Annotated[date | None, Query(description="last day (UTC)")] = None,
    limit: Limit = 50,
    cursor: Cursor = None,
) -> Costs:
    """Sum up what rounds, runs of code and plugins' requests to models used, ordered by the group.

    The first page also has the budgets of today, those with the least left first. Sums include estimates of
    what is running. A key without the scope `admin` sees what it pays for, and its own budgets.
    """
    own = paying_key(identity)
    after = None if cursor is None else text_of(cursor)
    settings = services.settings.budgets
    async with services.database.read() as transaction:
        page = await read_costs(
            transaction, by, since=since, until=until, after=after, limit=limit, key_id=own
        )
        budgets = []
        if cursor is None:
            budgets = await read_budgets(transaction, settings, day=day_of(shared_time()))
            if own is not None:
                budgets = [one for one in budgets if (one.scope, one.id) == (BudgetScope.KEY, own)]
    return Costs(
        items=[cost_answer(one) for one in page.sums],
        budgets=[budget_answer(one, warn_at=settings.warn_at) for one in budgets],
        next_cursor=None if page.after is None else cursor_of(page.after),
    )


def paying_key(identity: Identity) -> str | None:
    """Return the key whose spending an identity may see; None: all spending."""
    if Scope.ADMIN in identity.scopes:
        identity.require_all(Scope.ADMIN)
        return None
    identity.require(Scope.READ)
    return identity.key_id


_HOUR: Final = timedelta(hours=1)

_DAY: Final = timedelta(days=1)
#: Longest range that is shown per hour, and longest range at all.
_LONGEST_HOURLY: Final = timedelta(days=3)

_LONGEST: Final = timedelta(days=92)
#: A day before it can be written.
_FIRST: Final = datetime(1, 1, 2, tzinfo=UTC)
#: Rounds, and entries of what was spent, that one answer counts; see docs/lab/performance.md.
_MOST_ROWS: Final = 50_000


@router.get("/series")
async def get_series(
    services: ServicesDep,
    identity: IdentityDep,
    since: Annotated[
        Moment | None, Query(description="Default: a day before the end. Begins with its interval.")
    ] = None,
    until: Annotated[Moment | None, Query(description="Default: now.")] = None,
) -> Series:
    """Count what happened per hour, or per day (UTC) in a range of more than 3 and at most 92 days.

    Turns count where they ended, and what was spent where it was asked for, estimates of what is running
    included. A key without the scope `admin` sees what it pays for. The newest 50,000 rounds and entries of
    what was spent are counted; `complete_since` says if there are more.
    """
    own = paying_key(identity)
    span = _range(since, until or shared_time())
    async with services.database.read() as transaction:
        turns = await transaction.series.turns(span, key_id=own)
        spent = await transaction.series.spent(span, key_id=own)
    figures: defaultdict[int, dict[str, Any]] = defaultdict(dict)
    for point in (*turns, *spent):
        figures[point.number] |= {
            name: value for name, value in vars(point).items() if name in SeriesPoint.model_fields
        }
    length = span.interval
    count = -(-(span.until - span.since) // length)  # the last interval may have begun only
    left_out = [one.oldest for one in (*turns[:1], *spent[:1]) if one.rows == span.most_rows]
    return Series(
        interval="hour" if length == _HOUR else "day",
        since=span.since,
        until=span.until,
        complete_since=max(left_out, default=None),
        points=[
            SeriesPoint(begins_at=span.since + number * length, **figures[number]) for number in range(count)
        ],
    )


def _range(since: datetime | None, until: datetime) -> SeriesRange:
    """Return the range, from the begin of the interval in which ``since`` lies."""
    begin = max(until, _FIRST) - _DAY if since is None else since
    if not timedelta() < until - begin <= _LONGEST:
        raise RefusedError(
            HTTPStatus.UNPROCESSABLE_ENTITY,
            "range_invalid",
            "`since` must be before `until`, by at most 92 days",
        )
    length = _HOUR if until - begin <= _LONGEST_HOURLY else _DAY
    start = begin.replace(minute=0, second=0, microsecond=0)
    if length == _DAY:
        start = start.replace(hour=0)
    return SeriesRange(since=start, until=until, interval=length, most_rows=_MOST_ROWS)


probe_router = APIRouter(tags=["probes"])


@probe_router.get("/healthz")
async def get_health() -> dict[str, bool]:
    """Answer while the event loop responds."""
    return {"ok": True}


@probe_router.get("/readyz")
async def get_readiness(request: Request, services: ServicesDep) -> dict[str, bool]:
    """Answer 200 if the database answers and the gateway is not stopping, else 503."""
    if request.app.state.stopping.is_set():
        raise RefusedError(HTTPStatus.SERVICE_UNAVAILABLE, "stopping", "the gateway is stopping")
    await services.read_catalogue()
    return {"ok": True}


@probe_router.get("/metrics", response_class=Response)
async def get_metrics(identity: IdentityDep) -> Response:
    """Metrics of this gateway, for Prometheus; those of the fleet are served by `nekro metrics`."""
    from prometheus_client import generate_latest

    identity.require_all(Scope.ADMIN)
    return Response(generate_latest(start_metrics().registry), media_type=METRICS_TYPE)
