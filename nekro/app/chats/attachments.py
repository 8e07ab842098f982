"""Files of messages, as rows, hooks and prompts have them, and ids and links of chats' files for the HTTP
API.

An id names chat, path and version of one file, with a code that only processes of the fleet can compute. The
path that a request leads to is therefore always one that such a process has stated, and an id is valid for
its chat only. Ids need no table: they are computed where a message or a list names a file."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import PurePosixPath
from typing import Any, Final

from nekro_agent import layout
from nekro_agent.errors import NotFoundError
from nekro_agent.files.names import IMAGE_TYPES, media_type_of
from nekro_agent.schemas.chat_message import ChatMessageSegmentType
from nekro_agent.shared_clock import shared_now

__all__ = [
    "Attachment",
    "FileIds",
    "FileRef",
    "Link",
    "attachments_of",
    "segments_of_message",
]


_FILE_SEGMENTS: Final = frozenset(
    kind.value
    for kind in (
        ChatMessageSegmentType.FILE,
        ChatMessageSegmentType.IMAGE,
        ChatMessageSegmentType.VIDEO,
        ChatMessageSegmentType.VOICE,
    )
)


@dataclass(frozen=True, kw_only=True)
class Attachment:
    """A file in the uploads of a chat that belongs to a message."""

    #: ``image`` or ``file``; other kinds of files that an adapter reports are ``file`` too.
    kind: str
    #: Path in the sandbox: ``/app/uploads/…``.
    path: str
    #: Name that people see; the stored name may have a number.
    name: str
    media_type: str
    #: None where a row of an older release does not say.
    size_bytes: int | None = None
    #: SHA-256 of the content in hexadecimal; None if it is not known.
    sha256: str | None = None
    #: Last change of the content, in nanoseconds since the epoch; a replaced file has another one. None if
    #: it is not known.
    modified_ns: int | None = None

    @property
    def segment(self) -> dict[str, Any]:
        """The segment of a message, as the plugin API describes it, with the facts of the file."""
        return {
            "type": self.kind,
            "text": f"[{self.kind.capitalize()}: {self.name}]",
            "file_name": PurePosixPath(self.path).name,
            "name": self.name,
            "media_type": self.media_type,
            "size_bytes": self.size_bytes,
            "sha256": self.sha256,
            "modified_ns": self.modified_ns,
        }


def segments_of_message(text: str, attachments: Sequence[Attachment]) -> list[dict[str, Any]]:
    """Return the segments of a message of text and files; empty if it has no files."""
    if not attachments:
        return []
    texts = [{"type": ChatMessageSegmentType.TEXT.value, "text": text}] if text else []
    return [*texts, *(attachment.segment for attachment in attachments)]


def attachments_of(data: Mapping[str, Any] | None) -> list[Attachment]:
    """Return the files of a message from the data of its row, in order."""
    data = data or {}
    segments = data.get("content_data")
    found = [_of_segment(segment) for segment in segments] if isinstance(segments, list) else []
    if data.get("file_path"):  # a file that the agent sent, and messages of older releases
        found.append(_of_row(data))
    return [attachment for attachment in found if attachment is not None]


def _of_segment(segment: object) -> Attachment | None:
    if not isinstance(segment, Mapping) or segment.get("type") not in _FILE_SEGMENTS:
        return None
    stored = PurePosixPath(str(segment.get("file_name") or "")).name
    if not stored:
        return None
    return Attachment(
        kind="image" if segment["type"] == ChatMessageSegmentType.IMAGE.value else "file",
        path=f"{layout.SANDBOX_UPLOADS}/{stored}",
        name=str(segment.get("name") or stored),
        media_type=str(segment.get("media_type") or media_type_of(stored)),
        size_bytes=_number(segment.get("size_bytes")),
        sha256=segment.get("sha256") or None,
        modified_ns=_number(segment.get("modified_ns")),
    )


def _of_row(data: Mapping[str, Any]) -> Attachment:
    path = str(data["file_path"])
    name = str(data.get("file_name") or PurePosixPath(path).name)
    # Rows of older releases have no type; then the plugin's word counts.
    media_type = str(data.get("media_type") or media_type_of(PurePosixPath(path).name))
    is_image = media_type in IMAGE_TYPES or (data.get("file_kind") == "image" and "media_type" not in data)
    return Attachment(
        kind="image" if is_image else "file",
        path=path,
        name=name,
        media_type=media_type,
        size_bytes=_number(data.get("size_bytes")),
        modified_ns=_number(data.get("modified_ns")),
    )


def _number(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


_MAC_BYTES: Final = 16
#: Longer texts are not ids; paths have at most 4,096 bytes.
_MOST_CHARS: Final = 8192


@dataclass(frozen=True, kw_only=True)
class FileRef:
    """What an id names."""

    path: str
    #: Time of the content's last change, in nanoseconds; None: whatever the path holds.
    modified_ns: int | None


@dataclass(frozen=True, kw_only=True)
class Link:
    """What a link names: a file, readable without a key until a time."""

    chat_key: str
    file_id: str


class FileIds:
    """Makes and reads ids."""

    def __init__(self, key: str) -> None:
        """
        Args:
            key: secret that all processes of the fleet share.
        """
        self._key = hashlib.sha256(b"nekro file ids\0" + key.encode()).digest()

    def make(self, chat_key: str, path: str, *, modified_ns: int | None) -> str:
        """Return the id of a file of a chat; ``modified_ns`` as in ``FileRef``."""
        return self._sealed([path, modified_ns], purpose=f"file\0{chat_key}")

    def read(self, chat_key: str, file_id: str) -> FileRef:
        """Return the file that an id names.

        Raises:
            NotFoundError: it is not an id of a file of the chat.
        """
        found = self._opened(file_id, purpose=f"file\0{chat_key}")
        if found is None:
            raise NotFoundError("the chat has no such file")
        path, modified_ns = found
        return FileRef(path=path, modified_ns=modified_ns)

    def link(self, chat_key: str, file_id: str, *, until: datetime) -> str:
        """Return a token that lets its holder read a file without a key."""
        return self._sealed([chat_key, file_id, int(until.timestamp())], purpose="link")

    def followed(self, token: str) -> Link:
        """Return what a token names.

        Raises:
            NotFoundError: it is not valid, or its time is over.
        """
        found = self._opened(token, purpose="link")
        if found is None or found[2] < shared_now():
            raise NotFoundError("the link is not valid, or its time is over")
        return Link(chat_key=found[0], file_id=found[1])

    def _sealed(self, values: list[Any], *, purpose: str) -> str:
        body = json.dumps(values, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")
        return base64.urlsafe_b64encode(self._mac(purpose, body) + body).rstrip(b"=").decode()

    def _opened(self, text: str, *, purpose: str) -> list[Any] | None:
        if len(text) > _MOST_CHARS or not text.isascii():
            return None
        try:
            raw = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
        except (binascii.Error, ValueError):
            return None
        code, body = raw[:_MAC_BYTES], raw[_MAC_BYTES:]
        if not hmac.compare_digest(code, self._mac(purpose, body)):
            return None
        values: list[Any] = json.loads(body.decode("utf-8", "surrogatepass"))
        return values

    def _mac(self, purpose: str, body: bytes) -> bytes:
        text = purpose.encode("utf-8", "surrogatepass")
        head = len(text).to_bytes(8, "big") + text
        return hmac.new(self._key, head + body, hashlib.sha256).digest()[:_MAC_BYTES]
