"""What an extension brings to a gateway: routes, limits, and what runs as long as the gateway."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from fastapi import APIRouter, Request

from broker_config.settings import GatewaySettings
from nekro.app.services import Services
from nekro.gateway.document.examples import NO_EXAMPLES, Examples
from nekro.gateway.problems import ErrorForm
from nekro.gateway.streams.hub import EventHub

__all__ = ["GatewayPart", "Running", "running"]


class Running:
    """What an extension runs in a gateway, as long as the gateway; its routes get it from ``running``."""

    def start(self) -> None:
        """Begin."""

    def end(self) -> None:
        """End streams, because the gateway stops; requests that run are awaited afterwards."""

    async def close(self) -> None:
        """Close what it opened."""


@dataclass(frozen=True, kw_only=True)
class GatewayPart:
    """The part of an extension that a gateway loads."""

    #: Routers below ``/api/v1``, whose routes need a key.
    api: Sequence[APIRouter] = ()
    #: Routers of other paths; each of their routes admits requests itself.
    root: Sequence[APIRouter] = ()
    #: Paths with a limit of bodies other than ``body_bytes``; as ``nekro.gateway.web.bodies.OWN_LIMITS``.
    limits: Sequence[tuple[re.Pattern[str], Callable[[GatewaySettings], int]]] = ()
    #: Prefixes of paths whose requests are passed on as they come, and whose answers set their own headers.
    passed_on: Sequence[str] = ()
    #: Forms of errors, by the prefix of their paths.
    errors: Mapping[str, ErrorForm] = field(default_factory=dict)
    #: Examples of its routes for the OpenAPI document.
    examples: Examples = NO_EXAMPLES
    #: Builds what it runs, on the event loop, when the services have started; None: nothing.
    build: Callable[[Services, EventHub], Running] | None = None


R = TypeVar("R", bound=Running)


def running(request: Request, kind: type[R]) -> R:
    """Return what the extension of a route runs."""
    found: dict[type[Any], R] = request.app.state.running
    return found[kind]
