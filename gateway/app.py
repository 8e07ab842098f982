"""Builds the ASGI application of a gateway."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request, Response
from starlette.middleware.base import RequestResponseEndpoint

from broker_config.settings import Settings
from gateway import problems
from gateway.api import probes
from gateway.identity import LOCAL
from workers.composition import CALLER, Services

__all__ = ["create_app"]

API: str = "/api/v1"


def create_app(settings: Settings) -> FastAPI:
    """Return the application; its lifespan starts and closes the services of the process."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        services = Services.load(settings, role=CALLER)
        app.state.services = services
        try:
            await services.start()
            yield
        finally:
            await services.close()

    app = FastAPI(title="nekro-workers", version="1", lifespan=lifespan, docs_url=None, redoc_url=None)
    problems.install(app)

    @app.middleware("http")
    async def identify(request: Request, call_next: RequestResponseEndpoint) -> Response:
        request.state.identity = LOCAL
        return await call_next(request)

    app.include_router(probes.router)
    return app
