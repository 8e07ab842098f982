"""Names that a ``Content-Disposition`` header states for files, and media types of files.

A media type follows from a file's first bytes where they tell it, else from its name. Names and declared
types are often wrong: a chart without a suffix, a PNG named ``.jpg``, ``application/octet-stream`` for
everything.

Source: RFC 6266 and RFC 8187 (``filename*``), RFC 2231 (continuations), RFC 2047 (encoded words, which some
servers use although it is not permitted), RFC 7578 (forms).
"""

from __future__ import annotations

import mimetypes
import re
import urllib.parse
from email.errors import HeaderParseError
from email.header import decode_header, make_header
from typing import Final

from nekro_agent.errors import InvalidValueError
from nekro_agent.files.areas import safe_basename

__all__ = [
    "HEAD_BYTES",
    "IMAGE_TYPES",
    "chosen_type",
    "content_type",
    "media_type_of",
    "picture_type",
    "plain_name",
    "stated_name",
    "suffix_of",
    "told_type",
]

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


def told_type(head: bytes) -> str | None:
    """Return the media type that a file's first ``HEAD_BYTES`` bytes tell; None if they tell none."""
    return next((media_type for media_type, _, begins in _BEGINNINGS if begins.match(head)), None)


def picture_type(head: bytes) -> str | None:
    """Return the media type of a picture that endpoints accept, by its first 16 bytes; None for others."""
    media_type = told_type(head)
    return media_type if media_type in IMAGE_TYPES else None


def media_type_of(name: str) -> str:
    """Return the media type that a file's name suggests."""
    return mimetypes.guess_type(name)[0] or _UNKNOWN


def content_type(name: str, head: bytes) -> str:
    """Return the media type of a file.

    Args:
        head: its first ``HEAD_BYTES`` bytes.
    """
    return chosen_type(name, told_type(head))


def chosen_type(name: str, found: str | None) -> str:
    """Return the media type of a file.

    Args:
        found: what ``told_type`` returns for it.
    """
    named = media_type_of(name)
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


_MOST_BYTES: Final = 8192

_PARAMETER: Final = re.compile(
    r""";[ \t]*([!#$&+.^_`|~0-9A-Za-z*-]+)[ \t]*=[ \t]*("(?:[^"\\]|\\.)*"|[^;"]*)""", re.DOTALL
)

_EXTENDED: Final = re.compile(r"([A-Za-z0-9_-]+)'[A-Za-z0-9-]*'(.*)", re.DOTALL)

_CONTINUED: Final = re.compile(r"filename\*([0-9]{1,2})(\*?)")
#: Encodings of text; Python's other codecs are none, or costly.
_CHARSETS: Final = frozenset({
    "utf-8", "utf8", "us-ascii", "iso-8859-1", "iso-8859-15", "windows-1250", "windows-1251", "windows-1252",
    "koi8-r", "gbk", "gb2312", "gb18030", "big5", "shift_jis", "euc-jp", "euc-kr",
})  # fmt: skip

_WINDOWS_PATH: Final = re.compile(r"[A-Za-z]:\\|\\\\")
#: Names of devices on Windows, where people save what they get.
_DEVICE: Final = re.compile(r"(con|prn|aux|nul|com[0-9]|lpt[0-9])(\.|$)", re.IGNORECASE)


def stated_name(header: bytes) -> str | None:
    """Return the file name of a header as it is stated, which may be a path; None if it states none.

    ``filename*`` goes before ``filename``, unless its encoding is not known or not followed.
    """
    parameters: dict[str, str] = {}
    kind, _, rest = header[:_MOST_BYTES].decode("latin-1").partition(";")
    for match in _PARAMETER.finditer(f";{kind};{rest}" if "=" in kind else f";{rest}"):
        parameters.setdefault(match[1].lower(), match[2])
    plain = parameters.get("filename")
    for name in (
        _extended(_unquoted(parameters.get("filename*", ""))),
        _continued(parameters),
        None if plain is None else _words(_as_utf8(_unquoted(plain))),
    ):
        if name:
            return name
    return None


def plain_name(name: str | None) -> str | None:
    """Return the last component of a stated name, visible, of at most 255 bytes; None if nothing is left."""
    try:
        base = safe_basename((name or "").rstrip("/\\")).lstrip(". ").rstrip(". ")
        base = safe_basename(f"_{base}" if _DEVICE.match(base) else base)
    except InvalidValueError:
        return None
    return base


def _unquoted(value: str) -> str:
    value = value.strip()
    if not (len(value) >= 2 and value.startswith('"') and value.endswith('"')):
        return value
    inner = value[1:-1]
    if _WINDOWS_PATH.match(inner):  # of a browser that does not quote backslashes
        return inner.replace('\\"', '"')
    return re.sub(r"\\(.)", r"\1", inner, flags=re.DOTALL)


def _extended(value: str) -> str | None:
    match = _EXTENDED.fullmatch(value)
    return None if match is None else _decoded(urllib.parse.unquote_to_bytes(match[2]), match[1])


def _continued(parameters: dict[str, str]) -> str | None:
    """Join ``filename*0``, ``filename*1*`` and so on."""
    pieces: dict[int, tuple[str, bool]] = {}
    for key, value in parameters.items():
        match = _CONTINUED.fullmatch(key)
        if match is not None:
            pieces[int(match[1])] = (_unquoted(value), bool(match[2]))
    charset, content = "utf-8", b""
    for number in range(len(pieces)):
        if number not in pieces:
            return None
        text, is_extended = pieces[number]
        first = _EXTENDED.fullmatch(text) if number == 0 and is_extended else None
        if first is not None:
            charset, text = first[1], first[2]
        content += urllib.parse.unquote_to_bytes(text) if is_extended else text.encode("latin-1")
    return _decoded(content, charset) if content else None


def _decoded(content: bytes, charset: str) -> str | None:
    if charset.lower() not in _CHARSETS:
        return None
    try:
        return content.decode(charset)
    except UnicodeDecodeError:
        return None


def _as_utf8(text: str) -> str:
    """Read Latin-1 text as UTF-8 if it can be."""
    try:
        return text.encode("latin-1").decode()
    except UnicodeError:
        return text


def _words(text: str) -> str:
    """Decode encoded words (``=?UTF-8?B?…?=``)."""
    if "=?" not in text:
        return text
    try:
        words = decode_header(text)
        if any(charset is not None and charset.lower() not in _CHARSETS for _, charset in words):
            return text
        return str(make_header(words))
    except (HeaderParseError, ValueError, LookupError):
        return text
