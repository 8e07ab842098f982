"""Where redirects of downloads lead, and what goes along: log-ins and cookies, to the same server only."""

from __future__ import annotations

import base64
import re
import urllib.parse
from collections.abc import Iterable, Mapping
from typing import Final

from nekro_agent.errors import DownloadRefusedError

__all__ = ["Cookies", "checked_url", "headers_after", "is_same_server", "login_of", "redirected", "shown_url"]

#: Headers that must not be sent to another server after a redirect.
_PRIVATE_HEADERS: Final = frozenset({"authorization", "cookie", "proxy-authorization"})
_LOGIN: Final = re.compile(r"(?<=//)[^/?#]*@")
_MOST_COOKIES: Final = 50
_MOST_COOKIE_CHARS: Final = 4096
_COOKIE: Final = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+)=([\x21-\x3a\x3c-\x7e]*)", re.ASCII)
_EXPIRED: Final = re.compile(r";\s*max-age\s*=\s*(?:0|-\d+)\s*(?:;|$)", re.ASCII | re.IGNORECASE)


def checked_url(url: str) -> tuple[str, str]:
    """Return an acceptable URL in ASCII, without log-in and fragment, and its host.

    Raises:
        DownloadRefusedError: it is not an http or https URL.
    """
    try:
        parts = urllib.parse.urlsplit(url)
        port = f":{parts.port}" if parts.port else ""
        host = (parts.hostname or "").encode("ascii" if ":" in (parts.hostname or "") else "idna").decode()
    except ValueError as exc:
        raise DownloadRefusedError(f"{shown_url(url)!r} is not a URL: {exc}") from exc
    if parts.scheme not in ("http", "https") or not host:
        raise DownloadRefusedError(f"{shown_url(url)!r} is not an http:// or https:// URL")
    bracketed = f"[{host}]" if ":" in host else host
    path = urllib.parse.quote(parts.path or "/", safe="/%:@!$&'()*+,;=~")
    query = urllib.parse.quote(parts.query, safe="/%:@!$&'()*+,;=~?")
    return urllib.parse.urlunsplit((parts.scheme, bracketed + port, path, query, "")), host


def shown_url(url: str) -> str:
    """Return a URL, or a text that should be one, without its log-in, for errors and logs."""
    return _LOGIN.sub("", url)


def login_of(url: str) -> Mapping[str, str]:
    """Return the header that carries the log-in of a URL; empty if it has none."""
    user_info, separator, _ = urllib.parse.urlsplit(url).netloc.rpartition("@")
    if not separator:
        return {}
    user, _, password = user_info.partition(":")
    plain = b":".join(map(urllib.parse.unquote_to_bytes, (user, password)))
    return {"Authorization": f"Basic {base64.b64encode(plain).decode()}"}


def redirected(url: str, location: bytes) -> tuple[str, Mapping[str, str]]:
    """Return the URL that a ``Location`` header leads to, and the header of a log-in for the same server.

    The header should be ASCII; servers send names in UTF-8, and in other encodings, too.

    Raises:
        DownloadRefusedError: it is no acceptable URL.
    """
    try:
        text = location.decode()
    except UnicodeDecodeError:
        text = "".join(chr(byte) if byte < 0x80 else f"%{byte:02X}" for byte in location)
    try:
        target = urllib.parse.urljoin(url, text.strip())
        checked, login = checked_url(target)[0], login_of(target)
    except ValueError as exc:
        reason = f"{url} redirects to {shown_url(text)[:500]!r}, which is not a URL: {exc}"
        raise DownloadRefusedError(reason) from exc
    return checked, login if is_same_server(url, checked) else {}


def is_same_server(source: str, target: str) -> bool:
    """Whether a redirect leads to the same host and port, or from plain HTTP to HTTPS of the same host."""
    old, new = urllib.parse.urlsplit(source), urllib.parse.urlsplit(target)
    kept = (old.scheme, old.port) == (new.scheme, new.port)
    is_secured = (old.scheme, old.port, new.scheme, new.port) == ("http", None, "https", None)
    return old.hostname == new.hostname and (kept or is_secured)


def headers_after(
    source: str, target: str, headers: Mapping[str, str], login: Mapping[str, str]
) -> dict[str, str]:
    """Return the headers of the request that follows a redirect."""
    if not is_same_server(source, target):
        return {name: value for name, value in headers.items() if name.lower() not in _PRIVATE_HEADERS}
    if login:
        headers = {name: value for name, value in headers.items() if name.lower() != "authorization"}
    return {**headers, **login}


class Cookies:
    """Cookies that servers set in one chain of redirects; each goes back to its own server only."""

    def __init__(self) -> None:
        self._values: dict[tuple[str, str], str] = {}

    def store(self, url: str, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Keep the cookies of an answer; attributes besides ``Max-Age`` do not matter within seconds."""
        server = _server_of(url)
        for name, value in headers:
            text = value.decode("latin-1")
            match = _COOKIE.match(text.lstrip()) if name.lower() == b"set-cookie" else None
            if match is None or len(match[0]) > _MOST_COOKIE_CHARS:
                continue
            self._values.pop((server, match[1]), None)
            if not _EXPIRED.search(text) and len(self._values) < _MOST_COOKIES:
                self._values[server, match[1]] = match[2]

    def added_to(self, headers: Mapping[str, str], url: str) -> dict[str, str]:
        """Return the headers of a request with the cookies of its server, after those of the caller."""
        server = _server_of(url)
        own = [f"{name}={value}" for (owner, name), value in self._values.items() if owner == server]
        if not own:
            return dict(headers)
        given = [value for name, value in headers.items() if name.lower() == "cookie"]
        others = {name: value for name, value in headers.items() if name.lower() != "cookie"}
        return {**others, "Cookie": "; ".join([*given, *own])}


def _server_of(url: str) -> str:
    parts = urllib.parse.urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}"
