"""Sessions of the console: a signed cookie in the place of a key, for a browser.

A cookie is ``nc_<id of the key>_<expiry>_<s|p>_<random>_<signature>``. The signature also covers the Host for
which it was made. Nothing is stored: every gateway checks the signature and looks up the key, which gives the
rights, so a session ends with its key.

A browser adds a cookie by itself, so a cookie alone changes nothing: such a request must come from a page of
the same origin, and repeat a token that only such a page can read.
"""

from __future__ import annotations

import hmac
import re
import secrets
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from http import HTTPStatus
from typing import Final

from fastapi import Request, Response

from broker_config.embedded import resolve_signing_key
from broker_config.settings import Settings
from nekro.operations.actor import RefusedError
from nekro.wire.seals import CONSOLE, CONSOLE_CSRF, Seal
from nekro_agent.shared_clock import shared_time

__all__ = [
    "CSRF_HEADER",
    "SESSION_SECONDS",
    "BrowserSession",
    "begin_session",
    "end_session",
    "require_own_page",
    "require_session_origin",
    "session_of",
    "takes_session",
]

#: How long a browser stays logged in: a working day.
SESSION_SECONDS: Final = 12 * 3600
CSRF_HEADER: Final = "x-nekro-csrf"
_COOKIE: Final = re.compile(
    r"nc_([0-9a-f]{16})_([0-9]{10,12})_([sp])_([A-Za-z0-9-]{22,32})_([0-9a-f]{64})", re.ASCII
)
_HOST: Final = re.compile(r"(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::([0-9]{1,5}))?", re.ASCII)
_SCHEMES: Final = {"s": "https", "p": "http"}
#: What a session may use; pages of plugins and other APIs want a key.
_PATHS: Final = ("/api/v1/", "/console/session")
#: The extension that serves pages of plugins.
_PAGES: Final = "plugin_pages"
_SAFE_METHODS: Final = ("GET", "HEAD")
_OWN_SITES: Final = ("same-origin", "none")


@dataclass(frozen=True, kw_only=True)
class BrowserSession:
    """What a valid cookie states."""

    #: The key that gives the rights; it may be revoked or expired.
    key_id: str
    expires_at: datetime
    #: The only origin whose pages may use the session.
    origin: str
    #: What requests that change something repeat in ``CSRF_HEADER``.
    csrf_token: str


def takes_session(request: Request) -> bool:
    """Whether a request is for something that a session of the console may use."""
    return str(request.scope["path"]).startswith(_PATHS)


def begin_session(settings: Settings, request: Request, response: Response, *, key_id: str) -> BrowserSession:
    """Set the cookie of a new session.

    Raises:
        RefusedError: as ``require_session_origin``.
    """
    origin = require_session_origin(settings, request)
    kind = "s" if origin.startswith("https:") else "p"
    expires_at = (shared_time() + timedelta(seconds=SESSION_SECONDS)).replace(microsecond=0)
    end, mark = str(int(expires_at.timestamp())), secrets.token_hex(16)
    host = origin.partition("://")[2]
    signature = Seal(resolve_signing_key(settings), purpose=CONSOLE).sign([key_id, end, kind, mark, host])
    text = f"nc_{key_id}_{end}_{kind}_{mark}_{signature}"
    response.set_cookie(
        _name(host, kind),
        text,
        max_age=SESSION_SECONDS,
        path="/",
        httponly=True,
        samesite="strict",
        secure=kind == "s",
    )
    return BrowserSession(
        key_id=key_id, expires_at=expires_at, origin=origin, csrf_token=_csrf_token(settings, text)
    )


def end_session(request: Request, response: Response) -> None:
    """Delete the cookies of this host's sessions in the browser."""
    host = _host(request)
    if host is None:
        return
    for kind in _SCHEMES:
        response.delete_cookie(
            _name(host, kind), path="/", httponly=True, samesite="strict", secure=kind == "s"
        )


def session_of(settings: Settings, request: Request) -> BrowserSession | None:
    """Return the session of a request; None if it has no cookie of one.

    Raises:
        RefusedError: 401, the cookie is malformed, forged, expired, doubled or of another host; 403, sessions
            are not accepted here.
    """
    host = _host(request)
    # The cookie of https first: a page of http, or of a neighbouring host, cannot set it.
    for kind in _SCHEMES:
        texts = [] if host is None else _cookies(request, _name(host, kind))
        if not texts:
            continue
        _require_accepted(settings)
        session = _opened(settings, texts[0], host=host or "", kind=kind) if len(texts) == 1 else None
        if session is None:
            raise RefusedError(
                HTTPStatus.UNAUTHORIZED, "session_invalid", "the session has ended; log in again"
            )
        return session
    return None


