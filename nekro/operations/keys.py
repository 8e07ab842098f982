"""Keys of the API, and the record of administrative acts.

A key is ``nk_<id>_<secret>``. The secret has 256 random bits, so its plain SHA-256 is stored.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from base64 import urlsafe_b64encode
from collections.abc import Collection
from datetime import datetime
from http import HTTPStatus
from typing import Annotated, Any

from broker_config.embedded import resolve_signing_key
from nekro.operations.actor import Actor, RefusedError, Scope
from nekro.operations.pages import Cursor, Limit, Param, number_of, page_of
from nekro_agent.errors import UsageError
from nekro_agent.shared_clock import shared_time
from nekro_client.models import Act, ApiKey, CreatedKey, KeyBody, Page
from storage.accounts.key_rights import LIMITS, OFF_AT_ZERO, KeyRights
from storage.accounts.keys import Key as StoredKey
from storage.accounts.keys import NewKey, RecordedAct
from storage.engine import Database

__all__ = [
    "create_key",
    "key_text",
    "list_acts",
    "list_keys",
    "new_key",
    "revoke_key",
    "revoke_stored_key",
    "store_key",
]


async def list_keys(actor: Actor) -> Page[ApiKey]:
    """List every key, the oldest first, also revoked and expired ones, without secrets."""
    actor.identity.require_all(Scope.ADMIN)
    async with actor.services.database.read() as transaction:
        return Page(items=[key_answer(key) for key in await transaction.keys.all()])


async def create_key(actor: Actor, body: KeyBody) -> CreatedKey:
    """Create a key with at most the scopes and limits of the one that asks; its secret is shown only here.

    A limit of the key that asks must be stated for the new one, at most as high; otherwise the answer is 403
    `key_limited`.

    The secret is not stored: with an idempotency key it follows from that and the signing key, so the answer
    to a repetition has it again.
    """
    actor.identity.require_all(Scope.ADMIN)
    scopes = {Scope(scope) for scope in body.scopes}
    more = scopes - actor.identity.scopes
    if more:
        raise RefusedError(
            HTTPStatus.FORBIDDEN,
            "scope_missing",
            f"the key cannot give scopes that it lacks: {', '.join(sorted(more))}",
        )
    rights = KeyRights.of(body)
    _require_within(rights, actor.identity)
    seed = _seed(actor)

    async def work() -> ApiKey:
        new, _ = new_key(body.name, scopes=scopes, seed=seed, **vars(rights))
        by, request_id = actor.identity.key_id, actor.request_id
        return key_answer(await store_key(actor.services.database, new, by=by, request_id=request_id))

    return await _with_secret(actor, await actor.once.run(ApiKey, work), key_text(seed))


async def revoke_key(actor: Actor, key_id: str) -> ApiKey:
    """Revoke a key, from the next request on; idempotent."""
    actor.identity.require_all(Scope.ADMIN)
    by, request_id = actor.identity.key_id, actor.request_id
    return key_answer(await revoke_stored_key(actor.services.database, key_id, by=by, request_id=request_id))


async def list_acts(
    actor: Actor,
    action: Annotated[
        str | None, Param(max_length=100, description="Only actions that begin with it: `dead_letter.`")
    ] = None,
    subject: Annotated[str | None, Param(max_length=2000, description="Only acts on this.")] = None,
    limit: Limit = 50,
    cursor: Cursor = None,
) -> Page[Act]:
    """List administrative acts, the newest first: who did what to what."""
    actor.identity.require_all(Scope.ADMIN)
    before = None if cursor is None else number_of(cursor)
    async with actor.services.database.read() as transaction:
        acts = await transaction.audit.newest(limit=limit + 1, before=before, action=action, subject=subject)
    return page_of(acts, limit=limit, answer=act_answer, position=lambda act: act.sequence)


def _require_within(rights: KeyRights, creator: KeyRights) -> None:
    """Return if no limit of the new key exceeds that of its creator, whose chats and users are all.

    Raises:
        RefusedError: 403, one does, or is not stated.
    """
    for name in LIMITS:
        wanted, most = (_limit(one, name) for one in (rights, creator))
        if most is not None and (wanted is None or wanted > most):
            shown = most.isoformat() if isinstance(most, datetime) else most
            raise RefusedError(
                HTTPStatus.FORBIDDEN,
                "key_limited",
                f"the key cannot give more than it has: state {name}, at most {shown}",
            )


def _limit(rights: KeyRights, name: str) -> Any:
    """Return a limit; None: there is none."""
    limit = getattr(rights, name)
    return limit or None if name in OFF_AT_ZERO else limit


def _seed(actor: Actor) -> bytes:
    """Return the secret that a new key derives from; a repeated request gets the same."""
    if actor.once.name is None:
        return secrets.token_bytes(32)
    signing_key = resolve_signing_key(actor.services.settings).get_secret_value()
    text = f"nekro-workers api key 1\0{actor.once.name}"
    return hmac.digest(signing_key.encode(), text.encode(), "sha256")


async def _with_secret(actor: Actor, created: ApiKey, text: str) -> CreatedKey:
    async with actor.services.database.read() as transaction:
        key = await transaction.keys.get(created.id)
    digest = hashlib.sha256(text.split("_", 2)[2].encode()).digest()
    if not hmac.compare_digest(digest, key.digest):
        raise RefusedError(
            HTTPStatus.CONFLICT,
            "secret_unavailable",
            f"the signing key has changed since key {key.id} was created, so its secret cannot be shown"
            " again; revoke it and create another one",
        )
    return CreatedKey(**created.model_dump(), key=text)


def new_key(
    name: str, *, scopes: Collection[Scope], seed: bytes | None = None, **rights: Any
) -> tuple[NewKey, str]:
    """Make a key; returns what is stored, and the key itself, which is not stored.

    Args:
        seed: secret bytes; id and secret derive from them (``key_text``); None: random ones.
        rights: values of ``KeyRights``.

    Raises:
        UsageError: it has no scope, or expires in the past.
    """
    if not scopes:
        raise UsageError(f"a key needs at least one scope of {', '.join(Scope)}")
    expires_at = rights.get("expires_at")
    if expires_at is not None and expires_at <= shared_time():
        raise UsageError(f"the key would have expired already, at {expires_at.isoformat()}")
    text = key_text(secrets.token_bytes(32) if seed is None else seed)
    _, key_id, secret = text.split("_", 2)
    stored = NewKey(
        id=key_id,
        name=name,
        digest=hashlib.sha256(secret.encode()).digest(),
        scopes=sorted(scope.value for scope in scopes),
        **rights,
    )
    return stored, text


def key_text(seed: bytes) -> str:
    """Return the key that follows from secret bytes."""
    secret = urlsafe_b64encode(hmac.digest(seed, b"secret", "sha256")).rstrip(b"=")
    return f"nk_{hmac.digest(seed, b'id', 'sha256')[:8].hex()}_{secret.decode()}"


async def store_key(database: Database, key: NewKey, *, by: str | None, request_id: str | None) -> StoredKey:
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


async def revoke_stored_key(
    database: Database, key_id: str, *, by: str | None, request_id: str | None
) -> StoredKey:
    """Revoke a key, with its audit row; effective for the next request. Idempotent.

    Raises:
        NotFoundError: there is no such key.
    """
    async with database.begin() as transaction:
        key = await transaction.keys.revoke(key_id)
        await transaction.audit.add("key.revoke", key_id, key_id=by, request_id=request_id)
        return key


def key_answer(key: StoredKey) -> ApiKey:
    """Return a key without its digest."""
    return ApiKey.model_validate(key, from_attributes=True)


def act_answer(act: RecordedAct) -> Act:
    """Return an administrative act."""
    return Act(
        id=str(act.sequence),
        at=act.at,
        key_id=act.key_id,
        action=act.action,
        subject=act.subject,
        data=act.data,
        request_id=act.request_id,
    )
