"""The message that ``on_user_message`` hooks receive, and the segments of its content."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum
from pathlib import Path, PurePosixPath
from typing import Any, Final, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator

from nekro_agent import runtime
from nekro_agent.errors import InvalidValueError
from nekro_agent.layout import channel_of
from nekro_agent.shared_clock import shared_now
from nekro_agent.tools.common_util import (
    copy_to_upload_dir,
    download_file,
    download_file_from_base64,
    download_file_from_bytes,
)

__all__ = [
    "ChatMessage",
    "ChatMessageSegment",
    "ChatMessageSegmentAt",
    "ChatMessageSegmentFile",
    "ChatMessageSegmentForward",
    "ChatMessageSegmentImage",
    "ChatMessageSegmentJsonCard",
    "ChatMessageSegmentPoke",
    "ChatMessageSegmentType",
    "ChatType",
    "bring_files",
    "locate_files",
    "segment_from_dict",
    "segments_from_list",
]


#: What ``on_user_message`` hooks may change: the message is recorded as they leave it.
_CHANGEABLE: Final = frozenset(
    ("content_text", "sender_name", "sender_nickname", "is_tome", "raw_cq_code", "ext_data")
)


class ChatType(StrEnum):
    """Kind of chat."""

    PRIVATE = "private"
    GROUP = "group"
    UNKNOWN = "unknown"

    @classmethod
    def from_chat_key(cls, chat_key: str) -> ChatType:
        """Derive it from a key such as ``onebot_v11-group_123``."""
        return cls.of(channel_of(chat_key).channel_type)

    @classmethod
    def of(cls, channel_type: str | None) -> ChatType:
        """Return the type of a recorded word; UNKNOWN for None and other words."""
        return cls(channel_type) if channel_type in (cls.GROUP, cls.PRIVATE) else cls.UNKNOWN


class ChatMessageSegmentType(StrEnum):
    """Kind of a segment."""

    TEXT = "text"
    IMAGE = "image"
    VOICE = "voice"
    VIDEO = "video"
    FILE = "file"
    REFERENCE = "reference"
    AT = "at"
    JSON_CARD = "json_card"
    FORWARD = "forward"
    POKE = "poke"


class ChatMessageSegment(BaseModel):
    """One part of a message; this class itself is a text."""

    model_config = ConfigDict(extra="allow", use_enum_values=True)

    type: ChatMessageSegmentType
    text: str = ""


class ChatMessageSegmentAt(ChatMessageSegment):
    """A mention of a person."""

    target_platform_userid: str = ""
    target_nickname: str = ""


class ChatMessageSegmentFile(ChatMessageSegment):
    """A file; ``local_path`` is its path on this host, None where it is not known."""

    file_name: str
    local_path: str | None = None
    remote_url: str | None = None

    @classmethod
    def get_segment_type(cls) -> ChatMessageSegmentType:
        """Return the kind of a segment that the functions below create."""
        return ChatMessageSegmentType.FILE

    @classmethod
    async def create_from_url(
        cls, url: str, from_chat_key: str, file_name: str = "", use_suffix: str = ""
    ) -> Self:
        """Download a URL into a chat's uploads and return its segment; also for a ``data:`` URL.

        Args:
            file_name: name in the uploads; "" makes one of a digest and ``use_suffix``.

        Raises:
            InvalidValueError: the ``data:`` URL is not valid.
            DownloadError: the URL could not be fetched.
            UploadQuotaError: the chat's uploads have no space for it.
        """
        if url.startswith("data:"):
            return await cls.create_from_base64(url, from_chat_key, file_name, use_suffix)
        stored = await download_file(url, None, file_name, use_suffix, from_chat_key=from_chat_key)
        return cls._stored(stored, remote_url=url)

    @classmethod
    async def create_from_bytes(
        cls, _bytes: bytes, from_chat_key: str, file_name: str = "", use_suffix: str = ""
    ) -> Self:
        """Store bytes in a chat's uploads and return their segment; see :meth:`create_from_url`."""
        return cls._stored(await download_file_from_bytes(_bytes, None, file_name, use_suffix, from_chat_key))

    @classmethod
    async def create_from_base64(
        cls, base64_str: str, from_chat_key: str, file_name: str = "", use_suffix: str = ""
    ) -> Self:
        """Store what base64 text or a ``data:`` URL encodes; see :meth:`create_from_url`."""
        return cls._stored(
            await download_file_from_base64(base64_str, None, file_name, use_suffix, from_chat_key)
        )

    @classmethod
    async def create_from_local_path(
        cls, local_path: str | Path, from_chat_key: str, file_name: str = "", use_suffix: str = ""
    ) -> Self:
        """Copy a host file into a chat's uploads; see :meth:`create_from_url` and ``copy_to_upload_dir``."""
        return cls._stored(await copy_to_upload_dir(local_path, file_name, use_suffix, from_chat_key))

    @classmethod
    async def create_form_local_path(
        cls, local_path: str | Path, from_chat_key: str, file_name: str = "", use_suffix: str = ""
    ) -> Self:
        """Like :meth:`create_from_local_path`, under the name that the reference has."""
        return await cls.create_from_local_path(local_path, from_chat_key, file_name, use_suffix)

    @classmethod
    def _stored(cls, stored: tuple[str, str], *, remote_url: str | None = None) -> Self:
        local_path, name = stored
        kind = cls.get_segment_type()
        text = f"[{kind.value.capitalize()}: {name}]"
        return cls(type=kind, text=text, file_name=name, local_path=local_path, remote_url=remote_url)


