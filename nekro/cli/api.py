"""The API as commands use it: that of the gateway of ``NEKRO_URL``, else its operations in this process."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

from broker_config.settings import Settings
from nekro.cli.command import Deps, operator
from nekro.cli.gateway_client import error_of, translated, waiting_client
from nekro.cli.services.database import open_database, open_writers
from nekro_agent.errors import UsageError

if TYPE_CHECKING:
    from nekro.app.services import Services
    from nekro.operations.actor import Actor
    from nekro_client import AsyncClient
    from nekro_client.models import Page
    from storage.engine import Database

__all__ = ["all_of", "open_api"]

T = TypeVar("T")

#: Most items of a page.
_PAGE: Final = 200


@asynccontextmanager
async def open_api(deps: Deps, *, publishes: bool = False) -> AsyncIterator[AsyncClient]:
    """Open the API.

    Args:
        publishes: whether the command asks for what also publishes messages; else a database suffices here.

    Raises:
        NekroError: the API refused a request inside the block.
    """
    if os.environ.get("NEKRO_URL"):
        with translated():
            async with waiting_client() as client:
                yield client
        return
    from nekro.operations.actor import LOCAL, Actor, RefusedError

    settings = deps.load_settings()
    identity = replace(LOCAL, stated_name=operator())
    async with open_writers(settings) if publishes else _open_rows(settings) as services:
        try:
            # Its methods have the names and arguments of the client's.
            yield cast("AsyncClient", _Operations(Actor(services=services, identity=identity), _OPERATIONS))
        except RefusedError as exc:
            raise error_of(exc.code, int(exc.status), exc.detail) from exc


async def all_of(page: Callable[..., Awaitable[Page[T]]], *, limit: int) -> list[T]:
    """Return up to ``limit`` items of the first pages; ``page`` takes a cursor and a limit."""
    items: list[T] = []
    cursor: str | None = None
    while len(items) < limit:
        answer = await page(cursor=cursor, limit=min(limit - len(items), _PAGE))
        items += answer.items
        cursor = answer.next_cursor
        if cursor is None:
            break
    return items


@dataclass(frozen=True, kw_only=True)
class _Rows:
    """The services of operations that read and write rows only."""

    settings: Settings
    database: Database


@asynccontextmanager
async def _open_rows(settings: Settings) -> AsyncIterator[Services]:
    async with open_database(settings) as database:
        if not database.is_sqlite:  # SQLite uses the clock of this host
            from storage.database_clock import follow_database_clock

            await follow_database_clock(database)
        yield cast("Services", _Rows(settings=settings, database=database))


async def _change_timer(actor: Actor, timer_id: str, *, state: Any) -> Any:
    from nekro.operations.work import change_timer
    from nekro_client.models import TimerBody

    return await change_timer(actor, timer_id, TimerBody(state=state))


async def _create_key(actor: Actor, **values: Any) -> Any:
    from nekro.operations.keys import create_key
    from nekro_client.models import KeyBody

    try:
        body = KeyBody(**values)
    except ValueError as exc:
        raise UsageError(str(exc)) from exc
    return await create_key(actor, body)


async def _list_keys(actor: Actor) -> Any:
    from nekro.operations.keys import list_keys

    return (await list_keys(actor)).items


#: By the names of the client's methods: operations as ``module.function``, or functions of an actor.
_OPERATIONS: Final[Mapping[str, Any]] = {
    "jobs": {
        "list": "work.list_jobs",
        "get": "work.get_job",
        "log": "work.get_job_log",
        "cancel": "work.cancel_job",
        "retry": "work.retry_job",
    },
    "timers": {
        "list": "work.list_timers",
        "pause": partial(_change_timer, state="paused"),
        "resume": partial(_change_timer, state="waiting"),
        "delete": "work.delete_timer",
    },
    "keys": {"list": _list_keys, "create": _create_key, "revoke": "keys.revoke_key"},
    "costs": "costs.get_costs",
}


class _Operations:
    """Operations of an actor, by the names of a table; modules are imported at first use."""

    def __init__(self, actor: Actor, table: Mapping[str, Any]) -> None:
        self._actor, self._table = actor, table

    def __getattr__(self, name: str) -> Any:
        found = self._table[name]
        if isinstance(found, Mapping):
            return _Operations(self._actor, found)
        if isinstance(found, str):
            module, _, function = found.partition(".")
            found = getattr(import_module(f"nekro.operations.{module}"), function)
        return partial(found, self._actor)
