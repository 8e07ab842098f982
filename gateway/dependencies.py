"""What routes receive: the services of the process and the identity of the request."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Request

from gateway.identity import Identity
from workers.composition import Services

__all__ = ["IdentityDep", "ServicesDep"]


def _services(request: Request) -> Services:
    services: Services = request.app.state.services
    return services


async def _identity(request: Request) -> Identity:
    identity: Identity = request.state.identity
    return identity


ServicesDep = Annotated[Services, Depends(_services)]
IdentityDep = Annotated[Identity, Depends(_identity)]
