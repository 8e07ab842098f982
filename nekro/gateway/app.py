"""Builds the ASGI application of a gateway."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Final

from fastapi import APIRouter, Depends, FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import BaseRoute

from broker_config.settings import GatewaySettings, Settings
from nekro.app.extensions import imported, loaded
from nekro.app.services import GATEWAY, Services
from nekro.gateway import problems
from nekro.gateway.access.keys import ValidKeys
from nekro.gateway.access.limits import OpenStreams, Rates
from nekro.gateway.access.signed_texts import LoginCodes
from nekro.gateway.api import ROUTERS, files, system
from nekro.gateway.console import pages
from nekro.gateway.dependencies import identity_of
from nekro.gateway.document import openapi
from nekro.gateway.extensions import GatewayPart
from nekro.gateway.streams.changes import Changes
from nekro.gateway.streams.hub import EventHub
from nekro.gateway.web.bodies import BodyLimit
from nekro.gateway.web.requests import HostCheck, RequestContext
from nekro.gateway.web.responses import JsonAnswer

__all__ = ["API", "create_app"]

API: Final = "/api/v1"
_CORS_METHODS: Final = ("GET", "POST", "PUT", "PATCH", "DELETE")
_CORS_REQUEST_HEADERS: Final = (
    "Authorization", "Content-Type", "Idempotency-Key", "Last-Event-ID", "Mcp-Method", "Mcp-Name",
    "Mcp-Protocol-Version", "Mcp-Session-Id", "Range", "X-Nekro-Chat", "X-Nekro-User", "X-Request-Id",
    "traceparent", "tracestate",
)  # fmt: skip
_CORS_ANSWER_HEADERS: Final = (
    "Content-Disposition", "Content-Range", "Idempotency-Replayed", "Location", "Mcp-Session-Id",
    "RateLimit", "RateLimit-Policy", "Retry-After", "X-Request-Id",
)  # fmt: skip


def create_app(settings: Settings) -> FastAPI:
    """Return the application; its lifespan starts and closes the services of the process.

    The address and socket of ``settings.gateway`` must be those where it is served, because they decide
    whether the local key is accepted. ``app.state.stopping`` is set when the server stops.
    """

    names = tuple(one.gateway for one in loaded(settings) if one.gateway is not None)
    parts: list[GatewayPart] = [imported(name) for name in names]

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        services = Services.load(settings, role=GATEWAY)
        app.state.services = services
        app.state.hub = EventHub(services.settings, services.database, publisher=services.publisher)
        app.state.running = {}
        app.state.stopping, app.state.rates = asyncio.Event(), Rates(services.settings)
        app.state.streams = OpenStreams(settings.gateway)
        app.state.login_codes = LoginCodes(services.settings)
        try:
            await services.start()
            app.state.keys = ValidKeys(services)
            await app.state.keys.require_one()
            app.state.hub.start()
            app.state.changes = Changes(services, app.state.hub)
            for part in parts:
                if part.build is not None:
                    one = part.build(services, app.state.hub)
                    app.state.running[type(one)] = one
                    one.start()
            yield
            for one in app.state.running.values():
                await one.close()
            await app.state.changes.close()
        finally:
            await app.state.hub.close()
            await app.state.rates.close()
            await app.state.login_codes.close()
            await services.close()

    app = FastAPI(
        title="nekro-workers",
        version="1",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
        default_response_class=JsonAnswer,
    )
    problems.install(app, {prefix: form for part in parts for prefix, form in part.errors.items()})
    app.state.examples = [part.examples for part in parts]
    _add_middleware(app, settings.gateway, parts)
    app.router.routes.extend(_routes(names))
    return app


@functools.cache
def _routes(names: tuple[str, ...]) -> tuple[BaseRoute, ...]:
    """The routes of every application. Analysing their parameters takes most of the time of creating one.

    Args:
        names: of the extensions' parts.
    """
    parts: list[GatewayPart] = [imported(name) for name in names]
    app = FastAPI(
        openapi_url=None,
        redirect_slashes=False,
        default_response_class=JsonAnswer,
        # Names of the functions, which are unique: a test compares them.
        generate_unique_id_function=lambda route: route.name,
    )
    app.include_router(system.probe_router)
    app.include_router(openapi.router)
    # Each route of the API needs a key; a route that forgets to check its scope is at least not open.
    api = APIRouter(prefix=API, dependencies=[Depends(identity_of)])
    for router in (*ROUTERS, *(router for part in parts for router in part.api)):
        api.include_router(router)
    app.include_router(api)
    app.include_router(files.link_router)
    # The session before the files, whose pattern matches every path below /console/.
    app.include_router(pages.router)
    app.include_router(openapi.reference_router)
    app.include_router(pages.files_router)
    for part in parts:
        for router in part.root:
            app.include_router(router)
    return tuple(app.routes)


def _add_middleware(app: FastAPI, settings: GatewaySettings, parts: Sequence[GatewayPart]) -> None:
    """Add the middlewares; the last one added is the first to see a request."""
    limits = [limit for part in parts for limit in part.limits]
    passed_on = [prefix for part in parts for prefix in part.passed_on]
    app.add_middleware(BodyLimit, settings=settings, limits=limits, passed_on=passed_on)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=_CORS_METHODS,
            allow_headers=_CORS_REQUEST_HEADERS,
            expose_headers=_CORS_ANSWER_HEADERS,
        )
    app.add_middleware(HostCheck, settings=settings, passed_on=passed_on)
    app.add_middleware(RequestContext, own_headers=passed_on)
