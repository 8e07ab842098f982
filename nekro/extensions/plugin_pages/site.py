"""The ASGI application of one plugin: its router, its pages, and the check that a gateway asks."""

from __future__ import annotations

import asyncio
import os
import sys
from http import HTTPStatus
from pathlib import Path, PurePosixPath
from typing import Any, Final

from fastapi import APIRouter, FastAPI
from loguru import logger
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, PlainTextResponse
from starlette.routing import Mount
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nekro.app.http_server import has_ambiguous_length
from nekro.wire.seals import CALLER_HEADER, PROOF_HEADER, SIGNATURE_HEADER, HttpVerifier
from nekro_agent.errors import InvalidValueError, MessageRefusedError
from nekro_agent.execution.current import Payer, WebCaller, calling, paying
from nekro_agent.plugin import NekroPlugin, using
from nekro_client.models import Problem

__all__ = ["PluginSite", "application_of", "pages_of"]

_PAGE_SUFFIXES: Final = (".html", ".htm")
_PAGE_PATH: Final = "/__webui__"
_FAILED: Final = "the plugin's route raised an error; the worker's log has it under the request's id"


def application_of(plugin: NekroPlugin) -> ASGIApp:
    """Build the application of a plugin below ``/plugins/<key>``; runs the plugin's code.

    Raises:
        InvalidValueError: ``mount_router`` returned no ``APIRouter``, or ``webui_path`` names
            neither a directory nor a page.
        Exception: what the plugin raised.
    """
    app = FastAPI(
        title=plugin.name,
        version=plugin.version,
        docs_url=None,
        redoc_url=None,
        # ``PluginSite`` logs the error, which is raised again after this answer.
        exception_handlers={Exception: _failed},
    )
    make_router = plugin.hook("router")
    if make_router is not None:
        router = make_router()
        if not isinstance(router, APIRouter):
            raise InvalidValueError(
                f"{plugin.key}: the function of mount_router must return an APIRouter, "
                f"not {type(router).__name__}"
            )
        app.include_router(router)
    path = str(plugin.webui_path or "").strip()
    if path and not path.startswith("/"):  # else it names a path of the router
        _mount_pages(app, pages_of(plugin, path))
    return Starlette(routes=[Mount(f"/plugins/{plugin.key}", app=app)])


def pages_of(plugin: NekroPlugin, path: str) -> Path:
    """Return the directory or the HTML file of a plugin's pages, which is beside its module.

    Raises:
        InvalidValueError: there is neither, or it is not below the module's directory.
    """
    file = getattr(sys.modules.get(plugin._module_name), "__file__", None)
    root = Path(file).resolve().parent if file else Path.cwd()
    found = (root / path).resolve()
    is_page = found.is_file() and found.suffix.lower() in _PAGE_SUFFIXES
    if not (found.is_dir() or is_page) or not found.is_relative_to(root):
        raise InvalidValueError(f"{plugin.key}: webui_path {path!r} is no directory and no page below {root}")
    return found


def _mount_pages(app: FastAPI, pages: Path) -> None:
    """Serve a directory, or a page at ``/__webui__/`` and what is beside it there, as Nekro Agent does."""
    if pages.is_dir():
        app.mount("/", _Pages(directory=pages, html=True))
        return

    async def page() -> FileResponse:
        return FileResponse(pages)

    app.add_api_route(f"{_PAGE_PATH}/", page, include_in_schema=False)
    app.mount(_PAGE_PATH, _Pages(directory=pages.parent))


class _Pages(StaticFiles):
    """Refuses paths and symbolic links that lead out of the directory, hidden names and Python code."""

    def lookup_path(self, path: str) -> tuple[str, os.stat_result | None]:
        """Return the file of a path, "" and None if there is none."""
        parts = PurePosixPath(path).parts
        is_private = path.endswith((".py", ".pyc")) or any(
            part.startswith(".") and part != "." for part in parts
        )
        return ("", None) if is_private else super().lookup_path(path)


