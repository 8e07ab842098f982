"""A PostgreSQL behind a proxy that can freeze and cut its connections."""

from __future__ import annotations

import asyncio
import contextlib

import psycopg
from stream_server import StreamServer

from broker_config.settings import DatabaseSettings


class CutProxy:
    """A TCP proxy in front of the server's Unix socket that can freeze and cut its connections."""

    def __init__(self, settings: DatabaseSettings) -> None:
        parts = psycopg.conninfo.conninfo_to_dict(str(settings.url))
        self._target = f"{parts['host']}/.s.PGSQL.{parts.get('port', 5432)}"
        self._settings = settings
        self._names = f"{parts['user']}@127.0.0.1", parts["dbname"]
        self.frozen = asyncio.Event()
        #: Whether the server's answers are dropped; it still receives requests.
        self.is_deaf = False
        self._is_away = False
        self.writers: set[asyncio.StreamWriter] = set()
        self._server = StreamServer(self._serve)

    async def start(self) -> DatabaseSettings:
        """Listen; returns settings that lead through the proxy."""
        await self._server.__aenter__()
        user, name = self._names
        url = f"postgresql://{user}:{self._server.port}/{name}?sslmode=disable"
        return self._settings.model_copy(update={"url": url})

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._is_away:
            writer.close()
            return
        try:
            server_reader, server_writer = await asyncio.open_unix_connection(self._target)
        except OSError:  # the server is not running at the moment
            writer.close()
            return
        self.writers |= {writer, server_writer}
        with contextlib.suppress(ConnectionError):
            await asyncio.gather(
                self._pump(reader, server_writer), self._pump(server_reader, writer, is_answer=True)
            )

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_answer: bool = False
    ) -> None:
        try:
            while data := await reader.read(65536):
                if not (self.frozen.is_set() or (is_answer and self.is_deaf)):
                    writer.write(data)
        finally:  # also after a reset, otherwise the server would keep the connection
            writer.close()

    def cut(self) -> None:
        """Close every connection as a restarting server does."""
        for writer in self.writers:
            writer.close()
        self.writers.clear()

    def go_away(self) -> None:
        """Cut every connection and refuse new ones until ``come_back``."""
        self._is_away = True
        self.cut()

    def come_back(self) -> None:
        """Accept connections and forward everything."""
        self._is_away = self.is_deaf = False
        self.frozen.clear()

    async def stop(self) -> None:
        """Stop listening and cut the open connections."""
        await self._server.__aexit__()
        self.cut()
