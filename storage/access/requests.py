"""Requests with an idempotency key: each runs once, and repetitions get its answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import ColumnElement, delete, select, update

from storage.clock import now, seconds_from_now
from storage.repositories.base import Repository
from storage.repositories.leases import LeaseTable, is_free
from storage.tables import IDEMPOTENT_REQUESTS
from storage.upsert import insert

__all__ = ["REQUEST_CLAIMS", "RecordedRequest", "RequestRepository"]

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
