# Generated from async_chats.py by scripts/sync_client.py.
"""Chats with their messages, events and files."""

from __future__ import annotations

import time
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import BinaryIO

import httpx

from nekro_client.chat_requests import ChatRequests, FileRequests, file_part, message_body
from nekro_client.connections import Connection, Stream, run_blocking
from nekro_client.errors import ClientError, ConflictError, InvalidAnswerError
from nekro_client.models import Event, FileInfo, NewPart, PostedMessage
from nekro_client.operations import API, Backoff, Upload, connecting, segment
from nekro_client.pieces import FileDownload
from nekro_client.requests import Blocking
from nekro_client.streams import STREAM_TIMEOUT, EventCursor

__all__ = ["Chat", "EventStream", "Files"]


def _create(path: Path) -> BinaryIO:
    return path.open("xb")


class Chat(ChatRequests, Blocking):
    """One chat of a gateway."""

    def __init__(self, connection: Connection, key: str) -> None:
        segment(key)  # refuses what no URL can name
        super().__init__(connection)
        self.key = key
        self.files = Files(connection, key)

    def send(
        self,
        text: str | None = None,
        *,
        parts: Sequence[NewPart] = (),
        files: Sequence[Path | str] = (),
        stored: Sequence[FileInfo] = (),
        wait: float = 0,
        user_id: str | None = None,
        user_name: str | None = None,
        to_agent: bool = True,
        idempotency_key: str | None = None,
    ) -> PostedMessage:
        """Post a person's message.

        Args:
            parts: of the message, after the text.
            files: of this host, uploaded first; pictures are seen by the model.
            stored: files that the chat has already.
            wait: seconds to wait for the end of the turn; the answer then has it as ``turn``.
            user_id: None means the key's user.
            to_agent: False for a message that is not addressed to the agent; it starts a turn only if a
                plugin's hook returns FORCE_TRIGGER.
            idempotency_key: None makes one; a program that may crash in between keeps its own.
        """
        added = [file_part(file) for file in stored]
        added += [file_part(self.files.store(file)) for file in files]
        body = message_body(text, [*parts, *added], user_id, user_name, to_agent)
        return self._post(body, wait=wait, idempotency_key=idempotency_key)

    def events(
        self, *, after: int | None = None, live: bool = True, give_up_seconds: float | None = 300
    ) -> EventStream:
        """Return the events of the chat, without end: first those that are kept, then live ones.

        The stream survives restarts of gateways, proxies and networks: it connects again after the last
        event, so none is missing and none comes twice. ``close`` ends it.

        Args:
            after: number of the last event that was read; 0 for all kept ones; None for those from now on.
            live: whether to yield events that are not kept, which have no number.
            give_up_seconds: how long the gateway may be out of reach; None means for ever.
        """
        cursor = EventCursor(self.key, after=after, live=live, give_up_seconds=give_up_seconds)
        return EventStream(self._connection.http, cursor)

    def last_event_number(self) -> int:
        """Return the number of the chat's newest event, for ``events(after=…)``; 0 if it has none."""
        cursor = EventCursor(self.key, after=None, live=False, give_up_seconds=None)
        backoff = Backoff(self._connection.retry_seconds)
        while True:
            try:
                with connecting(cursor.path):
                    return self._position(cursor)
            except ClientError as error:
                delay = backoff.delay_after(error)
                if delay is None:
                    raise
            time.sleep(delay)

    def _position(self, cursor: EventCursor) -> int:
        params, headers = cursor.connect()
        with self._connection.http.stream(
            "GET", cursor.path, params=params, headers=headers, timeout=STREAM_TIMEOUT
        ) as response:
            if not response.is_success:
                response.read()
            cursor.accept(response)
            for chunk in response.iter_bytes():
                for _ in cursor.take(chunk):
                    pass
                if cursor.last_number is not None:
                    return cursor.last_number
        raise InvalidAnswerError(f"{cursor.path} has no position")


class EventStream(Stream[Event]):
    """Events of a chat; also a context manager."""

    def __init__(self, http: httpx.Client, cursor: EventCursor) -> None:
        """Connect at the first event."""
        super().__init__(http, cursor)
        self._cursor = cursor

    @property
    def last_number(self) -> int | None:
        """Number of the last kept event that came; pass it as ``after`` to go on in another process."""
        return self._cursor.last_number


class Files(FileRequests, Blocking):
    """Files of a chat."""

    def __init__(self, connection: Connection, chat_key: str) -> None:
        super().__init__(connection)
        self._chat_key = chat_key

    def store(self, source: Path | str) -> FileInfo:
        """Store a file as ``upload`` does; if another one has its name, under one with its digest."""
        upload = Upload.of(source, name=None, media_type=None)
        try:
            return self._connection.send(self._put(upload))
        except ConflictError:
            renamed = run_blocking(upload.with_digest)
            return self._connection.send(self._put(renamed))

    def read(self, file_id: str, *, start: int = 0, end: int | None = None) -> bytes:
        """Return the content of a file, or its bytes from ``start`` and before ``end``."""
        buffer = BytesIO()
        self._fetch(
            file_id, FileDownload(buffer, start=start, end=end, retry_seconds=self._connection.retry_seconds)
        )
        return buffer.getvalue()

    def download(self, file_id: str, target: Path | str | BinaryIO) -> int:
        """Write a file to a path or into a stream; returns its size in bytes.

        A cut connection goes on where it ended.

        Raises:
            OSError: the target exists already, or cannot be written.
        """
        if not isinstance(target, (Path, str)):
            return self._fetch(file_id, FileDownload(target, retry_seconds=self._connection.retry_seconds))
        path = Path(target)
        file = run_blocking(_create, path)
        try:
            return self._fetch(file_id, FileDownload(file, retry_seconds=self._connection.retry_seconds))
        except BaseException:
            run_blocking(path.unlink, True)
            raise
        finally:
            run_blocking(file.close)

    def _fetch(self, file_id: str, download: FileDownload) -> int:
        path = API + self._path(file_id)
        while True:
            try:
                with connecting(path):
                    return self._attempt(path, download)
            except ClientError as error:
                delay = download.delay_after(error)
            time.sleep(delay)

    def _attempt(self, path: str, download: FileDownload) -> int:
        with self._connection.http.stream("GET", path, headers=download.headers()) as response:
            if not response.is_success:
                response.read()
            download.begin(response)
            for chunk in response.iter_raw():
                run_blocking(download.write, chunk)
        return download.size_bytes
