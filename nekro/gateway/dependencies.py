"""What routes receive: the services of the process and the identity of the request.

FastAPI calls a dependency that is not a coroutine function on a thread, which takes longer than most of them.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Annotated

from fastapi import Depends, Path, Request
from pydantic import AfterValidator

from nekro.app.services import Services
from nekro.gateway.access.keys import identify
from nekro.gateway.access.limits import OpenStreams, Rates
from nekro.gateway.streams.hub import EventHub
from nekro.gateway.web.requests import restored
from nekro.operations.actor import Identity
from nekro_agent.execution.current import begin_account

__all__ = [
    "ChatKey",
    "HubDep",
    "IdentityDep",
    "PathText",
    "RequestId",
    "ServicesDep",
    "identity_of",
    "take_stream",
]


async def _services(request: Request) -> Services:
    services: Services = request.app.state.services
    return services


async def identity_of(request: Request) -> Identity:
    """Return the identity of a request, which counts against the rate of its key.

    Raises:
        RefusedError: 401, no valid key; 429, too many requests.
    """
    known: Identity | None = getattr(request.state, "identity", None)
    if known is None:
        known = await identify(request)
        rates: Rates = request.app.state.rates
        request.state.rate_headers = await rates.take(known)
        request.state.identity = known
        begin_account(known.account_id)
    return known


def take_stream(request: Request, identity: Identity | None = None) -> None:
    """Count a stream until its request ends.

    Raises:
        OverloadedError, RefusedError: as from ``OpenStreams.counted``.
    """
    streams: OpenStreams = request.app.state.streams
    held: ExitStack = request.state.held
    client = request.client
    held.enter_context(
        streams.counted(
            key_id=None if identity is None else identity.key_id, host=None if client is None else client.host
        )
    )


async def _request_id(request: Request) -> str:
    return str(request.state.request_id)


def _not_blank(text: str) -> str:
    if not text.strip():
        raise ValueError("it is empty")
    return text


async def _hub(request: Request) -> EventHub:
    hub: EventHub = request.app.state.hub
    return hub


#: A segment of the path; it may contain any text, slashes too when they are encoded as %2F.
PathText = Annotated[str, Path(), AfterValidator(restored), AfterValidator(_not_blank)]
ChatKey = PathText
HubDep = Annotated[EventHub, Depends(_hub)]
ServicesDep = Annotated[Services, Depends(_services)]
IdentityDep = Annotated[Identity, Depends(identity_of)]
RequestId = Annotated[str, Depends(_request_id)]
