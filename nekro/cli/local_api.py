"""The API without a gateway: operations that run in the process of the command."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Self, cast

from broker_config.settings import Settings
from nekro.base.shared_property import shared_property
from nekro.cli.command import operator
from nekro.cli.gateway_client import error_of
from nekro.cli.local_events import chat_events
from nekro.cli.local_operations import CHAT, OPERATIONS, Operation
from nekro_agent.errors import StorageError
from storage.caller_reads import find_chat

if TYPE_CHECKING:
    from broker_config.app import NekroApp
    from nekro.app.chats.attachments import FileIds
    from nekro.app.chats.files import ChatFiles
    from nekro.app.services import Services
    from nekro.operations.actor import Actor
    from nekro.wire.invocation import Signer
    from nekro_agent.ports import ChatInfo
    from nekro_client import AsyncClient
    from nekro_client.models import Event
    from storage.engine import Database
    from storage.files.areas import DataAreas, UploadAreas

__all__ = ["LocalServices", "follow_shared_time", "local_api", "open_database", "refusals"]


class LocalServices:
    """The services of a command that starts nothing; each is built when an operation first uses it.

    Most operations use settings and database only. Building the others imports the libraries of the broker.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._is_checked = False

    @shared_property
    def database(self) -> Database:
        """The database."""
        from storage.engine import Database

        return Database(self.settings.database, self.settings.data_dir)

    async def check_database(self) -> None:
        """Return if operations can use the database; this process follows its clock from then on.

        Raises:
            StorageUnavailableError: it does not answer, or is not migrated.
        """
        if self._is_checked:
            return
        from storage.migrate import require_schema

        await require_schema(self.database, refuses_pooler=False)
        if not self.database.is_sqlite:  # SQLite uses the clock of this host
            from storage.engine import follow_database_clock

            await follow_database_clock(self.database)
        self._is_checked = True

    @shared_property
    def file_ids(self) -> FileIds:
        """Ids of chats' files."""
        from nekro.app.chats.attachments import FileIds

        return FileIds(self._signing_key)

    def files_of(self, chat: ChatInfo) -> ChatFiles:
        """Return the files of a chat; its methods block."""
        if self.settings.files.in_store:
            return self._services.files_of(chat)
        from nekro.app.chats.live_files import LiveFiles

        return LiveFiles(self.settings, self._areas, chat)

    async def chat(self, chat_key: str) -> ChatInfo:
        """Return a chat's row, created if it is new."""
        async with self.database.read() as transaction:
            known = await find_chat(transaction.connection, chat_key)
        return await self._services.chat(chat_key) if known is None else known

    @shared_property
    def _signing_key(self) -> str:
        from broker_config.embedded import make_data_dir, resolve_signing_key

        make_data_dir(self.settings)
        return resolve_signing_key(self.settings).get_secret_value()

    @shared_property
    def _areas(self) -> DataAreas:
        from storage.files.areas import DataAreas

        return DataAreas(self.settings.data_dir, uploads=self._upload_areas)

    @shared_property
    def _upload_areas(self) -> UploadAreas:
        from storage.files.areas import UploadAreas

        return UploadAreas(self.settings.database, self.settings.data_dir, key=self._signing_key)

    @shared_property
    def app(self) -> NekroApp:
        """The Celery application, for operations that use the broker alone."""
        from broker_config.app import create_app
        from broker_config.embedded import resolve_settings

        return create_app(resolve_settings(self.settings))

    @shared_property
    def signer(self) -> Signer:
        """Signs and verifies invocations."""
        from nekro.wire.invocation import Signer

        return Signer.from_text(self._signing_key)

    @shared_property
    def _services(self) -> Services:
        from broker_config.embedded import make_data_dir, resolve_settings
        from nekro.app.services import CALLER, Services

        settings = resolve_settings(self.settings)
        make_data_dir(settings)
        return Services(settings, role=CALLER, database=self.database)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._services, name)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        if "_services" in vars(self):
            await self._services.close()
        if "app" in vars(self):
            await asyncio.to_thread(self.app.close)
        if "_upload_areas" in vars(self):
            self._upload_areas.dispose()
        if "database" in vars(self):
            await self.database.dispose()


