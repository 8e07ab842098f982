"""Directories of chats, sandboxes and plugins below the data directory.

A path below the data directory is visible inside sandboxes (``/proc/self/mountinfo``), in logs and in
tracebacks, so it must not reveal the platform, the group or the person. The name of an upload directory is
therefore an id that cannot be computed without the fleet's key, and the table ``upload_areas`` maps chats to
ids. ``/app/shared`` needs no table: a container key is a random id, and ``chats`` maps it.

The plugin API requests these paths with synchronous functions, on the thread of an event loop. There a
blocking write could wait for a transaction of the same loop, which cannot proceed meanwhile. Therefore the
id is derived instead of random: every process computes the same id before the row exists, and a write
that would have to wait is left to a later request."""

from __future__ import annotations

import contextlib
import hashlib
import re
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from threading import Lock
from typing import Final

from sqlalchemy import Connection, Engine, Select, select

from broker_config.settings import DatabaseSettings
from nekro_agent import layout
from nekro_agent.errors import InvalidValueError, StorageError, StorageUnavailableError
from nekro_agent.files.private_files import make_directory
from storage.driver.blocking import blocking_engine
from storage.driver.urls import database_url
from storage.sql import insert, now
from storage.tables import UPLOAD_AREAS

__all__ = [
    "DataAreas",
    "UploadAreas",
]


#: How long the write of a new chat's row may wait before it is left to a later request.
_CLAIM_MILLISECONDS: Final = 50
#: Prefix of ids: no encoded key begins with it, so no chat's encoded key equals another chat's directory.
_MARK: Final = "~"


class UploadAreas:
    """Returns the names of the upload directories of all chats; thread-safe."""

    def __init__(self, settings: DatabaseSettings, data_dir: Path, *, key: str) -> None:
        """
        Args:
            key: secret that all processes of the fleet share; ids of new chats depend on it.
        """
        self._settings = settings
        self._data_dir = data_dir
        self._key = hashlib.sha256(key.encode()).digest()
        #: Directory names by encoded chat key; cached without expiry, because a row never changes.
        self._known: dict[str, str] = {}
        self._opened: Engine | None = None
        self._opening = Lock()

    def name(self, chat_key: str) -> str:
        """Return the name of the chat's directory below ``uploads``; the directory may not exist yet.

        Raises:
            InvalidValueError: the chat key is empty or contains a lone surrogate.
            StorageUnavailableError: the database does not answer.
        """
        old = layout.uploads_dir(self._data_dir, chat_key)
        return self._known.get(old.name) or self._look_up(old)

    def dispose(self) -> None:
        """Close the connections; the next request opens new ones."""
        with self._opening:
            if self._opened is not None:
                self._opened.dispose()

    def _look_up(self, old: Path) -> str:
        chat_name = old.name
        with self._engine.connect() as connection:
            name = connection.execute(_query(chat_name)).scalar_one_or_none()
            if name is None:
                # Directories created by versions without this table are named after the chat and keep it.
                proposed = chat_name if old.is_dir() else self._id(chat_name)
                name = self._claim(connection, chat_name, proposed)
                if name is None:
                    return proposed
        self._known[chat_name] = str(name)
        return str(name)

    def _claim(self, connection: Connection, chat_name: str, proposed: str) -> str | None:
        """Insert the row; returns the stored name, or None when the write would have to wait."""
        statement = insert(connection.dialect.name, UPLOAD_AREAS).values(
            chat_name=chat_name, directory=proposed, created_at=now()
        )
        try:
            if connection.dialect.name == "sqlite":
                connection.exec_driver_sql(f"PRAGMA busy_timeout = {_CLAIM_MILLISECONDS}")
            else:
                connection.exec_driver_sql(f"SET LOCAL lock_timeout = '{_CLAIM_MILLISECONDS}ms'")
            connection.execute(statement.on_conflict_do_nothing())
            connection.commit()
        except StorageUnavailableError:
            connection.rollback()
            return None
        name: str | None = connection.execute(_query(chat_name)).scalar_one_or_none()
        if name is None:
            raise StorageError(
                f"directory {proposed} of the uploads belongs to another chat than {chat_name}; "
                "rename it and the row in upload_areas"
            )
        return name

    def _id(self, chat_name: str) -> str:
        digest = hashlib.blake2b(chat_name.encode(), key=self._key, person=b"nekro-uploads", digest_size=16)
        return _MARK + digest.hexdigest()

    @property
    def _engine(self) -> Engine:
        # Created lazily: a process that requests no path opens no connection.
        with self._opening:  # two threads would open one each, and one would never be closed
            if self._opened is None:
                url = database_url(self._settings, self._data_dir)
                self._opened = blocking_engine(url, self._settings, pooled=True)
            return self._opened


