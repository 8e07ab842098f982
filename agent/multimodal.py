"""Content parts that MULTIMODAL_AGENT methods return, in every shape that real plugins use.

A plugin's mistake must not kill the round it was meant to wake: whatever cannot be shown
becomes a sentence that tells the model what is missing and why.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final
from urllib.parse import unquote_to_bytes

from agent.model import ImagePart, Part, TextPart
from agent.text import cut_middle, neutralise

__all__ = ["image_data", "normalise_segments", "render_segments"]

#: Image types that OpenAI-compatible endpoints accept.
_IMAGE_TYPES: Final = frozenset({"image/png", "image/jpeg", "image/gif", "image/webp"})
_DETAILS: Final = frozenset({"auto", "low", "high"})
#: Parts of one result; more would be a plugin gone wrong.
MAX_PARTS: Final = 64
_DATA_URL: Final = re.compile(r"data:(?P<type>[\w.+-]+/[\w.+-]+)?(?P<options>(?:;[\w.+=-]+)*),", re.ASCII)


def normalise_segments(value: object) -> list[dict[str, Any]]:
    """Turn a MULTIMODAL_AGENT result into a list of content parts.

    Accepts a list of parts (dicts or texts), one message ``{"role": …, "content": …}``, one
    part with a ``type``, a text, and objects with ``to_dict()`` or ``model_dump()`` in place of
    any of these. The role of a message is dropped: a plugin speaks as itself. Anything else
    becomes a text part that names its type, so nothing here raises.
    """
    return _parts_of(value, depth=0)


def render_segments(value: object, *, image_bytes: int) -> list[Part]:
    """Turn a MULTIMODAL_AGENT result into parts of a prompt message.

    Args:
        image_bytes: largest image, decoded; a larger one is replaced by a sentence saying so.
    """
    segments = normalise_segments(value)
    parts = [_render(segment, image_bytes) for segment in segments[:MAX_PARTS]]
    if len(segments) > MAX_PARTS:
        parts.append(TextPart(text=f"[{len(segments) - MAX_PARTS} more parts are not shown]"))
    return parts or [TextPart(text="[the method returned no content]")]


def image_data(url: str) -> tuple[str, bytes] | None:
    """Return (media type, bytes) of a data URL, or None when ``url`` is not a readable one."""
    match = _DATA_URL.match(url)
    if match is None:
        return None
    media_type = (match["type"] or "text/plain").lower()
    body = url[match.end() :]
    if not match["options"].lower().endswith(";base64"):
        return media_type, unquote_to_bytes(body)
    try:
        return media_type, base64.b64decode("".join(body.split()), validate=True)
    except (binascii.Error, ValueError):
        return None


def _parts_of(value: object, *, depth: int) -> list[dict[str, Any]]:
    value = _plain(value)
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    if isinstance(value, Mapping) and "type" not in value and "content" in value and depth < 3:
        return _parts_of(value["content"], depth=depth + 1)
    if isinstance(value, Mapping) and isinstance(value.get("type"), str):
        return [{str(key): item for key, item in value.items()}]
    if isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray)) and depth < 3:
        return [part for item in value for part in _parts_of(item, depth=depth + 1)]
    if value is None:
        return []
    return [_missing(f"a value of type {type(value).__name__}, which is no content part")]


def _plain(value: object) -> object:
    for name in ("to_dict", "model_dump"):
        convert = getattr(value, name, None)
        if callable(convert) and not isinstance(value, type):
            try:
                return convert()
            except Exception as exc:  # the plugin's own object: its fault is shown, not raised
                return f"[{type(value).__name__}.{name}() failed: {type(exc).__name__}]"
    return value


def _render(segment: Mapping[str, Any], image_bytes: int) -> Part:
    kind = segment["type"]
    if kind == "text" and isinstance(segment.get("text"), str):
        return TextPart(text=neutralise(segment["text"]))
    if kind == "image_url":
        return _render_image(segment, image_bytes)
    return _as_text(_missing(f"a part of type {kind!r}, which this system cannot show"))


def _render_image(segment: Mapping[str, Any], image_bytes: int) -> Part:
    image = segment.get("image_url")
    url = image.get("url") if isinstance(image, Mapping) else image
    detail = image.get("detail") if isinstance(image, Mapping) else None
    if not isinstance(url, str):
        return _as_text(_missing("an image without a URL"))
    fault = _image_fault(url, image_bytes)
    if fault is not None:
        return _as_text(_missing(fault))
    return ImagePart(url=url, detail=detail if isinstance(detail, str) and detail in _DETAILS else None)


def _image_fault(url: str, image_bytes: int) -> str | None:
    if url.startswith(("http://", "https://")):
        return None
    if not url.startswith("data:"):
        return f"an image at {cut_middle(url, 80)!r}, which is neither a data URL nor an http(s) URL"
    # Refuse by length first: base64 of a huge image is not worth decoding.
    if len(url) > image_bytes * 4 // 3 + 200 and ";base64," in url[:200]:
        return f"an image of about {len(url) * 3 // 4} bytes; the limit is {image_bytes}"
    decoded = image_data(url)
    if decoded is None:
        return "an image whose data URL cannot be read"
    media_type, data = decoded
    if media_type not in _IMAGE_TYPES:
        return f"a data URL of type {media_type}, which is no image that can be shown"
    if len(data) > image_bytes:
        return f"an image of {len(data)} bytes; the limit is {image_bytes}"
    return None if data else "an empty image"


def _missing(what: str) -> dict[str, Any]:
    return {"type": "text", "text": f"[left out: {what}]"}


def _as_text(segment: Mapping[str, Any]) -> TextPart:
    return TextPart(text=neutralise(str(segment["text"])))
