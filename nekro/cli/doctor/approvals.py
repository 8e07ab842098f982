"""The check of calls that wait for approval."""

from __future__ import annotations

import contextlib

from broker_config.settings import Settings
from nekro.cli.doctor.check import Check, Verdict
from nekro_agent.errors import StorageError
from storage.driver.urls import exists

__all__ = ["approval_checks"]


async def approval_checks(settings: Settings) -> list[Check]:
    """Check whether calls wait for so long that they will expire soon; none without a database."""
    if not exists(settings.database, settings.data_dir):
        return []
    with contextlib.suppress(StorageError):  # the database has a check of its own
        return [await _pending(settings)]
    return []


async def _pending(settings: Settings) -> Check:
    from storage.engine import Database
    from storage.listings.overview import OverviewRepository

    async with Database(settings.database, settings.data_dir) as database, database.read() as transaction:
        work = await OverviewRepository(transaction.connection).approvals()
    if not work.waiting:
        return Check(name="approvals", verdict=Verdict.OK, detail="no call waits")
    is_old = work.oldest_seconds > settings.approval.pending_seconds / 2
    return Check(
        name="approvals",
        verdict=Verdict.WARNING if is_old else Verdict.OK,
        detail=f"{work.waiting} calls wait, the oldest for {work.oldest_seconds:.0f} s of "
        f"{settings.approval.pending_seconds:.0f} s",
        fix="decide on them with `nekro approvals` before they expire" if is_old else "",
    )
