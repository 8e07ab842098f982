"""Chats with their messages, events and files."""

from __future__ import annotations

import time
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import BinaryIO

import httpx

from nekro_client.connections import Blocking, Connection, Download, connecting, request, whole_list
from nekro_client.errors import ClientError, ConflictError, InvalidAnswerError
from nekro_client.models import (
    ChatBody,
    ChatSummary,
    Event,
    FileInfo,
    GivenTitle,
    Message,
    MessageBody,
    NewFilePart,
    NewImagePart,
    NewPart,
    NewTextPart,
    Page,
    PostedMessage,
    Reset,
    Round,
    StreamTicket,
    StreamTicketBody,
    TurnState,
    TurnSummary,
)
from nekro_client.operations import API, Backoff, Operation, operation, segment
from nekro_client.streams import STREAM_TIMEOUT, EventCursor, Stream
from nekro_client.uploads import Upload

__all__ = ["Chat", "ChatRequests", "EventStream", "FileRequests", "Files", "file_part", "message_body"]


class ChatRequests:
    """The requests of both kinds of chats."""

    key: str

    @request
    def summary(self) -> Operation[ChatSummary]:
        """Return the chat as lists show it, with its title."""
        return operation("GET", f"/chats/{segment(self.key)}", ChatSummary)

    @request
    def give_title(self, title: str | None) -> Operation[GivenTitle]:
        """Give the chat a title; None takes it away. Returns it as it is stored."""
        return operation("PATCH", f"/chats/{segment(self.key)}", GivenTitle, body=ChatBody(title=title))

    @request
    def messages(
        self, *, cursor: str | None = None, limit: int | None = None, with_past: bool = False
    ) -> Operation[Page[Message]]:
        """Return a page of the history, the newest messages first.

        Args:
            with_past: also messages from before the last reset.
        """
        params = {"cursor": cursor, "limit": limit, "with_past": with_past or None}
        return operation("GET", f"/chats/{segment(self.key)}/messages", Page[Message], params=params)

    @request
    def turns(
        self, *, state: TurnState | None = None, cursor: str | None = None, limit: int | None = None
    ) -> Operation[Page[TurnSummary]]:
        """Return a page of turns, the newest first.

        Args:
            state: only turns in this state; then a page may be short, or empty, and have a next one.
        """
        params = {"state": state, "cursor": cursor, "limit": limit}
        return operation("GET", f"/chats/{segment(self.key)}/turns", Page[TurnSummary], params=params)

    @request
    def rounds(self, *, cursor: str | None = None, limit: int | None = None) -> Operation[Page[Round]]:
        """Return a page of the chat's rounds, the newest first; ``turns.get`` has more of their calls."""
        params = {"cursor": cursor, "limit": limit}
        return operation("GET", f"/chats/{segment(self.key)}/rounds", Page[Round], params=params)

    @request
    def stream_ticket(self) -> Operation[StreamTicket]:
        """Return a path with which a browser's ``EventSource`` reads the events, for some minutes."""
        return operation("POST", "/stream-tickets", StreamTicket, body=StreamTicketBody(chat_key=self.key))

    @request
    def cancel(self, *, wait: float = 0) -> Operation[Reset]:
        """Cancel the chat's waiting rounds and stop its running one; returns the rounds.

        Args:
            wait: seconds to wait until the running round has stopped.
        """
        path = f"/chats/{segment(self.key)}/cancel"
        return operation("POST", path, Reset, params={"wait": wait or None}, wait_seconds=wait)

    @request
    def reset(self) -> Operation[Reset]:
        """Stop the chat's rounds and start a new history; returns the rounds."""
        return operation("POST", f"/chats/{segment(self.key)}/reset", Reset)

    @request
    def _post(
        self, body: MessageBody, *, wait: float, idempotency_key: str | None
    ) -> Operation[PostedMessage]:
        return operation(
            "POST",
            f"/chats/{segment(self.key)}/messages",
            PostedMessage,
            params={"wait": wait or None},
            body=body,
            idempotency_key=idempotency_key,
            wait_seconds=wait,
        )


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


class FileRequests:
    """The requests of both kinds of files."""

    _chat_key: str

    @whole_list
    def list(self) -> Operation[Page[FileInfo]]:
        """Return the files of the chat."""
        return operation("GET", f"/chats/{segment(self._chat_key)}/files", Page[FileInfo])

    @request
    def upload(
        self, source: Path | str | bytes, *, name: str | None = None, media_type: str | None = None
    ) -> Operation[FileInfo]:
        """Store a file in the chat's uploads; a path is sent in pieces.

        Args:
            source: path of this host, or the content itself, which needs a name.
            media_type: None guesses it from the name.

        Raises:
            OSError: the file cannot be read.
            ConflictError: another file has the name.
        """
        return self._put(Upload.of(source, name=name, media_type=media_type))

    @request
    def delete(self, file_id: str) -> Operation[None]:
        """Remove a file; messages keep its name."""
        return operation("DELETE", self._path(file_id), None)

    def _put(self, upload: Upload) -> Operation[FileInfo]:
        return operation("PUT", self._path(upload.name), FileInfo, upload=upload)

    def _path(self, name: str) -> str:
        return f"/chats/{segment(self._chat_key)}/files/{segment(name)}"


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
            renamed = upload.with_digest()
            return self._connection.send(self._put(renamed))

    def read(self, file_id: str, *, start: int = 0, end: int | None = None) -> bytes:
        """Return the content of a file, or its bytes from ``start`` and before ``end``."""
        buffer = BytesIO()
        self._fetch(
            file_id, Download(buffer, start=start, end=end, retry_seconds=self._connection.retry_seconds)
        )
        return buffer.getvalue()

    def download(self, file_id: str, target: Path | str | BinaryIO) -> int:
        """Write a file to a path or into a stream; returns its size in bytes.

        A cut connection goes on where it ended.

        Raises:
            OSError: the target exists already, or cannot be written.
        """
        if not isinstance(target, (Path, str)):
            return self._fetch(file_id, Download(target, retry_seconds=self._connection.retry_seconds))
        path = Path(target)
        with path.open("xb") as file:
            try:
                return self._fetch(file_id, Download(file, retry_seconds=self._connection.retry_seconds))
            except BaseException:
                path.unlink(missing_ok=True)
                raise

    def _fetch(self, file_id: str, download: Download) -> int:
        path = API + self._path(file_id)
        while True:
            try:
                with connecting(path):
                    return self._attempt(path, download)
            except ClientError as error:
                delay = download.delay_after(error)
            time.sleep(delay)

    def _attempt(self, path: str, download: Download) -> int:
        with self._connection.http.stream("GET", path, headers=download.headers()) as response:
            if not response.is_success:
                response.read()
            download.begin(response)
            for chunk in response.iter_raw():
                download.write(chunk)
        return download.size_bytes


def message_body(
    text: str | None,
    parts: Sequence[NewPart],
    user_id: str | None,
    user_name: str | None,
    to_agent: bool,
) -> MessageBody:
    """Return the body of a message; a text before parts becomes the first part."""
    if parts and text is not None:
        parts, text = [NewTextPart(text=text), *parts], None
    return MessageBody(text=text, parts=[*parts], user_id=user_id, user_name=user_name, to_agent=to_agent)


def file_part(file: FileInfo) -> NewPart:
    """Return the part of a message that shows an uploaded file."""
    kind = NewImagePart if file.media_type.startswith("image/") else NewFilePart
    return kind(type=kind.model_fields["type"].default, file_id=file.id)
