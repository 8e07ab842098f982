"""Messages, their parts and files."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import Field

from nekro_client.models.base import Answer, Body

__all__ = [
    "FileInfo",
    "FilePart",
    "ImagePart",
    "Message",
    "MessageBody",
    "MessageSnippet",
    "NewFilePart",
    "NewImagePart",
    "NewPart",
    "NewTextPart",
    "Part",
    "TextPart",
]


class TextPart(Answer):
    """Text of a message."""

    type: Literal["text"] = "text"
    text: str


class FileInfo(Answer):
    """A file of a chat."""

    id: str
    name: str
    #: Sandboxed code and plugins read it at this path: ``/app/uploads/…``.
    path: str
    media_type: str
    size_bytes: int
    #: SHA-256 of the content, in hexadecimal; None if it is not known.
    sha256: str | None = None
    created_at: datetime | None = None
    #: Where the API serves its content.
    url: str


class ImagePart(Answer):
    """A picture of a message."""

    type: Literal["image"] = "image"
    file: FileInfo


class FilePart(Answer):
    """A file of a message."""

    type: Literal["file"] = "file"
    file: FileInfo


Part = Annotated[TextPart | ImagePart | FilePart, Field(discriminator="type")]


class NewImagePart(Body):
    """A picture to post: an uploaded file or the content itself."""

    type: Literal["image"] = "image"
    #: Id of an uploaded file of the chat; None if ``data_url`` has the content.
    file_id: str | None = None
    #: ``data:image/png;base64,…``.
    data_url: str | None = None
    name: str | None = None


class NewFilePart(Body):
    """A file to post: an uploaded file or the content itself."""

    type: Literal["file"] = "file"
    #: Id of an uploaded file of the chat; None if ``data_url`` has the content.
    file_id: str | None = None
    data_url: str | None = None
    name: str | None = None


class NewTextPart(Body):
    """Text to post."""

    type: Literal["text"] = "text"
    text: str


NewPart = Annotated[NewTextPart | NewImagePart | NewFilePart, Field(discriminator="type")]


class MessageBody(Body):
    """A person's message: ``text``, or ``parts``."""

    text: str | None = None
    parts: list[NewPart] = Field(default=[], max_length=64)
    #: The person; None means the key's user.
    user_id: str | None = None
    user_name: str | None = None
    #: Whether it is to the agent; a message that is not starts no turn unless a plugin demands it.
    to_agent: bool = True


class Message(Answer):
    """A message of a chat."""

    id: str
    #: Grows within a chat.
    sequence: int
    chat_key: str
    #: ``user``, ``assistant`` or ``system`` (a notice or result for the agent).
    kind: str
    sender_id: str | None = None
    sender_name: str | None = None
    text: str
    parts: list[Part] = []
    turn_id: str | None = None
    call_id: str | None = None
    round_id: str | None = None
    #: The plugin that wrote it; None if none did.
    plugin: str | None = None
    #: As it is recorded: segments, files, what a plugin added.
    data: dict[str, Any] | None = None
    created_at: datetime


class MessageSnippet(Answer):
    """The beginning of a message."""

    id: str
    #: ``user`` or ``assistant``.
    kind: str
    sender_name: str | None = None
    #: At most 200 characters.
    text: str
    created_at: datetime
