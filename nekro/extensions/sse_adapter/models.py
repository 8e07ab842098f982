"""The bodies of the SSE adapter protocol, as published clients write them; unknown fields are ignored."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BaseModel, Field, TypeAdapter

from nekro.gateway.document.examples import JSON, Examples
from nekro.gateway.web.responses import EVENT_STREAM
from nekro.wire import plain_json

__all__ = [
    "EXAMPLES",
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


def _unicode(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("it is not Unicode") from None
    return text


def _short(text: str) -> str:
    if len(text) > _MOST_NAME_CHARS:
        raise ValueError(f"it has more than {_MOST_NAME_CHARS} characters")
    return text


_MOST_NAME_CHARS: Final = 500
_Unicode = Annotated[str, AfterValidator(_unicode)]
_Id = Annotated[str, Field(min_length=1, max_length=200)]
_FileName = Annotated[str, Field(max_length=_MOST_NAME_CHARS)]
#: People write it, so it may have lone surrogates, which pydantic refuses in a text with ``max_length``.
_Name = Annotated[str, AfterValidator(_short)]
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
    url: _Unicode | None = None
    #: ``data:<type>;base64,<content>``, or the Base64 text alone.
    base64_url: _Unicode | None = None
    name: _FileName | None = None
    mime_type: _FileName | None = None
    suffix: _FileName | None = None


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
    """Read a command, whose texts may contain lone surrogates, which pydantic's parser of JSON refuses.

    Raises:
        ValidationError: it is none of the commands.
        ValueError, RecursionError: it is no JSON.
    """
    return _COMMAND.validate_python(plain_json.load(body))


_CLIENT: Final = "c51ce410c124a10e0db5e4b97fc2af39"
_CONNECTED: Final = f'event: connected\ndata: {{"client_id":"{_CLIENT}","timestamp":1772442900}}\n\n'

EXAMPLES: Final = Examples(
    models={
        "AdapterAnswer": {"data": {"user_id": "42", "user_name": "Ada"}},
        "AdapterRequestBody": {"channel_id": "wx_42", "request": "get_user_info", "data": {"user_id": "42"}},
    },
    operations={
        "connect_adapter": {"answer": {EVENT_STREAM: _CONNECTED}},
        "send_adapter_command": {
            "body": {
                JSON: {"cmd": "register", "platform": "wx", "client_name": "shop", "client_version": "1"}
            },
            "answer": {JSON: {"client_id": _CLIENT, "message": "client shop is registered"}},
        },
    },
)
