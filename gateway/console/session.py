"""Log in to the console with a key, and out."""

from __future__ import annotations

from http import HTTPStatus

from fastapi import APIRouter, Request, Response

from gateway.access.audit import record_act
from gateway.access.keys import identity_of_key, valid_key
from gateway.access.sessions import (
    BrowserSession,
    begin_session,
    end_session,
    require_own_page,
    require_session_origin,
    session_of,
)
from gateway.dependencies import ServicesDep, identity_of
from gateway.identity import Identity
from gateway.problems import ProblemError
from nekro_client.models import ConsoleLogin, ConsoleSession
from workers.composition import Services

__all__ = ["router"]

router = APIRouter(prefix="/console/session", tags=["console"])


@router.post("", status_code=HTTPStatus.CREATED)
async def log_in(
    body: ConsoleLogin, request: Request, response: Response, services: ServicesDep
) -> ConsoleSession:
    """Set the cookie of a session, which has the rights of a key for 12 hours.

    Only a page of this gateway may do so: `Origin` must name its `Host`. The cookie is accepted below
    `/api/v1` with the same `Host`. POST, PUT, PATCH and DELETE need the answer's `csrf_token` in the header
    `X-Nekro-CSRF`. The session ends with the key.
    """
    require_session_origin(services.settings.gateway, request)
    key = await valid_key(services.database, body.key.strip())
    session = begin_session(services.settings, request, response, key_id=key.id)
    identity = identity_of_key(key)
    request.state.identity = identity
    async with services.database.begin() as transaction:
        await record_act(transaction.audit, request, identity, "console.login", key.id)
    return _answer(identity, name=key.name, session=session)


@router.get("")
async def who(request: Request, services: ServicesDep) -> ConsoleSession:
    """Show who is logged in; 401: no session."""
    identity = await identity_of(request)
    session = None
    if identity.key_id is not None and "authorization" not in request.headers:
        session = session_of(services.settings, request)
    return _answer(identity, name=await _name_of(services, identity), session=session)


@router.delete("", status_code=HTTPStatus.NO_CONTENT)
async def log_out(request: Request, response: Response, services: ServicesDep) -> None:
    """Delete the session's cookie; the key stays valid."""
    try:
        session = session_of(services.settings, request)
    except ProblemError:
        session = None  # it has no rights any more
    if session is not None:
        require_own_page(request, session)
    end_session(request, response)


async def _name_of(services: Services, identity: Identity) -> str | None:
    if identity.key_id is None:
        return None
    async with services.database.read() as transaction:
        key = await transaction.keys.find(identity.key_id)
    return None if key is None else key.name


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
