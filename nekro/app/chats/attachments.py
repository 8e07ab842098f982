"""Files of messages: as rows keep them, as plugins' hooks see them, and as a prompt names them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Final

from nekro_agent import layout
from nekro_agent.files.media_types import IMAGE_TYPES, media_type_of
from nekro_agent.schemas.chat_message import ChatMessageSegmentType

__all__ = ["Attachment", "attachments_of", "segments_of_message"]

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
    #: Last change of the content, in nanoseconds since the epoch, by which a replaced file is recognised;
    #: None if it is not known.
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
