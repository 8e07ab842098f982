"""The console: its files, as the package has them, and the session of a browser, below ``/console/``."""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Final

from fastapi import APIRouter, Request, Response
from fastapi.responses import RedirectResponse

from nekro.app.services import Services
from nekro.gateway.access.keys import ValidKey, keys_of, refused
from nekro.gateway.access.sessions import (
    BrowserSession,
    begin_session,
    end_session,
    require_own_page,
    require_session_origin,
    session_of,
)
from nekro.gateway.access.signed_texts import LoginCodes
from nekro.gateway.dependencies import ServicesDep, identity_of
from nekro.gateway.idempotency import NOT_ONCE
from nekro.gateway.web.responses import accepts, has_etag
from nekro.operations.actor import Actor, Identity, RefusedError
from nekro_client.models import ConsoleLogin, ConsoleSession

__all__ = [
    "INDEX",
    "ConsoleFile",
    "file_answer",
    "files_router",
    "find_file",
    "require_console",
    "router",
]


INDEX: Final = "index.html"

_DIRECTORY: Final = Path(__file__).parent / "static"
#: Types that are served; a file with another suffix is not.
_TYPES: Final = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".ico": "image/x-icon",
    ".js": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".png": "image/png",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
    ".webp": "image/webp",
    ".woff2": "font/woff2",
}


@dataclass(frozen=True, kw_only=True)
class ConsoleFile:
    """A file, as it is sent."""

    content: bytes
    media_type: str
    etag: str


def find_file(name: str) -> ConsoleFile | None:
    """Return a file by its path below the static directory; None if there is none.

    Files are compared with the names that the directory has, so no path leads out of it.
    """
    path = _names().get(name)
    if path is None:
        return None
    try:
        return _read(path, path.stat().st_mtime_ns)
    except OSError:
        return None  # removed since


@functools.cache
def _names() -> dict[str, Path]:
    found = [path for path in _DIRECTORY.rglob("*") if path.suffix in _TYPES and path.is_file()]
    return {path.relative_to(_DIRECTORY).as_posix(): path for path in found if not path.is_symlink()}


@functools.lru_cache(maxsize=512)
def _read(path: Path, _modified_ns: int) -> ConsoleFile:
    """Read a file; again when it has changed, which happens while the console is developed."""
    content = path.read_bytes()
    # Of the content, so that all gateways of a release agree.
    etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    return ConsoleFile(content=content, media_type=_TYPES[path.suffix], etag=etag)


#: No script, style, picture or connection of another host, and none inside a page.
_POLICY: Final = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' blob:",
        "connect-src 'self'",
        "font-src 'self'",
        "frame-ancestors 'none'",
        "base-uri 'none'",
        "form-action 'self'",
        # A script that sets a text as markup fails, wherever the text comes from.
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)

_HEADERS: Final = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=(), payment=(), usb=()",
    # Names have no version in them, so a browser asks each time whether a file has changed.
    "Cache-Control": "no-cache",
}

files_router = APIRouter(tags=["console"])


@files_router.get("/", include_in_schema=False)
@files_router.get("/console", include_in_schema=False)
async def enter(services: ServicesDep) -> Response:
    """Lead to the console's first page."""
    require_console(services)
    # Not for ever: the console can be switched off.
    return RedirectResponse("/console/", status_code=HTTPStatus.TEMPORARY_REDIRECT, headers=_HEADERS)


@files_router.head("/console/{path:path}", include_in_schema=False)
@files_router.get("/console/{path:path}", include_in_schema=False)
async def serve(path: str, request: Request, services: ServicesDep) -> Response:
    """Serve a file, or the console's document for an address of one of its pages."""
    require_console(services)
    found = find_file(path or INDEX)
    if found is None and accepts(request, "text/html"):
        found = find_file(INDEX)
    if found is None:
        raise RefusedError(HTTPStatus.NOT_FOUND, "not_found", "the console has no such file")
    return file_answer(request, found)


def file_answer(request: Request, file: ConsoleFile) -> Response:
    """Return a file under the policy of the console."""
    headers = {**_HEADERS, "ETag": file.etag}
    if has_etag(request.headers.get("if-none-match"), file.etag):
        return Response(status_code=HTTPStatus.NOT_MODIFIED, headers=headers)
    if request.method == "HEAD":
        headers["Content-Length"] = str(len(file.content))
        return Response(media_type=file.media_type, headers=headers)
    return Response(file.content, media_type=file.media_type, headers=headers)


def require_console(services: Services) -> None:
    """Refuse the request if the settings switch the console off."""
    if not services.settings.gateway.console:
        raise RefusedError(HTTPStatus.NOT_FOUND, "console_off", "NEKRO_GATEWAY__CONSOLE is off")


router = APIRouter(prefix="/console/session", tags=["console"])


@router.post("", status_code=HTTPStatus.CREATED, openapi_extra={**NOT_ONCE})
async def log_in(
    body: ConsoleLogin, request: Request, response: Response, services: ServicesDep
) -> ConsoleSession:
    """Set the cookie of a session, which has the rights of a key for 12 hours.

    In the place of the key, `key` may be the code of the link that `nekro up` prints, which is valid once.
    Only a page of this gateway may do so: `Origin` must name its `Host`. The cookie is accepted below
    `/api/v1` with the same `Host`. POST, PUT, PATCH and DELETE need the answer's `csrf_token` in the header
    `X-Nekro-CSRF`. The session ends with the key.
    """
    require_session_origin(services.settings, request)
    key = await _key_of(request, body.key.strip())
    session = begin_session(services.settings, request, response, key_id=key.identity.credential_id)
    request.state.identity = key.identity
    actor = Actor(services=services, identity=key.identity, request_id=request.state.request_id)
    async with services.database.begin() as transaction:
        await actor.record(transaction, "console.login", key.identity.credential_id)
    return _answer(key.identity, name=key.name, session=session)


@router.get("")
async def get_session(request: Request, services: ServicesDep) -> ConsoleSession:
    """Show who is logged in; 401: no session."""
    identity = await identity_of(request)
    session = session_of(services.settings, request) if "authorization" not in request.headers else None
    key = await keys_of(request).of_id(identity.credential_id)
    return _answer(identity, name=None if key is None else key.name, session=session)


@router.delete("", status_code=HTTPStatus.NO_CONTENT)
async def log_out(request: Request, response: Response, services: ServicesDep) -> None:
    """Delete the session's cookie; the key stays valid."""
    try:
        session = session_of(services.settings, request)
    except RefusedError:
        session = None  # it has no rights any more
    if session is not None:
        require_own_page(request, session)
    end_session(request, response)


async def _key_of(request: Request, text: str) -> ValidKey:
    """Return the key that a text is, or that the code of a link stands for; the code is used up.

    Raises:
        RefusedError: 401, it is neither, or the key is not valid any more; 503, no code can be checked now.
    """
    keys = keys_of(request)
    if not text.startswith("nl_"):
        return await keys.of_text(text)
    codes: LoginCodes = request.app.state.login_codes
    key_id = await codes.take(text)
    key = None if key_id is None else await keys.of_id(key_id)
    if key is None:
        raise refused("link_invalid", "the link was used before or has expired; log in with a key")
    return key


def _answer(identity: Identity, *, name: str | None, session: BrowserSession | None) -> ConsoleSession:
    return ConsoleSession(
        key_id=identity.key_id,
        name=name,
        scopes=sorted(scope.value for scope in identity.scopes),
        chats=identity.chats,
        user_id=identity.user_id,
        csrf_token=None if session is None else session.csrf_token,
        expires_at=None if session is None else session.expires_at,
    )
