"""Keys of the API: their form, their creation, and the key of this machine's user.

A key is ``nk_<id>_<secret>``. The secret has 256 random bits, so its plain SHA-256 is stored, and guessing it
is hopeless. The id is not a secret: the row is looked up by it, then the digests are compared in constant
time.

Every user of a machine reaches its loopback addresses, so an address identifies nobody. A gateway on loopback
accepts the local key instead: a file of the data directory that only the gateway's user can read. It is no
row, and has all rights, like that user.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from base64 import urlsafe_b64encode
from collections.abc import Collection
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Final

from broker_config.secret_files import secret_path, secret_text
from broker_config.settings import Settings
from nekro.app.ops.host_header import is_loopback
from nekro.gateway.identity import Scope
from nekro_agent.errors import SettingsError, UsageError
from nekro_agent.shared_clock import shared_time
from storage.access.keys import Key, NewKey
from storage.engine import Database

__all__ = [
    "KEY",
    "LocalKey",
    "create_key",
    "is_local",
    "is_secret_of",
    "key_text",
    "new_key",
    "revoke_key",
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


def new_key(
    name: str,
    *,
    scopes: Collection[Scope],
    chats: str = "*",
    user_id: str | None = None,
    requests_per_minute: int | None = None,
    cost_per_day: float | None = None,
    tokens_per_day: int | None = None,
    stored_bytes_limit: int | None = None,
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
        stored_bytes_limit=stored_bytes_limit,
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
