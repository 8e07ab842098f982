"""The console's files, as the package has them, served below ``/console/``."""

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
from nekro.gateway.dependencies import ServicesDep
from nekro.gateway.web.responses import accepts, has_etag
from nekro.operations.actor import RefusedError

__all__ = [
    "INDEX",
    "ConsoleFile",
    "file_answer",
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

router = APIRouter(tags=["console"])


@router.get("/", include_in_schema=False)
@router.get("/console", include_in_schema=False)
async def enter(services: ServicesDep) -> Response:
    """Lead to the console's first page."""
    require_console(services)
    # Not for ever: the console can be switched off.
    return RedirectResponse("/console/", status_code=HTTPStatus.TEMPORARY_REDIRECT, headers=_HEADERS)


@router.head("/console/{path:path}", include_in_schema=False)
@router.get("/console/{path:path}", include_in_schema=False)
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
