"""The requests of chats and of their files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from nekro_client.models import (
    ChatBody,
    ChatPlugin,
    ChatPluginBody,
    ChatPluginState,
    ChatSummary,
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
    Summary,
    TurnState,
    TurnSummary,
)
from nekro_client.operations import Operation, Upload, operation, segment
from nekro_client.requests import request, whole_list

__all__ = ["ChatRequests", "FileRequests", "file_part", "message_body"]


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

    @whole_list
    def summaries(self) -> Operation[Page[Summary]]:
        """Return the kept summaries of older messages, the newest first."""
        return operation("GET", f"/chats/{segment(self.key)}/summaries", Page[Summary])

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

    @whole_list
    def plugins(self) -> Operation[Page[ChatPlugin]]:
        """Return the plugins that may sleep, as they are in the next turn."""
        return operation("GET", f"/chats/{segment(self.key)}/plugins", Page[ChatPlugin])

    @request
    def set_plugin(
        self, plugin_key: str, *, is_awake: bool, turns: int | None = None
    ) -> Operation[ChatPluginState]:
        """Wake a plugin from the next turn on, or let it sleep.

        Args:
            turns: for how many turns it is woken; None: without a limit.
        """
        path = f"/chats/{segment(self.key)}/plugins/{segment(plugin_key)}"
        body = ChatPluginBody(is_awake=is_awake, turns=turns)
        return operation("PUT", path, ChatPluginState, body=body)

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


class FileRequests:
    """The requests of both kinds of files."""

    _chat_key: str

    @whole_list
    def list(self) -> Operation[Page[FileInfo]]:
        """Return the files of the chat."""
        return operation("GET", f"/chats/{segment(self._chat_key)}/files", Page[FileInfo])

    @request
    def find(self, path: str) -> Operation[FileInfo]:
        """Return the file of a path as sandboxed code may write it, such as ``chart.png``."""
        kind = f"/chats/{segment(self._chat_key)}/file-info"
        return operation("GET", kind, FileInfo, params={"path": path})

    @request
    def upload(
        self,
        source: Path | str | bytes,
        *,
        name: str | None = None,
        media_type: str | None = None,
        path: str | None = None,
        replace: bool = False,
    ) -> Operation[FileInfo]:
        """Store a file in the chat's uploads; a path is sent in pieces.

        Args:
            source: path of this host, or the content itself, which needs a name.
            media_type: None guesses it from the name.
            path: where to store it instead, as sandboxed code writes it; one that ends in ``/`` is a
                directory. It replaces a file of its name. This needs a key with the scope ``admin``.
            replace: whether a file of its name is replaced, if the key has the scope ``admin``.

        Raises:
            OSError: the file cannot be read.
            ConflictError: another file has the name.
        """
        params = {"path": path, "replace": "true" if replace else None}
        return self._put(Upload.of(source, name=name, media_type=media_type), params)

    @request
    def delete(self, file_id: str) -> Operation[None]:
        """Remove a file; messages keep its name."""
        return operation("DELETE", self._path(file_id), None)

    def _put(self, upload: Upload, params: Mapping[str, str | None] | None = None) -> Operation[FileInfo]:
        return operation("PUT", self._path(upload.name), FileInfo, upload=upload, params=params)

    def _path(self, name: str) -> str:
        return f"/chats/{segment(self._chat_key)}/files/{segment(name)}"


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
