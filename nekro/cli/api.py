"""The API as commands use it: that of the gateway of ``NEKRO_URL``, else its operations in this process."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

from broker_config.settings import Settings
from nekro.cli.command import Deps, chosen_id
from nekro.cli.gateway_client import gateway_of_up, translated, waiting_client
from nekro_agent.methods import Lane

if TYPE_CHECKING:
    from nekro.app.services import Services
    from nekro.cli.local_api import LocalServices
    from nekro_client import AsyncClient
    from nekro_client.models import Page

__all__ = ["SystemApi", "SystemNeed", "all_of", "find", "is_over_gateway", "open_api", "open_system_api"]


class _Named(Protocol):
    @property
    def id(self) -> str: ...


T = TypeVar("T")
N = TypeVar("N", bound=_Named)

#: Most items of a page.
_PAGE: Final = 200
#: Characters of a whole id.
_ID_CHARS: Final = 32


@dataclass(frozen=True, kw_only=True)
class SystemNeed:
    """The running system that a command needs where no gateway is named (``open_services``)."""

    #: Name of the command, recorded in ``up.json``.
    command: str
    #: Lanes that must have a worker.
    lanes: Sequence[Lane] = ()
    #: Whether it waits for a live worker; otherwise the last published catalogue suffices.
    needs_workers: bool = False
    #: Checks the requirements of workers; called only when workers are started.
    before_start: Callable[[Settings], None] | None = None
    #: Whether `nekro up` is asked, as in ``open_api``, if it has workers of all lanes.
    asks_up: bool = False


@dataclass(frozen=True, kw_only=True)
class SystemApi:
    """The API of a system that runs methods, code and turns."""

    api: AsyncClient
    #: Translates the errors of the API in a block, as ``open_api`` does.
    errors: Callable[[], AbstractContextManager[None]]
    #: Of this process; None over a gateway.
    services: Services | None = None
    #: Whether workers end with this command, which then waits for what it started.
    own: bool = False


def is_over_gateway() -> bool:
    """Whether the command works over the gateway that ``NEKRO_URL`` names."""
    return bool(os.environ.get("NEKRO_URL"))


@asynccontextmanager
async def open_api(
    deps: Deps,
    *,
    system: SystemNeed | None = None,
    services: Callable[[Settings], LocalServices] | None = None,
    here: Mapping[str, Any] = {},
    asks_up: bool = False,
) -> AsyncIterator[AsyncClient]:
    """Open the API.

    Args:
        system: what the command needs besides the gateway's rows; None: services open when they are used.
        services: makes the services of operations in this process, where ``system`` is None.
        here: as for ``open_system_api``.
        asks_up: whether `nekro up` on the data directory is asked, if it serves the API: for commands that
            start slower with the libraries of the database than with the client.

    Raises:
        NekroError: the API refused a request inside the block.
    """
    if system is not None:
        async with open_system_api(deps, system, here=here) as opened:
            yield opened.api
        return
    async with _client(deps, asks_up=asks_up) as api:
        if api is not None:
            yield api
            return
    from nekro.cli.local_api import LocalServices, local_api, refusals

    async with (services or LocalServices)(deps.load_settings()) as own:
        with refusals():
            yield local_api(own, here)


@asynccontextmanager
async def _client(
    deps: Deps, *, asks_up: bool, lanes: Sequence[Lane] = ()
) -> AsyncIterator[AsyncClient | None]:
    """Open the client of the gateway that ``NEKRO_URL`` names, or of `nekro up`; yield None if there is none.

    Args:
        lanes: those that must have a worker of `nekro up`.
    """
    url = None
    if not is_over_gateway():
        url = gateway_of_up(deps.load_settings(), lanes) if asks_up else None
        if url is None:
            yield None
            return
        os.environ["NEKRO_DATA_DIR"] = str(deps.load_settings().data_dir)  # where the client finds its key
    with translated():
        async with waiting_client(url) as client:
            yield client


@asynccontextmanager
async def open_system_api(
    deps: Deps, system: SystemNeed, *, here: Mapping[str, Any] = {}
) -> AsyncIterator[SystemApi]:
    """Open the API of a system, which is started where none runs and no gateway is named.

    Args:
        here: methods of the client that this command has in this process, besides those of
            ``nekro.cli.local_operations``.

    Raises:
        NekroError: the API refused a request inside the block; others as from ``open_services``.
    """
    async with _client(deps, asks_up=system.asks_up, lanes=system.lanes) as api:
        if api is not None:
            yield SystemApi(api=api, errors=translated)
            return
    from nekro.cli.local_api import local_api, refusals
    from nekro.cli.services.system import open_services

    async with open_services(
        deps.load_settings(),
        command=system.command,
        lanes=system.lanes,
        output=deps.output,
        before_start=system.before_start,
        needs_workers=system.needs_workers,
    ) as (opened, services):
        with refusals():
            api = local_api(services, here)
            yield SystemApi(api=api, errors=refusals, services=services, own=opened.own)


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


async def find(page: Callable[..., Awaitable[Page[N]]], beginning: str, *, noun: str, listing: str) -> str:
    """Return the id in a list that is, or begins with, a text, or whose item has it as its number.

    Args:
        page: takes the beginning, a cursor and a limit.
        noun: of what is listed.
        listing: the command that lists it.

    Raises:
        NotFoundError: there is none.
        UsageError: there are several.
    """
    if len(beginning) >= _ID_CHARS:
        return beginning  # a key may have the one but not the list
    found: set[str] = set()
    cursor: str | None = None
    is_open = True
    while is_open and beginning not in found and len(found) < 2:
        answer = await page(beginning=beginning, cursor=cursor, limit=_PAGE)
        for item in answer.items:
            if str(getattr(item, "number", None)) == beginning.removeprefix("#"):
                return item.id
            found.add(item.id)
        cursor = answer.next_cursor
        is_open = cursor is not None
    return chosen_id(found, beginning, noun=noun, listing=listing)
