"""File names that a ``Content-Disposition`` header states, in downloads and in multipart forms.

Source: RFC 6266 and RFC 8187 (``filename*``), RFC 2231 (continuations), RFC 2047 (encoded words, which some
servers use although it is not permitted), RFC 7578 (forms).
"""

from __future__ import annotations

import re
import urllib.parse
from email.errors import HeaderParseError
from email.header import decode_header, make_header
from typing import Final

from nekro_agent.errors import InvalidValueError
from nekro_agent.files.area_access import safe_basename

__all__ = ["plain_name", "stated_name"]

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
