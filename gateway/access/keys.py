"""Keys of the API: their form, their creation, and the identity of a request.

A key is ``nk_<id>_<secret>``. The secret has 256 random bits, so its plain SHA-256 is stored, and guessing it
is hopeless. The id is not a secret: the row is looked up by it, then the digests are compared in constant
time.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from base64 import urlsafe_b64encode
from collections.abc import Collection
from dataclasses import replace
from datetime import datetime
from http import HTTPStatus
from typing import Final

from fastapi import Request

from gateway.access.sessions import require_own_page, session_of, takes_session
from gateway.access.tickets import opened_ticket
from gateway.identity import LOCAL, Identity, Scope
from gateway.problems import ProblemError
from nekro_agent.errors import UsageError
from nekro_agent.shared_clock import shared_time
from storage.access.keys import Key, NewKey
from storage.engine import Database
from workers.composition import Services
from workers.ops.host_header import is_loopback

__all__ = [
    "create_key",
    "identify",
    "identity_of_key",
    "is_local",
    "is_secret_of",
    "key_text",
    "new_key",
    "require_key",
    "revoke_key",
    "valid_key",
]

_KEY: Final = re.compile(r"nk_([0-9a-f]{16})_([A-Za-z0-9_-]{43})")
#: Compared when there is no such key, so that both cases do the same work.
_NO_DIGEST: Final = hashlib.sha256(b"").digest()
#: Headers that proxies add: behind one, a request from this machine may come from anywhere.
_PROXY_HEADERS: Final = ("forwarded", "via", "x-forwarded-for", "x-forwarded-host", "x-real-ip")
_CHALLENGE: Final = {"WWW-Authenticate": 'Bearer realm="nekro"'}


def new_key(
    name: str,
    *,
    scopes: Collection[Scope],
    chats: str = "*",
    user_id: str | None = None,
    requests_per_minute: int | None = None,
    cost_per_day: float | None = None,
    tokens_per_day: int | None = None,
    expires_at: datetime | None = None,
    seed: bytes | None = None,
) -> tuple[NewKey, str]:
    """Make a key; returns what is stored, and the key itself, which is not stored.

    Args:
        seed: secret bytes from which id and secret follow (``key_text``); None: random ones.

    Raises:
        UsageError: it has no scope, or expires in the past.
    """
    if not scopes:
        raise UsageError(f"a key needs at least one scope of {', '.join(Scope)}")
    if expires_at is not None and expires_at <= shared_time():
        raise UsageError(f"the key would have expired already, at {expires_at.isoformat()}")
    text = key_text(secrets.token_bytes(32) if seed is None else seed)
    _, key_id, secret = text.split("_", 2)
    stored = NewKey(
        id=key_id,
        name=name,
        digest=hashlib.sha256(secret.encode()).digest(),
        scopes=sorted(scope.value for scope in scopes),
        chats=chats,
        user_id=user_id,
        requests_per_minute=requests_per_minute,
        cost_per_day=cost_per_day,
        tokens_per_day=tokens_per_day,
        expires_at=expires_at,
    )
    return stored, text


def key_text(seed: bytes) -> str:
    """Return the key that follows from secret bytes."""
    secret = urlsafe_b64encode(hmac.digest(seed, b"secret", "sha256")).rstrip(b"=")
    return f"nk_{hmac.digest(seed, b'id', 'sha256')[:8].hex()}_{secret.decode()}"


def is_secret_of(key: Key, text: str) -> bool:
    """Whether a text is the key that was stored as ``key``."""
    return hmac.compare_digest(hashlib.sha256(text.split("_", 2)[2].encode()).digest(), key.digest)


async def create_key(database: Database, key: NewKey, *, by: str | None, request_id: str | None) -> Key:
    """Store a key, with its audit row; one that is stored already is returned.

    Args:
        by: id of the key that creates it; None: an operator of this installation.

    Raises:
        ConflictError: another key has its id.
    """
    data = {"name": key.name, "scopes": key.scopes, "chats": key.chats, "user_id": key.user_id}
    async with database.begin() as transaction:
        known = await transaction.keys.find(key.id)
        if known is not None and hmac.compare_digest(known.digest, key.digest):
            return known
        await transaction.audit.add("key.create", key.id, key_id=by, request_id=request_id, data=data)
        return await transaction.keys.add(key)


async def revoke_key(database: Database, key_id: str, *, by: str | None, request_id: str | None) -> Key:
    """Revoke a key, with its audit row; effective for the next request. Idempotent.

    Raises:
        NotFoundError: there is no such key.
    """
    async with database.begin() as transaction:
        key = await transaction.keys.revoke(key_id)
        await transaction.audit.add("key.revoke", key_id, key_id=by, request_id=request_id)
        return key


def is_local(services: Services) -> bool:
    """Whether the gateway listens on a loopback address only."""
    gateway = services.settings.gateway
    return gateway.socket is None and is_loopback(gateway.host)


async def require_key(services: Services) -> None:
    """Return if the gateway may listen where the settings say.

    Raises:
        UsageError: others than this machine can reach it, and there is no valid key.
    """
    if is_local(services):
        return
    async with services.database.read() as transaction:
        if await transaction.keys.any_valid():
            return
    gateway = services.settings.gateway
    where = f"socket {gateway.socket}" if gateway.socket is not None else gateway.host
    raise UsageError(
        f"the gateway has no valid key, so it does not listen on {where}; create one with `nekro keys"
        " create`, or listen on 127.0.0.1"
    )


async def identify(request: Request) -> Identity:
    """Return the identity of a request: its key's, or that of this machine while there are no keys.

    Raises:
        ProblemError: 401, the key, ticket or session is missing, malformed, unknown, revoked or expired; 403,
            the session's request does not come from a page of the console.
    """
    services: Services = request.app.state.services
    given = request.headers.getlist("authorization")
    # Of ``gateway.web.tickets``; only requests for streams have one.
    ticket: tuple[str, str] | None = getattr(request.state, "ticket", None)
    if ticket is not None and not given:
        return await _identify_ticket(request, services, *ticket)
    if not given and await _may_be_local(request, services):
        return LOCAL
    if not given:
        by_session = await _identify_session(request, services)
        if by_session is None:
            raise _refused("key_missing", "send a key: `Authorization: Bearer nk_…`")
        return by_session
    scheme, _, text = given[0].partition(" ")
    text = text.strip(" ")
    if len(given) > 1 or scheme.lower() != "bearer" or _KEY.fullmatch(text) is None:
        raise _refused("key_invalid", "the Authorization header is not one `Bearer nk_…`")
    return identity_of_key(await valid_key(services.database, text))


async def valid_key(database: Database, text: str) -> Key:
    """Return the key that a client sent.

    Raises:
        ProblemError: 401, it is malformed, unknown, revoked or expired.
    """
    match = _KEY.fullmatch(text)
    key = None
    if match is not None:
        async with database.read() as transaction:
            key = await transaction.keys.find_valid(match[1])
    digest = hashlib.sha256(match[2].encode() if match is not None else b"").digest()
    is_right = hmac.compare_digest(digest, _NO_DIGEST if key is None else key.digest)
    if key is None or not is_right:
        raise _refused("key_invalid", "the key is unknown, revoked or expired")
    return key


async def _identify_session(request: Request, services: Services) -> Identity | None:
    """Return the identity of a request of the console; None if it has no session."""
    if not takes_session(request):
        return None
    session = session_of(services.settings, request)
    if session is None:
        return None
    require_own_page(request, session)
    async with services.database.read() as transaction:
        key = await transaction.keys.find_valid(session.key_id)
    if key is None:
        raise _refused("session_invalid", "the session's key is revoked or expired; log in again")
    return identity_of_key(key)


async def _identify_ticket(request: Request, services: Services, chat_key: str, ticket: str) -> Identity:
    """Return what the key of a ticket may do, but only read: the request is for that chat's stream."""
    opened = opened_ticket(services.settings, ticket, chat_key=chat_key)
    owner: Identity | None = None
    if opened == (None,):
        owner = LOCAL if await _may_be_local(request, services) else None
    elif opened is not None:
        async with services.database.read() as transaction:
            key = await transaction.keys.find_valid(str(opened[0]))
        owner = None if key is None else identity_of_key(key)
    if owner is None:
        raise _refused("ticket_invalid", "the ticket is for another chat, expired, or its key is not valid")
    return replace(owner, scopes=owner.scopes & {Scope.READ})


async def _may_be_local(request: Request, services: Services) -> bool:
    """Whether a request without a key has full rights: from this machine, to a gateway that has no keys."""
    client = request.client
    from_here = client is not None and is_loopback(client.host)
    if not (is_local(services) and from_here) or any(name in request.headers for name in _PROXY_HEADERS):
        return False
    async with services.database.read() as transaction:
        return not await transaction.keys.any()


def identity_of_key(key: Key) -> Identity:
    """Return what the holder of a valid key may do."""
    return Identity(
        key_id=key.id,
        # A scope of a newer release means nothing here.
        scopes=frozenset(Scope(scope) for scope in key.scopes if scope in list(Scope)),
        chats=key.chats,
        user_id=key.user_id,
        requests_per_minute=key.requests_per_minute,
        cost_per_day=key.cost_per_day,
        tokens_per_day=key.tokens_per_day,
        expires_at=key.expires_at,
    )


def _refused(code: str, detail: str) -> ProblemError:
    return ProblemError(HTTPStatus.UNAUTHORIZED, code, detail, headers=_CHALLENGE)