def _query(chat_name: str) -> Select[str]:
    return select(UPLOAD_AREAS.c.directory).where(UPLOAD_AREAS.c.chat_name == chat_name)


#: Matches the keys of `ChatRepository.ensure` and `layout.default_container_key`, and similar plain names.
_CONTAINER_KEY: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.%~-]{0,255}")


class DataAreas:
    """Implements ``nekro_agent.ports.FileAreas``; every directory exists when it is returned."""

    is_synced: Final = False

    def __init__(self, data_dir: Path, *, uploads: UploadAreas | None = None) -> None:
        """
        Args:
            uploads: maps chats to their upload directories; None (without a database) names the
                directories after the encoded chat key.
        """
        self._root = data_dir.absolute()
        self._uploads = uploads

    def uploads_dir(self, chat_key: str) -> Path:
        """Return the directory that is mounted read-only as ``/app/uploads`` in the chat's sandboxes."""
        return _made(self.uploads_path(chat_key), passable=True)

    def uploads_path(self, chat_key: str) -> Path:
        """The same; the directory may not exist yet."""
        directory = layout.uploads_dir(self._root, chat_key)
        if self._uploads is not None:
            directory = directory.with_name(self._uploads.name(chat_key))
        return directory

    def shared_dir(self, container_key: str) -> Path:
        """Return the directory that is mounted as ``/app/shared`` in the sandbox.

        Raises:
            InvalidValueError: the key is not a plain name. Only the host creates container keys, so
                any other key is a mistake or an attack.
        """
        return _made(self.shared_path(container_key), passable=True)

    def shared_path(self, container_key: str) -> Path:
        """The same; the directory may not exist yet.

        Raises:
            InvalidValueError: as ``shared_dir``.
        """
        if not _CONTAINER_KEY.fullmatch(container_key):
            raise InvalidValueError(
                f"container key {container_key[:80]!r} is not a name of up to 256 letters, digits "
                "and the characters _ . % ~ -, beginning with a letter or digit"
            )
        return layout.shared_dir(self._root, container_key)

    def plugin_dir(self, plugin_key: str) -> Path:
        """Return the plugin's own directory."""
        return _made(layout.plugin_dir(self._root, plugin_key))

    def configs_dir(self) -> Path:
        """Return the directory of the configurations of all plugins."""
        return _made(layout.configs_dir(self._root))

    def scope(
        self,
        label: str,
        *,
        chat_key: str | None = None,
        container_key: str | None = None,
        plugin_key: str | None = None,
    ) -> AbstractAsyncContextManager[None]:
        """As ``nekro.app.areas.synced.SyncedAreas.scope``: all hosts see these directories at any time."""
        return contextlib.nullcontext()

    @property
    def on_host(self) -> DataAreas:
        """As ``SyncedAreas.on_host``."""
        return self

    def for_run(
        self, chat_key: str, container_key: str, *, fence: int | None
    ) -> AbstractAsyncContextManager[None]:
        """As ``SyncedAreas.for_run``."""
        return contextlib.nullcontext()

    def prefetch(self, chat_key: str, container_key: str) -> None:
        """As ``SyncedAreas.prefetch``."""

    async def bring(self, *, chat_key: str | None = None, container_key: str | None = None) -> None:
        """Do nothing: the directories are here."""

    async def commit(self) -> None:
        """Do nothing: all hosts see a change at once."""

    def follow_configs(self) -> None:
        """Do nothing: configurations are read where they are written."""


def _made(directory: Path, *, passable: bool = False) -> Path:
    try:
        return make_directory(directory, passable=passable)
    except OSError as exc:
        raise StorageError(f"cannot create {directory}: {exc.strerror}; check NEKRO_DATA_DIR") from exc
