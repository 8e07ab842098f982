"""Requests with an idempotency key: one execution at a time."""

from __future__ import annotations

from storage.engine import Database
from storage.repositories.leases import REQUEST_CLAIMS

DIGEST = bytes(32)


async def test_a_late_renewal_does_not_keep_an_abandoned_request(database: Database) -> None:
    async with database.begin() as tx:
        fence = await tx.requests.begin(DIGEST, body_digest=b"body", lease_seconds=60)
        assert fence == 1
        await tx.requests.abandon(DIGEST, fence=fence)
    async with database.autocommit() as tx:
        renewal = await tx.leases.renew(REQUEST_CLAIMS, [(DIGEST.hex(), fence)], lease_seconds=60)
    assert renewal.lost == {(DIGEST.hex(), fence)}
    async with database.begin() as tx:
        assert await tx.requests.begin(DIGEST, body_digest=b"body", lease_seconds=60) == 2
