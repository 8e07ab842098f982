"""Jobs for tools and resources: shown, awaited, cancelled."""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from mcp_types import CallToolResult

from nekro.app.approvals.shown import call_line
from nekro.app.composition import Services
from nekro.app.jobs.cancel import cancel_job
from nekro.extensions.mcp.server.callers import Caller
from nekro.extensions.mcp.server.progress import Report
from nekro.extensions.mcp.server.results import data_result
from nekro.gateway.identity import Scope
from nekro.gateway.views import job_answer
from nekro_agent.durations import REFRESH_SECONDS
from nekro_agent.errors import NotFoundError
from nekro_client.models import Job
from storage.access.approvals import Approval
from storage.repositories.jobs import Job as JobRow
from storage.states import ApprovalState

__all__ = ["awaiting", "awaiting_text", "cancel", "find_job", "job_uri", "show", "wait_for"]

_MOST_SHOWN = 20
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
        return (await _seen(services, caller, job_id)).result
    async with services.database.read() as transaction:
        rows = await transaction.jobs.newest(limit=_MOST_SHOWN, chat_key=caller.chat_key)
    jobs = [job_answer(row).model_dump(mode="json") for row in rows]
    return data_result({"jobs": jobs}, "\n".join(map(_line, rows)) or "the chat has no jobs")


async def wait_for(
    services: Services, caller: Caller, job_id: str, seconds: float, *, report: Report | None
) -> CallToolResult:
    """Wait for the end of a job, at most ``seconds``, and return it.

    Args:
        job_id: also of a call that waits for approval, and is a job when a person has permitted it.
    """
    caller.identity.require(Scope.READ)
    loop = asyncio.get_running_loop()
    until = loop.time() + min(max(seconds, 0.0), _MOST_SECONDS)
    reported = -1
    while True:
        seen = await _seen(services, caller, job_id)
        if seen.is_final or loop.time() >= until:
            return seen.result
        if report is not None and seen.percent > reported:
            reported = seen.percent
            await report(reported, 100, seen.message)
        await asyncio.sleep(REFRESH_SECONDS)


async def cancel(services: Services, caller: Caller, job_id: str) -> CallToolResult:
    """Cancel a job, with its audit row."""
    caller.identity.require(Scope.ADMIN)
    row = await _row(services, caller, job_id)
    async with services.database.begin() as transaction:
        await transaction.audit.add(
            "job.cancel", row.id, key_id=caller.identity.key_id, request_id=caller.request_id
        )
    return _result(await cancel_job(services.database, services.publisher, row.id))


class _Seen(NamedTuple):
    """A job, or a call that waits for approval, as it is now."""

    is_final: bool
    percent: int
    message: str
    result: CallToolResult


async def _seen(services: Services, caller: Caller, job_id: str) -> _Seen:
    async with services.database.read() as transaction:
        row = await transaction.jobs.find(job_id)
        approval = await transaction.approvals.of_call(job_id) if row is None else None
    found = row or approval
    if found is None or not caller.identity.has_chat(found.chat_key):
        raise NotFoundError(f"there is no job {job_id!r}")
    if row is not None:
        return _Seen(row.state.is_final, row.percent, row.message or "", _result(row))
    assert approval is not None  # noqa: S101 - found
    is_over = approval.state not in (ApprovalState.PENDING, ApprovalState.APPROVED)
    return _Seen(is_over, 0, "", _result_of_approval(approval))


def _result_of_approval(row: Approval) -> CallToolResult:
    if row.state is ApprovalState.PENDING:
        return awaiting(row)
    state = row.state.value
    text = f"approval of {call_line(row.method, row.arguments)} was {state}" + (
        f": {row.reason}" if row.reason else ""
    )
    return data_result({"job_id": row.call_id, "approval_id": row.id, "state": state}, text)


def awaiting(row: Approval) -> CallToolResult:
    """Return the result of a call that did not run yet, because a person must permit it."""
    data = {
        "job_id": row.call_id,
        "approval_id": row.id,
        "number": row.number,
        "call": call_line(row.method, row.arguments),
        "state": "awaiting",
    }
    return data_result(data, awaiting_text(row))


def awaiting_text(row: Approval) -> str:
    """Say what a call waits for, and how to learn its outcome."""
    return (
        f"{call_line(row.method, row.arguments)} waits until a person approves it (approval {row.number}); "
        f"it did not run. wait_for_job with {row.call_id!r} waits for the decision and the result. Do not "
        "call it again."
    )


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
