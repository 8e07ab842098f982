"""Keys of the HTTP API, the accounts that they pay for, and the record of administrative acts.

An account is the id of a turn, run, call, timer or job that a key caused, which a row records, or names a key
itself (``storage.states.account_of_key``)."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, Executable, bindparam, delete, exists, select, update

from storage.accounts.key_rights import KeyRights
from storage.driver.statements import FixedStatement
from storage.repositories.base import Repository, found, values_of
from storage.sql import insert, now
from storage.states import key_of_account
from storage.tables import API_KEYS, AUDIT, KEY_TURNS

__all__ = [
    "AuditRepository",
    "Key",
    "KeyRepository",
    "NewKey",
    "RecordedAct",
]


@dataclass(frozen=True, kw_only=True)
class NewKey(KeyRights):
    """A key to store."""

    id: str
    name: str
    #: SHA-256 of the secret.
    digest: bytes = field(repr=False)
    #: Values of ``nekro.operations.actor.Scope``.
    scopes: list[str]


@dataclass(frozen=True, kw_only=True)
class Key(NewKey):
    """A stored key."""

    #: What it keeps stored.
    stored_bytes: int
    created_at: datetime
    revoked_at: datetime | None


class KeyRepository(Repository):
    """Rows of keys; a revoked one stays."""

    async def add(self, key: NewKey) -> Key:
        """Store a key.

        Raises:
            ConflictError: there is one with its id.
        """
        values = values_of(key, NewKey)
        new = insert(self._dialect, API_KEYS).values({**values, "created_at": now(), "revoked_at": None})
        return found(await self._one_or_none(Key, new.returning(API_KEYS)), "key", key.id)

    async def find_valid(self, key_id: str) -> Key | None:
        """Return a key that is neither revoked nor expired."""
        return await self._one_or_none(Key, _valid_statement, {"of_key": key_id})

    async def valid_of(self, key_ids: Collection[str]) -> set[str]:
        """Return those of some keys that are neither revoked nor expired."""
        statement = select(API_KEYS.c.id).where(API_KEYS.c.id.in_(key_ids), _is_valid())
        return {row[0] for row in await self._rows(statement)}

    async def any_valid(self) -> bool:
        """Whether a key is neither revoked nor expired."""
        return bool(await self._scalar(select(exists().where(_is_valid()))))

    async def all(self) -> list[Key]:
        """List every key, the oldest first."""
        return await self._all(Key, select(API_KEYS).order_by(API_KEYS.c.created_at, API_KEYS.c.id))

    async def find(self, key_id: str) -> Key | None:
        """Return a key, also one that is revoked or expired; None if there is none."""
        return await self._one_or_none(Key, select(API_KEYS).where(API_KEYS.c.id == key_id))

    async def get(self, key_id: str) -> Key:
        """Return a key, also one that is revoked or expired.

        Raises:
            NotFoundError: there is none.
        """
        return found(await self.find(key_id), "key", key_id)

    async def revoke(self, key_id: str) -> Key:
        """Revoke a key; idempotent.

        Raises:
            NotFoundError: there is none.
        """
        await self._count(
            update(API_KEYS)
            .where(API_KEYS.c.id == key_id, API_KEYS.c.revoked_at.is_(None))
            .values(revoked_at=now())
        )
        return await self.get(key_id)

    async def add_turn(self, key_id: str, turn_id: str) -> None:
        """Record that a key pays for a turn, or another account; idempotent."""
        new = insert(self._dialect, KEY_TURNS).values(turn_id=turn_id, key_id=key_id, created_at=now())
        await self._rows(new.on_conflict_do_nothing())

    async def forget(self, account_id: str) -> None:
        """Let no key pay for an account any more."""
        await self._count(delete(KEY_TURNS).where(KEY_TURNS.c.turn_id == account_id))

    async def pass_on(self, account_id: str | None, next_id: str) -> bool:
        """Let the key that pays for an account pay for what follows from it; False: none pays."""
        if account_id is None:
            return False
        key_id = key_of_account(account_id)
        if key_id is None:
            rows = select(KEY_TURNS.c.key_id).where(KEY_TURNS.c.turn_id == account_id)
            key_id = await self._scalar(rows)
        if key_id is None:
            return False
        await self.add_turn(key_id, next_id)
        return True


def _is_valid() -> ColumnElement[bool]:
    is_current = API_KEYS.c.expires_at.is_(None) | (API_KEYS.c.expires_at > now())
    return API_KEYS.c.revoked_at.is_(None) & is_current


@FixedStatement
def _valid_statement(_dialect: str) -> Executable:
    return select(API_KEYS).where(API_KEYS.c.id == bindparam("of_key"), _is_valid())


@dataclass(frozen=True, kw_only=True)
class RecordedAct:
    """An administrative act."""

    sequence: int
    at: datetime
    key_id: str | None
    action: str
    subject: str
    data: dict[str, Any] | None
    request_id: str | None


class AuditRepository(Repository):
    """Rows of acts, which are never changed."""

    async def add(
        self,
        action: str,
        subject: str,
        *,
        key_id: str | None,
        request_id: str | None = None,
        data: dict[str, Any] | None = None,
    ) -> None:
        """Record an act, in the transaction of the act if it has one, else before it."""
        await self._rows(
            insert(self._dialect, AUDIT).values(
                at=now(), key_id=key_id, action=action, subject=subject, data=data, request_id=request_id
            )
        )

    async def newest(
        self, *, limit: int, before: int | None = None, action: str | None = None, subject: str | None = None
    ) -> list[RecordedAct]:
        """List acts, the newest first.

        Args:
            before: only acts with a smaller sequence; None does not limit.
            action: only acts whose action begins with it, such as ``dead_letter.``; None means all.
            subject: only acts on this; None means all.
        """
        statement = select(AUDIT).order_by(AUDIT.c.sequence.desc()).limit(limit)
        if before is not None:
            statement = statement.where(AUDIT.c.sequence < before)
        if action is not None:
            statement = statement.where(AUDIT.c.action.startswith(action, autoescape=True))
        if subject is not None:
            statement = statement.where(AUDIT.c.subject == subject)
        return await self._all(RecordedAct, statement)
