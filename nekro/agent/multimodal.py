"""Converts content parts that MULTIMODAL_AGENT methods return to parts of a prompt.

A plugin's error must not fail the round that its result triggered: a part that cannot be shown is
replaced with a sentence about what is missing and why.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import unquote_to_bytes

from nekro.agent.model import ImagePart, Part, TextPart
from nekro.agent.text import cut_middle, neutralise
from nekro_agent.errors import ResultError
from nekro_agent.files.names import picture_type
from nekro_agent.methods import segments_of

__all__ = ["image_data", "picture_part", "render_segments"]

_DETAILS: Final = frozenset({"auto", "low", "high"})
#: Most parts of one result; more indicate a faulty plugin.
MAX_PARTS: Final = 64
_DATA_URL: Final = re.compile(r"data:(?P<type>[\w.+-]+/[\w.+-]+)?(?P<options>(?:;[\w.+=-]+)*),", re.ASCII)


def render_segments(value: object, *, image_bytes: int) -> list[Part]:
    """Convert a MULTIMODAL_AGENT result, in any form that ``segments_of`` accepts, to parts of a message.

    Args:
        image_bytes: size limit of a decoded image; a larger one is replaced with a sentence.
    """
    try:
        segments = segments_of(value, name="the method")
    except ResultError as exc:
        return [_missing(f"its result, because {exc}")]
    parts = [_render(segment, image_bytes) for segment in segments[:MAX_PARTS]]
    if len(segments) > MAX_PARTS:
        parts.append(TextPart(text=f"[{len(segments) - MAX_PARTS} more parts are not shown]"))
    return parts


def picture_part(data: bytes) -> Part:
    """Return the part of a prompt that shows a picture, or the sentence that replaces other content."""
    media_type = picture_type(data)
    if media_type is None:
        return _missing(f"{len(data)} bytes, which are not a PNG, JPEG, GIF or WebP image")
    return ImagePart(url=_data_url(media_type, data))


def image_data(url: str) -> tuple[str, bytes] | None:
    """Return (media type, bytes) of a data URL, or None if ``url`` is not a valid one."""
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


def _render(segment: Mapping[str, Any], image_bytes: int) -> Part:
    kind = segment["type"]
    if kind == "text" and isinstance(segment.get("text"), str):
        return TextPart(text=neutralise(segment["text"]))
    if kind == "image_url":
        return _render_image(segment, image_bytes)
    return _missing(f"a part of type {kind!r}, which this system cannot show")


def _render_image(segment: Mapping[str, Any], image_bytes: int) -> Part:
    image = segment.get("image_url")
    url = image.get("url") if isinstance(image, Mapping) else image
    detail = image.get("detail") if isinstance(image, Mapping) else None
    if not isinstance(url, str):
        return _missing("an image without a URL")
    known_detail = detail if isinstance(detail, str) and detail in _DETAILS else None
    if url.startswith(("http://", "https://")):
        return ImagePart(url=url, detail=known_detail)
    try:
        return ImagePart(url=_checked(url, image_bytes), detail=known_detail)
    except ValueError as exc:
        return _missing(str(exc))


def _checked(url: str, image_bytes: int) -> str:
    """Return a data URL that endpoints accept, with the media type of its actual bytes.

    An endpoint refuses the whole request for one invalid image, so only checked images are passed on.

    Raises:
        ValueError: the image is not acceptable; the message gives the reason.
    """
    if not url.startswith("data:"):
        raise ValueError(
            f"an image at {cut_middle(url, 80)!r}, which is neither a data URL nor an http(s) URL"
        )
    # Check the length first, so that a huge image is not decoded.
    if len(url) > image_bytes * 4 // 3 + 200 and ";base64," in url[:200]:
        raise ValueError(f"an image of about {len(url) * 3 // 4} bytes; the limit is {image_bytes}")
    decoded = image_data(url)
    if decoded is None:
        raise ValueError("an image whose data URL cannot be read")
    declared, data = decoded
    if len(data) > image_bytes:
        raise ValueError(f"an image of {len(data)} bytes; the limit is {image_bytes}")
    media_type = picture_type(data)
    if media_type is not None:
        return url if media_type == declared else _data_url(media_type, data)
    raise ValueError(f"{len(data)} bytes of type {declared}, which are not a PNG, JPEG, GIF or WebP image")


def _data_url(media_type: str, data: bytes) -> str:
    return f"data:{media_type};base64,{base64.b64encode(data).decode('ascii')}"


def _missing(what: str) -> TextPart:
    return TextPart(text=neutralise(f"[left out: {what}]"))
