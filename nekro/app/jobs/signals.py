"""Passes a signal to a job from outside of plugins; a job that waits notices it within a second."""

from __future__ import annotations

from typing import Any

from nekro.app.jobs.data import pack
from storage.engine import Database

__all__ = ["signal_job"]


async def signal_job(database: Database, job_id: str, key: str, data: Any) -> bool:
    """Pass data to a job's ``wait(key)``; stored if there is no wait yet. False when the job has ended.

    Raises:
        ArgumentError: the data are not plain data, or too large.
        NotFoundError: there is no such job.
    """
    packed = pack((data,), {})
    async with database.begin() as transaction:
        job = await transaction.jobs.get(job_id)
        if job.state.is_final:
            return False
        await transaction.job_signals.signal(job_id, key=key, data=packed)
    return True
