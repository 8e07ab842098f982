"""Keys of the API: their form, their creation, and the identity that a request has.

A key is ``nk_<id>_<secret>``. The secret has 256 random bits, so its plain SHA-256 is stored, and guessing it
is hopeless. The id is not a secret: the row is looked up by it, then the digests are compared in constant
time. A ticket or a session of the console names a key, and gives the same identity.

Every user of a machine reaches its loopback addresses, so an address identifies nobody. A gateway on loopback
accepts the local key instead: a file of the data directory that only the gateway's user can read. It is no
row, and has all rights, like that user.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from pathlib import Path
from typing import Final

from fastapi import Request

from broker_config.secret_files import secret_path, secret_text
from broker_config.settings import Settings
from nekro.app.http_server import is_loopback
from nekro.app.services import Services
from nekro.gateway.access.sessions import require_own_page, session_of, takes_session
from nekro.gateway.access.signed_texts import opened_ticket
from nekro.operations.actor import LOCAL, Identity, RefusedError, Scope
from nekro.operations.keys import key_text
from nekro_agent.errors import SettingsError, UsageError
from storage.accounts.key_rights import KeyRights
from storage.accounts.keys import Key

__all__ = [
    "KEY",
    "LocalKey",
    "ValidKey",
    "ValidKeys",
    "identify",
    "is_local",
    "keys_of",
    "refused",
]


#: The form of a key; groups: id, secret.
KEY: Final = re.compile(r"nk_([0-9a-f]{16})_([A-Za-z0-9_-]{43})")
#: The local key, below ``secrets``; ``nekro_client`` finds it there too.
_FILE: Final = "api.key"


@dataclass(frozen=True, kw_only=True)
class LocalKey:
    """The key that ``secrets/api.key`` of the data directory holds."""

    #: Sessions and tickets name it, so they end when the file has another key.
    id: str
    path: Path
    _digest: bytes = field(repr=False)

    @classmethod
    def open(cls, settings: Settings) -> LocalKey:
        """Read the key; at first use it is created.

        Raises:
            SettingsError: others can read or change the file, or it contains no key.
        """
        path = secret_path(settings.data_dir, _FILE)
        text = secret_text(path, lambda: key_text(secrets.token_bytes(32)))
        match = KEY.fullmatch(text)
        if match is None:
            raise SettingsError(f"{path} contains no key; delete it, and a new one is made")
        return cls(id=match[1], path=path, _digest=hashlib.sha256(text.encode()).digest())

    def is_text(self, text: str) -> bool:
        """Whether a text that a client sent is this key."""
        digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
        return hmac.compare_digest(digest, self._digest)


def is_local(settings: Settings) -> bool:
    """Whether the gateway listens on a loopback address, where it accepts the local key."""
    return settings.gateway.socket is None and is_loopback(settings.gateway.host)


#: Compared when there is no such key, so that both cases do the same work.
_NO_DIGEST: Final = hashlib.sha256(b"").digest()

_CHALLENGE: Final = {"WWW-Authenticate": 'Bearer realm="nekro"'}


@dataclass(frozen=True, kw_only=True)
class ValidKey:
    """A key that is neither revoked nor expired."""

    name: str
    identity: Identity


class ValidKeys:
    """The keys that a gateway accepts: those of the database, and on loopback the local key."""

    def __init__(self, services: Services) -> None:
        """Read the local key; a gateway on loopback creates it at first use.

        Raises:
            SettingsError: others can read or change its file.
        """
        self._services = services
        self._local = LocalKey.open(services.settings) if is_local(services.settings) else None

    async def require_one(self) -> None:
        """Return if there is a key.

        Raises:
            UsageError: there is none, so nobody could use the gateway.
        """
        if self._local is not None:
            return
        async with self._services.database.read() as transaction:
            if await transaction.keys.any_valid():
                return
        gateway = self._services.settings.gateway
        where = f"socket {gateway.socket}" if gateway.socket is not None else gateway.host
        raise UsageError(
            f"the gateway has no valid key, so it does not listen on {where}; create one with `nekro keys"
            " create`, or listen on 127.0.0.1"
        )

    async def of_text(self, text: str) -> ValidKey:
        """Return the key that a client sent.

        Raises:
            RefusedError: 401, it is malformed, unknown, revoked or expired.
        """
        match = KEY.fullmatch(text)
        if match is not None and self._local is not None and match[1] == self._local.id:
            if self._local.is_text(text):
                return _local_key(self._local.id)
            match = None
        key = None
        if match is not None:
            async with self._services.database.read() as transaction:
                key = await transaction.keys.find_valid(match[1])
        digest = hashlib.sha256(match[2].encode() if match is not None else b"").digest()
        is_right = hmac.compare_digest(digest, _NO_DIGEST if key is None else key.digest)
        if key is None or not is_right:
            raise refused("key_invalid", "the key is unknown, revoked or expired")
        return _stored_key(key)

    async def of_id(self, key_id: str) -> ValidKey | None:
        """Return the key that a ticket or a session of this fleet names; None if it is not valid any more."""
        if self._local is not None and key_id == self._local.id:
            return _local_key(key_id)
        async with self._services.database.read() as transaction:
            key = await transaction.keys.find_valid(key_id)
        return None if key is None else _stored_key(key)


def keys_of(request: Request) -> ValidKeys:
    """Return the keys that the gateway of a request accepts."""
    keys: ValidKeys = request.app.state.keys
    return keys


async def identify(request: Request) -> Identity:
    """Return the identity of a request: that of its key, ticket or session.

    Raises:
        RefusedError: 401, the key, ticket or session is missing, malformed, unknown, revoked or expired; 403,
            the session's request does not come from a page of the console.
    """
    keys = keys_of(request)
    given = request.headers.getlist("authorization")
    # Of ``nekro.gateway.web.requests``; only requests for streams have one.
    ticket: tuple[str, str] | None = getattr(request.state, "ticket", None)
    if ticket is not None and not given:
        return await _identify_ticket(request, keys, *ticket)
    if not given:
        by_session = await _identify_session(request, keys)
        if by_session is None:
            raise refused("key_missing", "send a key: `Authorization: Bearer nk_…`")
        return by_session
    scheme, _, text = given[0].partition(" ")
    text = text.strip(" ")
    if len(given) > 1 or scheme.lower() != "bearer" or KEY.fullmatch(text) is None:
        raise refused("key_invalid", "the Authorization header is not one `Bearer nk_…`")
    return (await keys.of_text(text)).identity


def refused(code: str, detail: str) -> RefusedError:
    """Return the error of a request without a valid key."""
    return RefusedError(HTTPStatus.UNAUTHORIZED, code, detail, headers=_CHALLENGE)


async def _identify_session(request: Request, keys: ValidKeys) -> Identity | None:
    """Return the identity of a request of the console; None if it has no session."""
    if not takes_session(request):
        return None
    services: Services = request.app.state.services
    session = session_of(services.settings, request)
    if session is None:
        return None
    require_own_page(request, session)
    key = await keys.of_id(session.key_id)
    if key is None:
        raise refused("session_invalid", "the session's key is revoked or expired; log in again")
    return key.identity


async def _identify_ticket(request: Request, keys: ValidKeys, chat_key: str, ticket: str) -> Identity:
    """Return what the key of a ticket may do, but only read: the request is for that chat's stream."""
    services: Services = request.app.state.services
    key_id = opened_ticket(services.settings, ticket, chat_key=chat_key)
    key = None if key_id is None else await keys.of_id(key_id)
    if key is None:
        raise refused("ticket_invalid", "the ticket is for another chat, expired, or its key is not valid")
    return replace(key.identity, scopes=key.identity.scopes & {Scope.READ})


def _local_key(key_id: str) -> ValidKey:
    return ValidKey(name="local", identity=replace(LOCAL, credential_id=key_id))


def _stored_key(key: Key) -> ValidKey:
    identity = Identity(
        key_id=key.id,
        credential_id=key.id,
        # A scope of a newer release means nothing here.
        scopes=frozenset(Scope(scope) for scope in key.scopes if scope in list(Scope)),
        **vars(KeyRights.of(key)),
    )
    return ValidKey(name=key.name, identity=identity)
