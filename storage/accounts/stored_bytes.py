"""How many bytes each key of the HTTP API keeps stored, and the limit on them.

The row of a key has the sum, and ``key_storage`` says what it consists of: a row per key, kind and day for
what retention deletes, which is given back when that time is over, and a row per file or declaration, which
is given back with it. The sum is raised by one UPDATE that checks the limit, so no number of writers at once
exceeds it. Whoever changes the rows of a key has locked the key's row first, and that lock is a transaction's
last one: what a transaction adds is charged at its end (``Transaction.flush``).
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection
from datetime import UTC
from typing import Final

from sqlalchemy import (
    BigInteger,
    Boolean,
    ColumnElement,
    Executable,
    Text,
    bindparam,
    delete,
    func,
    or_,
    select,
    type_coerce,
    update,
)

from nekro_agent.errors import StorageQuotaError
from nekro_agent.shared_clock import shared_time
from storage.driver.connection import Connection
from storage.driver.statements import FixedStatement
from storage.repositories.base import Repository
from storage.sql import insert, now, seconds_from_now
from storage.states import StoredKind, key_of_account, new_id
from storage.tables import API_KEYS, CALLS, KEY_STORAGE, KEY_TURNS

__all__ = ["ROW_BYTES", "StoredByteRepository", "item_of_file", "size_of"]

#: What the rows of a message, call or file take besides their texts, with their indexes.
ROW_BYTES: Final = 1024


def size_of(*texts: str | None) -> int:
    """Return the bytes of some texts."""
    return sum(len(text.encode("utf-8", "surrogatepass")) for text in texts if text)


def item_of_file(chat_key: str, path: str) -> str:
    """Return the id of a file of a chat."""
    digest = hashlib.sha256(f"{chat_key}\0{path}".encode("utf-8", "surrogatepass"))
    return f"{StoredKind.FILES}:{digest.hexdigest()}"


class StoredByteRepository(Repository):
    """What keys keep stored."""

    def __init__(self, connection: Connection, *, key_bytes: int) -> None:
        """
        Args:
            key_bytes: limit of a key that has none of its own; 0: none.
        """
        super().__init__(connection)
        self._key_bytes = key_bytes
        #: Bytes by account and kind.
        self._added: Counter[tuple[str, StoredKind]] = Counter()
        #: Accounts whose limit the transaction respects.
        self._limited: set[str] = set()

    def limit_of(self, own: int | None) -> int:
        """Return the limit that applies to a key; 0: none."""
        return self._key_bytes if own is None else own

    def add(self, account_id: str | None, kind: StoredKind, size: int, *, refuses: bool = True) -> None:
        """Charge the key that pays for an account, if one does, at the end of the transaction.

        Args:
            account_id: see ``nekro_agent.execution.current``; None: no key pays.
            size: bytes.
            refuses: whether the transaction fails with ``StorageQuotaError`` beyond the limit. False is for
                what follows from work that was admitted.
        """
        if account_id is None:
            return
        self._added[account_id, kind] += size
        if refuses:
            self._limited.add(account_id)

    async def add_calls(self, account_id: str, round_id: str) -> None:
        """Charge a round's recorded calls, and what they wrote into the history; beyond the limit too."""
        rows = await self._rows(_calls_statement, {"of_round": round_id})
        for count, size in rows:
            if count:
                self.add(account_id, StoredKind.CALLS, count * ROW_BYTES + size, refuses=False)
                self.add(account_id, StoredKind.MESSAGES, count * ROW_BYTES + size, refuses=False)

    async def flush(self) -> None:
        """Charge what was added; ``Database.begin`` calls this before the commit.

        Raises:
            StorageQuotaError: it would exceed the limit of a key.
        """
        added, self._added = self._added, Counter()
        limited, self._limited = self._limited, set()
        by_key: dict[str, Counter[StoredKind]] = {}
        refusing: set[str] = set()
        for account_id in sorted({account for account, _ in added}):
            key_id = await self._payer(account_id)
            if key_id is None:
                continue
            kinds = by_key.setdefault(key_id, Counter())
            kinds.update({kind: size for (account, kind), size in added.items() if account == account_id})
            if account_id in limited:
                refusing.add(key_id)
        for key_id, kinds in sorted(by_key.items()):
            await self._charge(key_id, kinds.total(), refuses=key_id in refusing)
            for kind, size in kinds.items():
                day = shared_time().astimezone(UTC).date().isoformat()
                values = {"new_id": f"{kind}:{key_id}:{day}", "of_key": key_id, "kind": kind, "size": size}
                await self._rows(_add_statement, values)

    async def require_room(self, key_id: str, size: int) -> None:
        """Return if a key may store so many bytes more at present; nothing is charged.

        Raises:
            StorageQuotaError: it may not.
        """
        rows = await self._rows(_use_statement, {"of_key": key_id})
        for used, own in rows:
            limit = self.limit_of(own)
            if limit and used + size > limit:
                raise StorageQuotaError(key_id=key_id, wanted_bytes=size, used_bytes=used, limit_bytes=limit)

    async def reserve(self, key_id: str, size: int) -> str:
        """Charge a key for a file that is about to be stored; returns the id of the reservation.

        A reservation that is neither settled nor released is given back after a day.

        Raises:
            StorageQuotaError: it would exceed the key's limit.
        """
        await self._charge(key_id, size, refuses=True)
        reserved = f"{StoredKind.REQUESTS}:{new_id()}"
        values = {"new_id": reserved, "of_key": key_id, "kind": StoredKind.REQUESTS, "size": size}
        await self._rows(_add_statement, values)
        return reserved

    async def settle(self, reserved: str, item_id: str, kind: StoredKind) -> None:
        """Let a reservation be that of an item; if the item is charged already, it is given back."""
        is_charged = await self._scalar(_touch_statement, {"of_item": item_id}) is not None
        if is_charged:
            await self.release(reserved)
            return
        await self._count(
            update(KEY_STORAGE)
            .where(KEY_STORAGE.c.id == reserved)
            .values(id=item_id, kind=kind, created_at=now())
        )

    async def hold(self, key_id: str | None, item_id: str, kind: StoredKind, size: int) -> None:
        """Charge a key for an item, in place of what was charged for it before; None: only give that back.

        Raises:
            StorageQuotaError: it would exceed the key's limit.
        """
        await self.release(item_id)
        if key_id is not None:
            await self._charge(key_id, size, refuses=True)
            await self._rows(
                _add_statement, {"new_id": item_id, "of_key": key_id, "kind": kind, "size": size}
            )

    async def release(self, item_id: str) -> None:
        """Give back what an item was charged; idempotent."""
        key_id = await self._scalar(select(KEY_STORAGE.c.key_id).where(KEY_STORAGE.c.id == item_id))
        if key_id is not None:
            await self._give_back(key_id, [item_id])

    async def give_back_expired(self, kind: StoredKind, *, seconds: float, limit: int) -> int:
        """Give back what was charged longer ago than that; returns how many rows that were.

        All of them are of one key; 0: there are none.
        """
        before = seconds_from_now(-seconds)
        oldest = select(KEY_STORAGE.c.key_id, KEY_STORAGE.c.id).where(
            KEY_STORAGE.c.kind == kind, KEY_STORAGE.c.created_at < before
        )
        rows = list(await self._rows(oldest.order_by(KEY_STORAGE.c.key_id).limit(limit)))
        if not rows:
            return 0
        key_id = rows[0][0]
        item_ids = [row[1] for row in rows if row[0] == key_id]
        # A file that is stored again meanwhile is younger.
        await self._give_back(key_id, item_ids, KEY_STORAGE.c.created_at < before)
        return len(item_ids)

    async def _payer(self, account_id: str) -> str | None:
        named = key_of_account(account_id)
        if named is not None:
            return named
        key_id = await self._scalar(_payer_statement, {"of_account": account_id})
        return None if key_id is None else str(key_id)

    async def _charge(self, key_id: str, size: int, *, refuses: bool) -> None:
        values = {"of_key": key_id, "size": size, "refuses": refuses, "most": self._key_bytes}
        if await self._scalar(_charge_statement, values) is None and refuses:
            await self.require_room(key_id, size)

    async def _give_back(
        self, key_id: str, item_ids: Collection[str], *conditions: ColumnElement[bool]
    ) -> None:
        await self._rows(_charge_statement, {"of_key": key_id, "size": 0, "refuses": False, "most": 0})
        gone = delete(KEY_STORAGE).where(KEY_STORAGE.c.id.in_(item_ids), *conditions)
        size = sum(row[0] for row in await self._rows(gone.returning(KEY_STORAGE.c.bytes)))
        await self._rows(_charge_statement, {"of_key": key_id, "size": -size, "refuses": False, "most": 0})


