"""The media type of a file: by its first bytes where they tell it, else by its name.

Names and declared types are often wrong: a chart without a suffix, a PNG named ``.jpg``,
``application/octet-stream`` for everything.
"""

from __future__ import annotations

import mimetypes
import re
from typing import Final

__all__ = ["HEAD_BYTES", "IMAGE_TYPES", "content_type", "media_type_of", "picture_type", "suffix_of"]

#: Enough of a file to recognise it.
HEAD_BYTES: Final = 64
#: Media types of pictures that language models and browsers show.
IMAGE_TYPES: Final = frozenset({"image/png", "image/jpeg", "image/gif", "image/webp"})
_UNKNOWN: Final = "application/octet-stream"
#: Type, suffix, and how its files begin. Of texts (SVG, HTML, CSV) no beginning is certain.
_BEGINNINGS: Final = tuple(
    (media_type, suffix, re.compile(pattern, re.DOTALL))
    for media_type, suffix, pattern in (
        ("image/png", ".png", rb"\x89PNG"),
        ("image/jpeg", ".jpg", rb"\xff\xd8\xff"),
        ("image/gif", ".gif", rb"GIF8"),
        ("image/webp", ".webp", rb"RIFF....WEBP"),
        ("image/bmp", ".bmp", rb"BM....\x00\x00\x00\x00"),
        ("image/tiff", ".tiff", rb"II\*\x00|MM\x00\*"),
        ("image/avif", ".avif", rb"....ftypavi[fs]"),
        ("image/heic", ".heic", rb"....ftyp(?:hei[cmsx]|hev[cmsx]|mif1|msf1)"),
        ("application/pdf", ".pdf", rb"%PDF-"),
        ("audio/wav", ".wav", rb"RIFF....WAVE"),
        ("audio/mpeg", ".mp3", rb"ID3|\xff[\xf2\xf3\xfa\xfb][\x10-\xef]"),
        ("audio/aac", ".aac", rb"\xff[\xf0\xf1\xf8\xf9]"),
        ("audio/flac", ".flac", rb"fLaC"),
        ("audio/amr", ".amr", rb"#!AMR"),
        ("audio/midi", ".mid", rb"MThd\x00\x00\x00\x06"),
        ("video/ogg", ".ogv", rb"OggS.{24}\x80theora"),
        ("audio/ogg", ".ogg", rb"OggS"),
        ("audio/mp4", ".m4a", rb"....ftypM4[AB] "),
        ("video/quicktime", ".mov", rb"....ftypqt  "),
        ("video/mp4", ".mp4", rb"....ftyp(?:isom|iso\d|mp4\d|avc1|dash|M4V |MSNV|3gp|f4v )"),
        ("video/webm", ".webm", rb"\x1aE\xdf\xa3.{0,40}?webm"),
        ("video/x-matroska", ".mkv", rb"\x1aE\xdf\xa3.{0,40}?matroska"),
        ("video/x-msvideo", ".avi", rb"RIFF....AVI "),
        ("application/zip", ".zip", rb"PK\x03\x04|PK\x05\x06"),
        ("application/gzip", ".gz", rb"\x1f\x8b\x08"),
        ("application/x-7z-compressed", ".7z", rb"7z\xbc\xaf\x27\x1c"),
        ("application/x-bzip2", ".bz2", rb"BZh[1-9]1AY&SY"),
        ("application/x-xz", ".xz", rb"\xfd7zXZ\x00"),
        ("application/vnd.rar", ".rar", rb"Rar!\x1a\x07"),
        ("application/vnd.sqlite3", ".db", rb"SQLite format 3\x00"),
    )
)
#: Containers, whose content a name describes better: documents are ZIP files.
_CONTAINERS: Final = frozenset({"application/zip", "application/gzip", "video/mp4", "video/webm"})
#: Types of a name that such a content contradicts.
_FOREIGN: Final = ("text/", "image/", "application/pdf", "application/json", "application/xml")


def _type_of(head: bytes) -> str | None:
    """Return the media type that a file's first ``HEAD_BYTES`` bytes tell; None if they tell none."""
    return next((media_type for media_type, _, begins in _BEGINNINGS if begins.match(head)), None)


def picture_type(head: bytes) -> str | None:
    """Return the media type of a picture that endpoints accept, by its first 16 bytes; None for others."""
    media_type = _type_of(head)
    return media_type if media_type in IMAGE_TYPES else None


def media_type_of(name: str) -> str:
    """Return the media type that a file's name suggests."""
    return mimetypes.guess_type(name)[0] or _UNKNOWN


def content_type(name: str, head: bytes) -> str:
    """Return the media type of a file.

    Args:
        head: its first ``HEAD_BYTES`` bytes.
    """
    named, found = media_type_of(name), _type_of(head)
    if found is None:
        # A browser shows pictures in place: a file is one only if it begins like one.
        return _UNKNOWN if named in IMAGE_TYPES else named
    if found in _CONTAINERS and named != _UNKNOWN and not named.startswith(_FOREIGN):
        return named
    return found


def suffix_of(head: bytes) -> str | None:
    """Return the suffix of a recognised file's type, with its point; None for others and for containers."""
    known = (one for one in _BEGINNINGS if one[0] not in _CONTAINERS)
    return next((suffix for _, suffix, begins in known if begins.match(head)), None)
