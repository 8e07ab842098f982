"""Jobs for tools and resources: shown, awaited, cancelled."""

from __future__ import annotations

import asyncio

from mcp_types import CallToolResult

from gateway.identity import Scope
from gateway.mcp.callers import Caller
from gateway.mcp.progress import Report
from gateway.mcp.results import data_result
from gateway.views import job_answer
from nekro_agent.errors import NotFoundError
from nekro_client.models import Job
from storage.repositories.jobs import Job as JobRow
from workers.composition import Services
from workers.jobs.cancel import cancel_job

__all__ = ["cancel", "find_job", "job_uri", "show", "wait_for"]

_MOST_SHOWN = 20
#: As often as a person looks; each look is one read by key.
_POLL_SECONDS = 0.5
#: Longest wait: clients give up on a request before it.
_MOST_SECONDS = 600.0


def job_uri(job_id: str) -> str:
    """Return the URI of a job's resource."""
    return f"nekro://jobs/{job_id}"


async def find_job(services: Services, caller: Caller, job_id: str) -> Job:
    """Return a job of a chat that the key may read.

    Raises:
        ProblemError: the key may not read.
        NotFoundError: there is no such job, or it belongs to another chat.
    """
    caller.identity.require(Scope.READ)
    return job_answer(await _row(services, caller, job_id))


async def show(services: Services, caller: Caller, job_id: str | None) -> CallToolResult:
    """Return a job, or the newest ones of the caller's chat if it is None."""
    caller.identity.require(Scope.READ, chat_key=caller.chat_key)
    if job_id is not None:
        return _result(await _row(services, caller, job_id))
    async with services.database.read() as transaction:
        rows = await transaction.jobs.newest(limit=_MOST_SHOWN, chat_key=caller.chat_key)
    jobs = [job_answer(row).model_dump(mode="json") for row in rows]
    return data_result({"jobs": jobs}, "\n".join(map(_line, rows)) or "the chat has no jobs")


async def wait_for(
    services: Services, caller: Caller, job_id: str, seconds: float, *, report: Report | None
) -> CallToolResult:
    """Wait for the end of a job, at most ``seconds``, and return it."""
    caller.identity.require(Scope.READ)
    loop = asyncio.get_running_loop()
    until = loop.time() + min(max(seconds, 0.0), _MOST_SECONDS)
    told = -1
    while True:
        row = await _row(services, caller, job_id)
        if row.state.is_final or loop.time() >= until:
            return _result(row)
        if report is not None and row.percent > told:
            told = row.percent
            await report(told, 100, row.message or "")
        await asyncio.sleep(_POLL_SECONDS)


async def cancel(services: Services, caller: Caller, job_id: str) -> CallToolResult:
    """Cancel a job, with its audit row."""
    caller.identity.require(Scope.ADMIN)
    row = await _row(services, caller, job_id)
    async with services.database.begin() as transaction:
        await transaction.audit.add(
            "job.cancel", row.id, key_id=caller.identity.key_id, request_id=caller.request_id
        )
    return _result(await cancel_job(services.database, services.publisher, row.id))


async def _row(services: Services, caller: Caller, job_id: str) -> JobRow:
    async with services.database.read() as transaction:
        row = await transaction.jobs.find(job_id)
    if row is None or not caller.identity.has_chat(row.chat_key):
        raise NotFoundError(f"there is no job {job_id!r}")
    return row


def _result(row: JobRow) -> CallToolResult:
    return data_result(job_answer(row).model_dump(mode="json"), _line(row))


def _line(row: JobRow) -> str:
    shown = row.message or ("" if row.state.is_final else f"{row.percent} %")
    return f"job {row.id} ({row.type}) is {row.state}" + (f": {shown}" if shown else "")