_LIMIT: Final = func.coalesce(API_KEYS.c.stored_bytes_limit, bindparam("most", type_=BigInteger))


@FixedStatement
def _charge_statement(_dialect: str) -> Executable:
    after = API_KEYS.c.stored_bytes + bindparam("size", type_=BigInteger)
    is_within = or_(~bindparam("refuses", type_=Boolean), _LIMIT == 0, after <= _LIMIT)
    return (
        update(API_KEYS)
        .where(API_KEYS.c.id == bindparam("of_key"), is_within)
        .values(stored_bytes=after)
        .returning(API_KEYS.c.id)
    )


@FixedStatement
def _add_statement(dialect: str) -> Executable:
    new = insert(dialect, KEY_STORAGE).values(
        id=bindparam("new_id"),
        key_id=bindparam("of_key"),
        kind=bindparam("kind"),
        bytes=bindparam("size", type_=BigInteger),
        created_at=now(),
    )
    grown = KEY_STORAGE.c.bytes + new.excluded.bytes
    return new.on_conflict_do_update(index_elements=[KEY_STORAGE.c.id], set_={"bytes": grown})


@FixedStatement
def _touch_statement(_dialect: str) -> Executable:
    named = update(KEY_STORAGE).where(KEY_STORAGE.c.id == bindparam("of_item"))
    return named.values(created_at=now()).returning(KEY_STORAGE.c.id)


@FixedStatement
def _calls_statement(_dialect: str) -> Executable:
    size = func.coalesce(func.sum(func.length(type_coerce(CALLS.c.outcome, Text))), 0)
    return select(func.count(), size).where(CALLS.c.round_id == bindparam("of_round"))


@FixedStatement
def _use_statement(_dialect: str) -> Executable:
    use = select(API_KEYS.c.stored_bytes, API_KEYS.c.stored_bytes_limit)
    return use.where(API_KEYS.c.id == bindparam("of_key"))


@FixedStatement
def _payer_statement(_dialect: str) -> Executable:
    return select(KEY_TURNS.c.key_id).where(KEY_TURNS.c.turn_id == bindparam("of_account"))