def require_session_origin(settings: Settings, request: Request) -> str:
    """Return the origin of the page that wants to log in.

    Raises:
        RefusedError: 403, it is not a page of this gateway, or sessions are not accepted here.
    """
    _require_accepted(settings)
    host, origins = _host(request), request.headers.getlist("origin")
    allowed = [] if host is None else [f"{scheme}://{host}" for scheme in _SCHEMES.values()]
    site = request.headers.get("sec-fetch-site", "same-origin")
    if len(origins) != 1 or origins[0] not in allowed or site != "same-origin":
        raise _foreign("the request does not come from a page of this gateway: its Origin is not its Host")
    return origins[0]


def require_own_page(request: Request, session: BrowserSession) -> None:
    """Return if a request with a session comes from a page of the console.

    Raises:
        RefusedError: 403, it comes from another origin, or lacks the session's token.
    """
    if request.headers.get("sec-fetch-site", "none") not in _OWN_SITES:
        raise _foreign("a page of another origin may not use the console's session")
    origins = request.headers.getlist("origin")
    is_safe = request.method in _SAFE_METHODS
    if origins != [session.origin] and not (is_safe and not origins):
        raise _foreign(f"the request does not come from a page of {session.origin}")
    tokens = request.headers.getlist(CSRF_HEADER)
    if is_safe:
        return
    # compare_digest raises for strings that are not ASCII.
    token = tokens[0] if len(tokens) == 1 and tokens[0].isascii() else ""
    if not hmac.compare_digest(token, session.csrf_token):
        raise RefusedError(
            HTTPStatus.FORBIDDEN,
            "csrf_invalid",
            "send the session's csrf_token (GET /console/session) in the header X-Nekro-CSRF",
        )


def _require_accepted(settings: Settings) -> None:
    """Return if sessions are safe here: scripts of plugins' pages could use one of the same origin."""
    if not settings.gateway.console:
        raise RefusedError(HTTPStatus.FORBIDDEN, "console_off", "NEKRO_GATEWAY__CONSOLE is off")
    if settings.gateway.has_active_pages and settings.loads_extension(_PAGES):
        raise RefusedError(
            HTTPStatus.FORBIDDEN,
            "console_shares_origin",
            "this gateway serves pages of plugins whose scripts could use the session"
            " (NEKRO_GATEWAY__PLUGIN_HTTP has `open` or `plugin`); run a second gateway without them for the"
            " console",
        )


def _opened(settings: Settings, text: str, *, host: str, kind: str) -> BrowserSession | None:
    match = _COOKIE.fullmatch(text)
    if match is None or match[3] != kind:
        return None
    seal = Seal(resolve_signing_key(settings), purpose=CONSOLE)
    if not seal.fits([match[1], match[2], match[3], match[4], host], match[5]):
        return None
    expires_at = datetime.fromtimestamp(int(match[2]), UTC)
    if expires_at <= shared_time():
        return None
    return BrowserSession(
        key_id=match[1],
        expires_at=expires_at,
        origin=f"{_SCHEMES[kind]}://{host}",
        csrf_token=_csrf_token(settings, text),
    )


def _csrf_token(settings: Settings, cookie: str) -> str:
    return Seal(resolve_signing_key(settings), purpose=CONSOLE_CSRF).sign([cookie])


def _host(request: Request) -> str | None:
    """Return the Host of a request; None if it has none, several or an invalid one."""
    hosts = request.headers.getlist("host")
    is_valid = len(hosts) == 1 and _HOST.fullmatch(hosts[0]) is not None
    return hosts[0].lower() if is_valid else None


def _name(host: str, kind: str) -> str:
    """Return a cookie's name. Cookies do not distinguish ports, so the name does."""
    match = _HOST.fullmatch(host)
    port = match[1] if match is not None else None
    prefix = "__Host-" if kind == "s" else ""
    return f"{prefix}nekro_console_{port}" if port else f"{prefix}nekro_console"


def _cookies(request: Request, name: str) -> list[str]:
    pairs = [item.strip().partition("=") for item in ";".join(request.headers.getlist("cookie")).split(";")]
    return [value for found, _, value in pairs if found == name]


def _foreign(detail: str) -> RefusedError:
    return RefusedError(HTTPStatus.FORBIDDEN, "cross_site", detail)
