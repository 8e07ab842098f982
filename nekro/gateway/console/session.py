"""Log in to the console with a key or the code of a link, and out."""

from __future__ import annotations

from http import HTTPStatus

from fastapi import APIRouter, Request, Response

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
from nekro.gateway.dependencies import ServicesDep, identity_of, record_act
from nekro.gateway.idempotency import NOT_ONCE
from nekro.operations.actor import Identity, RefusedError
from nekro_client.models import ConsoleLogin, ConsoleSession

__all__ = ["router"]

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
    session = begin_session(services.settings, request, response, key_id=key.id)
    request.state.identity = key.identity
    async with services.database.begin() as transaction:
        await record_act(transaction.audit, request, key.identity, "console.login", key.id)
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