def local_api(services: LocalServices | Services, here: Mapping[str, Any] = {}) -> AsyncClient:
    """Return the API over the services of this process, with the rights of the shell's user.

    Its methods raise as inside ``refusals``.

    Args:
        here: operations of one command, besides those of ``OPERATIONS``.
    """
    from nekro.operations.actor import LOCAL, Actor

    actor = Actor(services=cast("Services", services), identity=replace(LOCAL, stated_name=operator()))
    # Its methods have the names and arguments of the client's.
    return cast("AsyncClient", _LocalApi(actor, {**OPERATIONS, **here}))


@contextmanager
def refusals() -> Iterator[None]:
    """Translate the refusals of operations.

    Raises:
        NekroError: an operation refused a request inside the block.
    """
    from nekro.operations.actor import RefusedError

    try:
        yield
    except RefusedError as exc:
        raise error_of(exc.code, int(exc.status), exc.detail) from exc


class _LocalApi:
    """Operations of an actor under the names of a table."""

    def __init__(self, actor: Actor, table: Mapping[str, Any], *bound: str) -> None:
        """Make them methods; ``bound`` are the first arguments of each.

        A function of an actor that is no ``Operation`` is a method as it is, such as one that opens a stream.
        """
        self._actor, self._table, self._bound = actor, table, bound

    def __getattr__(self, name: str) -> Any:
        if name not in self._table:
            raise AttributeError(f"{name} has no entry in nekro.cli.local_operations")
        found = self._table[name]
        if isinstance(found, Mapping):
            return _LocalApi(self._actor, found, *self._bound)
        if not isinstance(found, Operation):
            return partial(found, self._actor, *self._bound)
        return partial(_run, found, self._actor, *self._bound)

    def chat(self, key: str) -> _LocalChat:
        """Return a chat by its key."""
        return _LocalChat(self._actor, CHAT, key)


class _LocalChat(_LocalApi):
    """Operations of a chat."""

    def events(self, **given: Any) -> aclosing[AsyncGenerator[Event, None]]:
        """Return the events of the chat, which end with the block of the result; see ``chat_events``."""
        return aclosing(chat_events(self._actor, *self._bound, **given))


async def _run(operation: Operation, actor: Actor, *args: Any, **given: Any) -> Any:
    """Run an operation as the client's method of its name would."""
    if operation.needs_database and isinstance(actor.services, LocalServices):
        await actor.services.check_database()
    # As a request does, which has no parameters that are None.
    given = {name: value for name, value in given.items() if value is not None}
    given.pop("idempotency_key", None)
    answer = await operation.call(actor, *args, **given)
    if not operation.is_whole:
        return answer
    items = [*answer.items]
    while answer.next_cursor is not None:
        answer = await operation.call(actor, *args, **given, cursor=answer.next_cursor)
        items += answer.items
    return items


@asynccontextmanager
async def open_database(settings: Settings) -> AsyncIterator[Database]:
    """Open the database; it is closed at the end.

    Raises:
        StorageUnavailableError: it does not answer, or is not migrated.
    """
    from storage.engine import Database
    from storage.migrate import require_schema

    async with Database(settings.database, settings.data_dir) as database:
        await require_schema(database, refuses_pooler=False)
        yield database


def follow_shared_time(settings: Settings) -> None:
    """Make this process use the database's clock; when the database does not answer, the host's is used.

    For commands that write or compare timestamps of the system without opening the services. Blocks.
    """
    from storage.engine import Database, follow_database_clock

    async def follow() -> None:
        async with Database(settings.database, settings.data_dir) as database:
            with contextlib.suppress(StorageError):
                await follow_database_clock(database)

    asyncio.run(follow())
