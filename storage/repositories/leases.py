"""Leases: one holder in the fleet for as long as it renews; and requests and downloads that run under one.

A lease expires by the database's clock. Each acquisition increments the fencing token and writes with
an old token are refused, so a holder that was suspended and resumes cannot corrupt state. Calls and
jobs have the same columns; the state of their rows decides who may acquire them. A request with an
idempotency key runs once under its lease, and repetitions get its answer.

The newest download to a target is a row with its progress. It runs while its lease is held; when its worker
dies, the next caller acquires the lease and resumes from the data on disk."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from sqlalchemy import (
    BindParameter,
    Column,
    ColumnElement,
    Executable,
    Table,
    and_,
    delete,
    or_,
    select,
    tuple_,
    update,
)

from nekro_agent.errors import FencedError
from storage.repositories.base import Repository, chosen_once
from storage.sql import insert, now, seconds_from_now
from storage.tables import DOWNLOADS, IDEMPOTENT_REQUESTS, LEASES

__all__ = [
    "DOWNLOAD_CLAIMS",
    "NAMED_LEASES",
    "REQUEST_CLAIMS",
    "DownloadRecord",
    "DownloadRepository",
    "Held",
    "Lease",
    "LeaseRepository",
    "LeaseTable",
    "RecordedRequest",
    "Renewal",
    "RequestRepository",
    "is_free",
    "is_held_by",
    "release_values",
    "take_values",
]


#: A held lease: the key of its row and the holder's fencing token.
Held = tuple[str, int]


def is_free(lease_until: ColumnElement[datetime | None]) -> ColumnElement[bool]:
    """SQL: the lease is not held, or it has expired."""
    return or_(lease_until.is_(None), lease_until <= now())


def is_held_by(table: Table, fence: int | BindParameter[int]) -> ColumnElement[bool]:
    """SQL: the lease was neither released nor acquired again since ``fence`` was issued.

    An expired lease stays with its holder until another one acquires it.
    """
    return (table.c.fence == fence) & table.c.lease_until.is_not(None)


def take_values(
    table: Table, *, owner: str | BindParameter[str], lease_seconds: float | BindParameter[float]
) -> dict[str, Any]:
    """SQL values of an acquisition."""
    return {"owner": owner, "lease_until": seconds_from_now(lease_seconds), "fence": table.c.fence + 1}


def release_values() -> dict[str, Any]:
    """SQL values of a release."""
    return {"owner": None, "lease_until": None}


@dataclass(frozen=True, kw_only=True, eq=False)
class LeaseTable:
    """A table whose rows are held by lease."""

    #: Primary key, and fencing token of the row's newest holder.
    key: Column[Any]
    fence: Column[int]
    #: True while the newest holder's lease is neither released nor ended.
    is_live: ColumnElement[bool]
    #: Converts the key that holders use to the primary key.
    key_of: Callable[[str], Any] = str


@dataclass(frozen=True, kw_only=True)
class Renewal:
    """The result of renewing several leases; those in neither set are locked by another transaction."""

    kept: set[Held]
    #: Released, ended or acquired by another holder.
    lost: set[Held]


@dataclass(frozen=True, kw_only=True)
class Lease:
    """A named lease; ``owner`` and ``lease_until`` are None when it was released."""

    name: str
    owner: str | None
    lease_until: datetime | None
    fence: int


NAMED_LEASES: Final = LeaseTable(
    key=LEASES.c.name, fence=LEASES.c.fence, is_live=LEASES.c.lease_until.is_not(None)
)


class LeaseRepository(Repository):
    """Leases by name (for the sweep, pinned plugins and initialisations), and renewals in every table."""

    async def renew(
        self, table: LeaseTable, held: Collection[Held], *, lease_seconds: float, waits: bool = True
    ) -> Renewal:
        """Renew leases from now on, in one statement; call it in ``Database.autocommit``.

        Args:
            waits: wait for rows that other transactions have locked. Otherwise such a row delays only its
                own lease, even if the process that locked it hangs.
        """
        of_key = {table.key_of(name): name for name, _ in held}
        pairs = [(table.key_of(name), fence) for name, fence in held]
        is_held = and_(tuple_(table.key, table.fence).in_(pairs), table.is_live)
        chosen = select(table.key).where(is_held).with_for_update(key_share=True, skip_locked=not waits)
        statement = (
            update(table.key.table)
            .where(table.key.in_(chosen_once(chosen)))
            .values(lease_until=seconds_from_now(lease_seconds))
            .returning(table.key, table.fence)
        )
        kept = await self._held(statement, of_key)
        if len(kept) == len(pairs):
            return Renewal(kept=kept, lost=set())
        locked = await self._held(select(table.key, table.fence).where(is_held), of_key)
        return Renewal(kept=kept, lost=set(held) - kept - locked)

    async def acquire(self, name: str, *, owner: str, lease_seconds: float) -> int | None:
        """Acquire a free lease; returns its fencing token, None when the lease is held.

        A second attempt by the holder returns None too: it is another task of the same owner.
        """
        new = insert(self._dialect, LEASES).values(
            name=name, owner=owner, lease_until=seconds_from_now(lease_seconds), fence=1
        )
        statement = new.on_conflict_do_update(
            index_elements=[LEASES.c.name],
            set_=take_values(LEASES, owner=owner, lease_seconds=lease_seconds),
            where=is_free(LEASES.c.lease_until),
        ).returning(LEASES.c.fence)
        fence: int | None = await self._scalar(statement)
        return fence

    async def release(self, name: str, *, fence: int) -> bool:
        """Release a lease; False when another holder has it."""
        statement = (
            update(LEASES).where(LEASES.c.name == name, is_held_by(LEASES, fence)).values(**release_values())
        )
        return await self._count(statement) > 0

    async def hold(self, name: str, *, fence: int) -> None:
        """Lock a lease's row, as its holder, until this transaction ends.

        Raises:
            FencedError: the lease was released or passed to another holder.
        """
        statement = select(LEASES.c.name).where(LEASES.c.name == name, is_held_by(LEASES, fence))
        if await self._scalar(statement.with_for_update(key_share=True)) is None:
            raise FencedError(f"the lease {name!r} has passed to another holder")

    async def held(self, *, prefix: str, limit: int) -> list[Lease]:
        """List the held leases whose names begin with ``prefix``, ordered by name."""
        statement = (
            select(LEASES)
            .where(LEASES.c.name.startswith(prefix, autoescape=True), ~is_free(LEASES.c.lease_until))
            .order_by(LEASES.c.name)
            .limit(limit)
        )
        return await self._all(Lease, statement)

    async def _held(self, statement: Executable, of_key: Mapping[Any, str]) -> set[Held]:
        return {(of_key[row[0]], row[1]) for row in await self._connection.execute(statement)}


#: Running requests; holders name them by their digest in hexadecimal.
REQUEST_CLAIMS: Final = LeaseTable(
    key=IDEMPOTENT_REQUESTS.c.digest,
    fence=IDEMPOTENT_REQUESTS.c.fence,
    is_live=IDEMPOTENT_REQUESTS.c.status.is_(None) & IDEMPOTENT_REQUESTS.c.lease_until.is_not(None),
    key_of=bytes.fromhex,
)


@dataclass(frozen=True, kw_only=True)
class RecordedRequest:
    """A request that another execution has answered, or is running."""

    body_digest: bytes
    #: The HTTP status; None while it runs.
    status: int | None
    answer: Any


class RequestRepository(Repository):
    """Rows of requests; each method is one transaction of at most three statements."""

    async def begin(self, digest: bytes, *, body_digest: bytes, lease_seconds: float) -> int | None:
        """Claim a request; None if another execution has answered it or runs it (see ``find``).

        Returns the fencing token: 1 for the first execution, more when an execution before it did not end.
        """
        new = insert(self._dialect, IDEMPOTENT_REQUESTS).values(
            digest=digest,
            body_digest=body_digest,
            lease_until=seconds_from_now(lease_seconds),
            fence=1,
            created_at=now(),
        )
        fence = await self._scalar(new.on_conflict_do_nothing().returning(IDEMPOTENT_REQUESTS.c.fence))
        if fence is None:
            died = IDEMPOTENT_REQUESTS.c.status.is_(None) & is_free(IDEMPOTENT_REQUESTS.c.lease_until)
            fence = await self._scalar(
                update(IDEMPOTENT_REQUESTS)
                .where(
                    IDEMPOTENT_REQUESTS.c.digest == digest,
                    IDEMPOTENT_REQUESTS.c.body_digest == body_digest,
                    died,
                )
                .values(lease_until=seconds_from_now(lease_seconds), fence=IDEMPOTENT_REQUESTS.c.fence + 1)
                .returning(IDEMPOTENT_REQUESTS.c.fence)
            )
        return None if fence is None else int(fence)

    async def find(self, digest: bytes) -> RecordedRequest | None:
        """Return a request, or None."""
        return await self._one_or_none(
            RecordedRequest, select(IDEMPOTENT_REQUESTS).where(IDEMPOTENT_REQUESTS.c.digest == digest)
        )

    async def finish(self, digest: bytes, *, fence: int, status: int, answer: Any) -> bool:
        """Store the answer; False when another execution has taken the request."""
        statement = update(IDEMPOTENT_REQUESTS).where(_is_own(digest, fence))
        return await self._count(statement.values(status=status, answer=answer, lease_until=None)) > 0

    async def abandon(self, digest: bytes, *, fence: int) -> None:
        """End the execution of a request that may have had its effect; the next one is a repetition."""
        await self._count(update(IDEMPOTENT_REQUESTS).where(_is_own(digest, fence)).values(lease_until=None))

    async def forget(self, digest: bytes, *, fence: int) -> None:
        """Delete a request that had no effect, so that a repetition runs it again."""
        await self._count(delete(IDEMPOTENT_REQUESTS).where(_is_own(digest, fence)))


def _is_own(digest: bytes, fence: int) -> ColumnElement[bool]:
    return (
        (IDEMPOTENT_REQUESTS.c.digest == digest)
        & (IDEMPOTENT_REQUESTS.c.fence == fence)
        & IDEMPOTENT_REQUESTS.c.status.is_(None)
    )


@dataclass(frozen=True, kw_only=True)
class DownloadRecord:
    """The newest download to a target."""

    #: Path of the file; relative if it is below the data directory.
    target: str
    #: The parameters that determine the outcome; see ``nekro_agent.ports.DownloadStatus``.
    request: str
    fence: int
    owner: str | None
    lease_until: datetime | None
    done_bytes: int
    whole_bytes: int | None
    #: How it ended; None while it runs and when its worker died or abandoned it.
    report: dict[str, Any] | None
    updated_at: datetime


class DownloadRepository(Repository):
    """Rows of downloads, one per target."""

    async def find(self, target: str) -> DownloadRecord | None:
        """Return the newest download to a target, or None."""
        statement = select(DOWNLOADS).where(DOWNLOADS.c.digest == _digest(target))
        return await self._one_or_none(DownloadRecord, statement)

    async def claim(
        self, target: str, *, request: str, owner: str, lease_seconds: float
    ) -> tuple[int, DownloadRecord | None] | None:
        """Claim a target; None when its lease is held. Must run in a transaction.

        Returns the fencing token and the previous download, if any.
        """
        locked = select(DOWNLOADS).where(DOWNLOADS.c.digest == _digest(target)).with_for_update()
        previous = await self._one_or_none(DownloadRecord, locked)
        new = insert(self._dialect, DOWNLOADS).values(
            digest=_digest(target),
            target=target,
            request=request,
            owner=owner,
            lease_until=seconds_from_now(lease_seconds),
            fence=1,
            done_bytes=0,
            updated_at=now(),
        )
        values = take_values(DOWNLOADS, owner=owner, lease_seconds=lease_seconds)
        statement = new.on_conflict_do_update(
            index_elements=[DOWNLOADS.c.digest],
            set_={**values, "request": request, "report": None, "updated_at": now()},
            where=is_free(DOWNLOADS.c.lease_until),
        ).returning(DOWNLOADS.c.fence)
        fence = await self._scalar(statement)
        return None if fence is None else (fence, previous)

    async def progress(self, target: str, *, fence: int, done_bytes: int, whole_bytes: int | None) -> None:
        """Record the progress of a download.

        Raises:
            FencedError: another holder has the claim.
        """
        values = {"done_bytes": done_bytes, "whole_bytes": whole_bytes, "updated_at": now()}
        await self._write(target, fence, values)

    async def hold(self, target: str, *, fence: int) -> None:
        """Keep the claim until the transaction ends.

        Raises:
            FencedError: another holder has the claim.
        """
        await self._write(target, fence, {"updated_at": now()})

    async def end(self, target: str, *, fence: int, report: dict[str, Any] | None) -> None:
        """Release a claim and record the outcome; a report of None means that the download can be resumed.

        Raises:
            FencedError: another holder has the claim.
        """
        await self._write(
            target, fence, {"report": report, "owner": None, "lease_until": None, "updated_at": now()}
        )

    async def idle(self, *, idle_seconds: float, limit: int) -> list[DownloadRecord]:
        """List downloads that have been inactive for ``idle_seconds``, oldest first."""
        statement = (
            select(DOWNLOADS)
            .where(is_free(DOWNLOADS.c.lease_until), DOWNLOADS.c.updated_at < seconds_from_now(-idle_seconds))
            .order_by(DOWNLOADS.c.updated_at)
            .limit(limit)
        )
        return await self._all(DownloadRecord, statement)

    async def forget(self, record: DownloadRecord) -> bool:
        """Delete a row, unless the target was claimed meanwhile; returns whether it was deleted."""
        statement = delete(DOWNLOADS).where(
            DOWNLOADS.c.digest == _digest(record.target),
            DOWNLOADS.c.fence == record.fence,
            is_free(DOWNLOADS.c.lease_until),
        )
        return await self._count(statement) > 0

    async def _write(self, target: str, fence: int, values: dict[str, Any]) -> None:
        statement = (
            update(DOWNLOADS)
            .where(DOWNLOADS.c.digest == _digest(target), is_held_by(DOWNLOADS, fence))
            .values(**values)
        )
        if await self._count(statement) == 0:
            raise FencedError(f"the download to {target!r} passed to another worker")


def _digest(target: str) -> bytes:
    """Return the key of a target; a path itself may be too long for an index entry."""
    return hashlib.sha256(target.encode("utf-8", "surrogateescape")).digest()


DOWNLOAD_CLAIMS: Final = LeaseTable(
    key=DOWNLOADS.c.digest,
    fence=DOWNLOADS.c.fence,
    is_live=DOWNLOADS.c.lease_until.is_not(None),
    key_of=_digest,
)
