"""Serves the console's files below ``/console/``."""

from __future__ import annotations

from http import HTTPStatus
from typing import Final

from fastapi import APIRouter, Request, Response
from fastapi.responses import RedirectResponse

from nekro.app.composition import Services
from nekro.gateway.console.files import INDEX, ConsoleFile, find_file
from nekro.gateway.dependencies import ServicesDep
from nekro.gateway.problems import ProblemError
from nekro.gateway.served_files import has_etag
from nekro.gateway.web.responses import accepts

__all__ = ["file_answer", "require_console", "router"]

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
        raise ProblemError(HTTPStatus.NOT_FOUND, "not_found", "the console has no such file")
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
        raise ProblemError(HTTPStatus.NOT_FOUND, "console_off", "NEKRO_GATEWAY__CONSOLE is off")