class ChatMessageSegmentImage(ChatMessageSegmentFile):
    """An image."""

    @classmethod
    def get_segment_type(cls) -> ChatMessageSegmentType:
        """Return IMAGE."""
        return ChatMessageSegmentType.IMAGE


class ChatMessageSegmentForward(ChatMessageSegment):
    """Forwarded messages."""

    forward_content: list[dict[str, Any]] = Field(default_factory=list)


class ChatMessageSegmentJsonCard(ChatMessageSegment):
    """A card of the platform."""

    json_data: dict[str, Any] = Field(default_factory=dict)
    card_title: str | None = None
    card_desc: str | None = None
    card_icon: str | None = None
    card_preview: str | None = None
    card_url: str | None = None
    share_from_nick: str | None = None


class ChatMessageSegmentPoke(ChatMessageSegment):
    """A person pokes another one."""

    #: Id of the person who is poked.
    target_id: str = ""
    poke_style: str = "戳一戳"
    poke_style_suffix: str = ""
    action_img_url: str = ""


_SEGMENTS: dict[ChatMessageSegmentType, type[ChatMessageSegment]] = {
    ChatMessageSegmentType.AT: ChatMessageSegmentAt,
    ChatMessageSegmentType.FILE: ChatMessageSegmentFile,
    ChatMessageSegmentType.FORWARD: ChatMessageSegmentForward,
    ChatMessageSegmentType.IMAGE: ChatMessageSegmentImage,
    ChatMessageSegmentType.JSON_CARD: ChatMessageSegmentJsonCard,
    ChatMessageSegmentType.POKE: ChatMessageSegmentPoke,
}


def segment_from_dict(data: dict[str, Any]) -> ChatMessageSegment:
    """Return the segment that a dictionary describes.

    Raises:
        InvalidValueError: its ``type`` is missing or unknown, or another value is invalid.
    """
    try:
        kind = ChatMessageSegmentType(data["type"])
        return _SEGMENTS.get(kind, ChatMessageSegment).model_validate(data)
    except (KeyError, TypeError, ValueError) as exc:
        raise InvalidValueError(f"a message segment is invalid: {exc}") from exc


def segments_from_list(data: list[dict[str, Any]]) -> list[ChatMessageSegment]:
    """Return the segments that dictionaries describe.

    Raises:
        InvalidValueError: as for :func:`segment_from_dict`.
    """
    return [segment_from_dict(item) for item in data]


def locate_files(segments: Iterable[object], *, chat_key: str) -> None:
    """Set ``local_path`` of files and images to their path in the chat's uploads on this host.

    A path that another host or a client has stated is replaced. It is None for a file of another address
    that is not in the uploads.
    """
    for segment in segments:
        if isinstance(segment, ChatMessageSegmentFile) and segment.file_name:
            uploads = runtime.current().areas.uploads_dir(chat_key)
            path = uploads / PurePosixPath(segment.file_name).name
            is_here = not segment.remote_url or path.is_file()
            segment.local_path = str(path) if is_here else None


async def bring_files(segments: Iterable[object], *, chat_key: str) -> None:
    """As ``locate_files``; if the files are in a store, they are brought without blocking the event loop."""
    present = list(segments)
    if any(isinstance(segment, ChatMessageSegmentFile) and segment.file_name for segment in present):
        await runtime.current().areas.bring(chat_key=chat_key)
    locate_files(present, chat_key=chat_key)


class ChatMessage(BaseModel):
    """One incoming message."""

    model_config = ConfigDict(extra="allow")

    chat_key: str
    message_id: str = ""
    sender_id: str = ""
    sender_name: str = ""
    sender_nickname: str = ""
    platform_userid: str = ""
    adapter_key: str = ""
    chat_type: ChatType = ChatType.UNKNOWN
    #: 1 if the message is to the agent, 0 if people talk to each other.
    is_tome: int = 0
    is_recalled: bool = False
    content_text: str = ""
    content_data: list[Any] = Field(default_factory=list)
    raw_cq_code: str = ""
    ext_data: dict[str, Any] = Field(default_factory=dict)
    #: Seconds since the epoch.
    send_timestamp: int = 0

    @field_validator("content_data")
    @classmethod
    def _as_segments(cls, value: list[Any]) -> list[Any]:
        """Build segments from their JSON form, which messages have between processes."""
        return [segment_from_dict(item) if isinstance(item, dict) else item for item in value]

    @classmethod
    def create_empty(cls, chat_key: str) -> ChatMessage:
        """Return a message without content."""
        return cls(chat_key=chat_key, send_timestamp=int(shared_now()))

    def is_empty(self) -> bool:
        """Whether it has neither sender nor content."""
        own = (self.message_id, self.sender_id, self.sender_name, self.content_text, self.content_data)
        return not any(own)

    @property
    def is_self(self) -> bool:
        """Whether the agent itself wrote it."""
        return self.sender_id == "-1"

    def changeable(self) -> dict[str, Any]:
        """Return the fields that ``on_user_message`` hooks may change, as JSON values."""
        return self.model_dump(mode="json", include=set(_CHANGEABLE), fallback=str, warnings=False)

    def changes_since(self, before: Mapping[str, Any]) -> dict[str, Any]:
        """Return those of :meth:`changeable` that differ from an earlier result; {} if one is not JSON."""
        try:
            return {name: value for name, value in self.changeable().items() if value != before[name]}
        except ValueError:  # a hook has set a value that JSON cannot represent
            return {}

    def change(self, values: Mapping[str, Any]) -> None:
        """Set fields that a hook has changed in another process."""
        for name in _CHANGEABLE & values.keys():
            setattr(self, name, values[name])