async def _failed(request: Request, _error: Exception) -> JSONResponse:
    return _problem(request.scope, HTTPStatus.INTERNAL_SERVER_ERROR, "plugin_route_failed", _FAILED)


def _problem(
    scope: Scope, status: HTTPStatus, code: str, detail: str, headers: dict[str, str] | None = None
) -> JSONResponse:
    """Return a problem document, as the gateway's own errors are."""
    problem = Problem(
        title=status.phrase,
        status=status,
        detail=detail,
        code=code,
        request_id=Request(scope).headers.get("x-request-id"),
    )
    return JSONResponse(
        problem.model_dump(mode="json"), status, headers=headers, media_type="application/problem+json"
    )


class PluginSite:
    """Admits the requests of gateways only, and only while the plugin is enabled."""

    def __init__(self, plugin: NekroPlugin, verifier: HttpVerifier, app: ASGIApp) -> None:
        self._plugin, self._verifier, self._app = plugin, verifier, app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            return
        if has_ambiguous_length(scope):
            detail = "send Content-Length or Transfer-Encoding, not both"
            refused = _problem(
                scope, HTTPStatus.BAD_REQUEST, "length_ambiguous", detail, {"Connection": "close"}
            )
            await refused(scope, receive, send)
            return
        headers = {name: value for name, value in scope["headers"] if name.startswith(b"x-")}
        target = scope["raw_path"] + (b"?" + scope["query_string"] if scope["query_string"] else b"")
        signature, stated = (
            headers.get(name.encode(), b"").decode("latin-1") for name in (SIGNATURE_HEADER, CALLER_HEADER)
        )
        try:
            proof = self._verifier.verify(
                signature,
                method=scope["method"],
                target=target.decode("latin-1"),
                plugin_key=self._plugin.key,
            )
            caller = stated and WebCaller.of_text(self._verifier.caller(stated, signature=signature))
        except MessageRefusedError as exc:
            await PlainTextResponse(f"{exc}\n", HTTPStatus.FORBIDDEN)(scope, receive, send)
            return

        has_begun = False

        async def prove(message: Message) -> None:
            nonlocal has_begun
            if message["type"] == "http.response.start":
                has_begun = True
                message["headers"] = [*message.get("headers", ()), (PROOF_HEADER.encode(), proof.encode())]
            await send(message)

        if not self._plugin.is_enabled:
            refusal = PlainTextResponse("this plugin is disabled\n", HTTPStatus.NOT_FOUND)
            await refusal(scope, receive, prove)
            return
        self._plugin.refresh_config()
        payer = Payer(plugin_key=self._plugin.key, account_id=caller.account_id if caller else None)
        try:
            with using(self._plugin), paying(payer), calling(caller or None):
                await self._app(_as_asked(scope, headers), receive, prove)
        except BaseException as exc:  # of the plugin's code, also SystemExit, which must not end the worker
            answer = self._ended(scope, exc)
            if not has_begun:
                await answer(scope, receive, prove)
            # Else the server closes the connection, since the answer has no end.

    def _ended(self, scope: Scope, error: BaseException) -> JSONResponse:
        """Log how a request failed, and return the answer to it."""
        log = logger.bind(plugin=self._plugin.key, request_id=Request(scope).headers.get("x-request-id"))
        task = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
            log.warning("plugin_request_cut")
            return _problem(
                scope,
                HTTPStatus.SERVICE_UNAVAILABLE,
                "stopping",
                "the plugin's server is stopping; the request may have had its effect",
                {"Retry-After": "1"},
            )
        log.opt(exception=error).error("plugin_route_failed")
        return _problem(scope, HTTPStatus.INTERNAL_SERVER_ERROR, "plugin_route_failed", _FAILED)


def _as_asked(scope: Scope, headers: dict[bytes, bytes]) -> dict[str, Any]:
    """Return the scope as the gateway's client caused it: with its scheme, without what is between us."""
    scheme = headers.get(b"x-forwarded-proto", b"http").decode("latin-1")
    kept = [(name, value) for name, value in scope["headers"] if not name.startswith(b"x-nekro-")]
    return {**scope, "scheme": scheme, "headers": kept}
