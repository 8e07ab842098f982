"""The bodies of the SSE adapter protocol, as published clients write them; unknown fields are ignored."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, Field, TypeAdapter

__all__ = [
    "AtSegment",
    "Command",
    "MediaSegment",
    "MessageCommand",
    "ReceivedMessage",
    "RegisterCommand",
    "ResponseCommand",
    "SubscribeCommand",
    "TextSegment",
    "command_of",
]

_Id = Annotated[str, Field(min_length=1, max_length=200)]
_Name = Annotated[str, Field(max_length=500)]
_MOST_CHANNELS: Final = 10_000
_MOST_SEGMENTS: Final = 1_000


class TextSegment(BaseModel):
    """A text."""

    type: Literal["text"]
    content: str


class AtSegment(BaseModel):
    """A mention of a person."""

    type: Literal["at"]
    user_id: _Id
    nickname: _Name | None = None


class MediaSegment(BaseModel):
    """A picture or a file: its content, or where it is."""

    type: Literal["image", "file"]
    #: An HTTP address.
    url: str | None = None
    #: ``data:<type>;base64,<content>``, or the Base64 text alone.
    base64_url: str | None = None
    name: _Name | None = None
    mime_type: _Name | None = None
    suffix: _Name | None = None


Segment = Annotated[TextSegment | AtSegment | MediaSegment, Field(discriminator="type")]


class ReceivedMessage(BaseModel):
    """A person's message."""

    segments: Annotated[list[Segment], Field(max_length=_MOST_SEGMENTS)] = []
    msg_id: _Name = ""
    from_id: _Id
    from_name: _Name
    from_nickname: _Name | None = None
    is_to_me: bool = False
    is_self: bool = False
    channel_id: _Id
    channel_name: _Name = ""
    platform_name: _Name = ""


class RegisterCommand(BaseModel):
    """Introduces a client."""

    cmd: Literal["register"]
    platform: _Name = "unknown"
    client_name: _Name = ""
    client_version: _Name = ""


class SubscribeCommand(BaseModel):
    """Begins or ends the delivery of channels."""

    cmd: Literal["subscribe", "unsubscribe"]
    channel_ids: Annotated[list[_Id], Field(max_length=_MOST_CHANNELS)] = []


class MessageCommand(BaseModel):
    """Passes on a person's message."""

    cmd: Literal["message"]
    channel_id: _Id
    message: ReceivedMessage


class ResponseCommand(BaseModel):
    """Answers a request."""

    cmd: Literal["response"]
    request_id: _Id
    success: bool
    data: dict[str, Any] = {}


Command = Annotated[
    RegisterCommand | SubscribeCommand | MessageCommand | ResponseCommand, Field(discriminator="cmd")
]
_COMMAND: Final[TypeAdapter[Command]] = TypeAdapter(Command)


def command_of(body: bytes) -> Command:
    """Read a command.

    Raises:
        ValidationError: it is no JSON, or none of the commands.
    """
    return _COMMAND.validate_json(body)
