"""Writes requests as events of the SSE adapter protocol."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from nekro_agent.layout import channel_of
from storage.outbound.adapters import MESSAGE_EVENT
from storage.repositories.messages import Message

__all__ = ["SentFile", "message_events", "request_event", "wire_event"]

WireEvent = dict[str, str]

#: Characters of Base64 text in one event; a multiple of 4, so that each part is decodable.
_CHUNK_CHARS: Final = 64 << 10
#: Larger files are sent in parts, because clients limit the length of a line.
_MOST_INLINE_BYTES: Final = 1 << 20


@dataclass(frozen=True, kw_only=True)
class SentFile:
    """A file of a message."""

    name: str
    media_type: str
    content: bytes
    is_image: bool


def wire_event(event: str, data: Mapping[str, Any]) -> WireEvent:
    """Return one Server-Sent Event; its data is one line of JSON, in ASCII.

    A message may contain lone surrogates, which UTF-8 does not have.
    """
    return {"event": event, "data": json.dumps(data, separators=(",", ":"))}


def request_event(event: str, request_id: str, data: Mapping[str, Any]) -> WireEvent:
    """Return a request; the client answers it with the command ``response``."""
    return wire_event(event, {"request_id": request_id, "data": data})


def message_events(
    message: Message, *, channel_name: str | None, file: SentFile | None, lost_file: str | None
) -> Iterator[WireEvent]:
    """Yield the events that send a message; the client confirms the last one that has the request's id.

    Args:
        file: its file; None if it has none.
        lost_file: name of its file if that cannot be sent.
    """
    channel_id = channel_of(message.chat_key).channel_id or message.chat_key
    segments: list[dict[str, Any]] = []
    if message.text:
        segments.append({"type": "text", "content": message.text})
    if lost_file is not None:
        segments.append({"type": "text", "content": f"[the file {lost_file} cannot be sent]"})
    is_large = file is not None and len(file.content) > _MOST_INLINE_BYTES
    if file is not None and not is_large:
        segments.append(_media(file))
    if segments or file is None:
        # A message that is followed by parts of a file is confirmed with the file.
        data = {"channel_id": channel_id, "channel_name": channel_name, "segments": segments}
        yield request_event(MESSAGE_EVENT, "" if is_large else message.id, data)
    if file is not None and is_large:
        yield from _chunks(message.id, channel_id, file)


def _media(file: SentFile) -> dict[str, Any]:
    return {
        "type": "image" if file.is_image else "file",
        "url": None,
        "base64_url": f"data:{file.media_type};base64,{base64.b64encode(file.content).decode()}",
        "name": file.name,
        "size": len(file.content),
        "mime_type": file.media_type,
        "suffix": f".{file.name.rpartition('.')[2]}" if "." in file.name else "",
    }


def _chunks(request_id: str, channel_id: str, file: SentFile) -> Iterator[WireEvent]:
    text = base64.b64encode(file.content).decode()
    count = math.ceil(len(text) / _CHUNK_CHARS)
    for index in range(count):
        part = text[index * _CHUNK_CHARS : (index + 1) * _CHUNK_CHARS]
        data = {
            "chunk_id": request_id,
            "chunk_index": index,
            "total_chunks": count,
            "chunk_data": part,
            "chunk_size": len(part),
            "total_size": len(file.content),
            "mime_type": file.media_type,
            "filename": file.name,
            "file_type": "image" if file.is_image else "file",
            "channel_id": channel_id,
        }
        # Clients confirm every part that has an id; the file is complete with the last one.
        yield request_event("file_chunk", request_id if index == count - 1 else "", data)
    done = {"chunk_id": request_id, "success": True, "message": f"{file.name} is complete"}
    yield request_event("file_chunk_complete", "", done)
