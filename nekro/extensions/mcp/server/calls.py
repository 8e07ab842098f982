"""What tools do: calls of methods, runs of code, and jobs, as which long calls continue.

A gateway runs code on rounds workers, as `POST /runs` does.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from mcp_types import CallToolResult

from nekro.extensions.mcp.server.callers import Caller
from nekro.extensions.mcp.server.methods import arguments_of
from nekro.extensions.mcp.server.resources import job_state, job_uri
from nekro.extensions.mcp.server.results import Report, data_result, method_result, reported
from nekro.gateway.streams.hub import EventHub
from nekro.operations import calls, work
from nekro.operations.actor import Scope
from nekro.operations.approvals import approval_of_call, approvals_of_run
from nekro.plugins.entries import MethodEntry
from nekro_agent.durations import REFRESH_SECONDS
from nekro_agent.errors import NotFoundError
from nekro_client.models import Approval, Job, Run, RunBody

__all__ = [
    "CodeRun",
    "call_method",
    "cancel",
    "request_digest",
    "run_code",
    "run_on_workers",
    "show",
    "wait_for",
]


_ID_CHARS = 32


def request_digest(caller: Caller, request_id: str | int | None) -> str | None:
    """Return what names a request of a session on every gateway; None outside of sessions.

    It is for cancelling only. Some clients number every request 1, so it identifies neither the call nor its
    result: each request has a call of its own.
    """
    if caller.session is None or request_id is None:
        return None
    parts = (caller.identity.key_id or "", caller.session, type(request_id).__name__, str(request_id))
    return hashlib.sha256("\0".join(parts).encode("utf-8", "surrogatepass")).hexdigest()[:_ID_CHARS]


async def call_method(
    hub: EventHub,
    caller: Caller,
    entry: MethodEntry,
    given: Mapping[str, Any],
    *,
    call_id: str,
    report: Report | None,
) -> CallToolResult:
    """Call a method, as ``operations.calls.call_or_detach`` does."""
    args, kwargs = arguments_of(entry, given)
    async with reported(hub, caller.chat_key, call_id, report):
        call = await calls.call_or_detach(
            caller.actor,
            entry,
            args,
            kwargs,
            chat_key=caller.chat_key,
            user_id=caller.user_id,
            call_id=call_id,
        )
    if isinstance(call, Approval):
        return _awaiting(call)
    return _continues(entry, call_id) if call.state == "running" else method_result(call)


def _continues(entry: MethodEntry, call_id: str) -> CallToolResult:
    text = (
        f"{entry.name} is still running, as job {call_id}. Wait for it with wait_for_job, or read "
        f"{job_uri(call_id)}; its result will also appear in the chat. Do not call it again."
    )
    return data_result({"job_id": call_id, "state": "running"}, text)


#: Runs code of a caller, without a round for its AGENT result; the second text is the id of the run.
CodeRun: TypeAlias = Callable[[Caller, str, str], Awaitable[Run]]
#: Stop types of code that did what it should.
_ENDS = frozenset({"NORMAL", "AGENT", "MULTIMODAL_AGENT", "MANUAL", "APPROVAL"})


async def run_code(run: CodeRun, caller: Caller, code: str, *, run_id: str) -> CallToolResult:
    """Run code; cancelling the wait stops it.

    Raises:
        RefusedError: the key may not run code.
        The errors of ``run``.
    """
    caller.identity.require(Scope.RUN, chat_key=caller.chat_key)
    ran = await run(caller, code, run_id)
    return _result_of_run(ran, await approvals_of_run(caller.actor, ran))


async def run_on_workers(caller: Caller, code: str, run_id: str) -> Run:
    """Run code on a rounds worker, once per run id.

    Raises:
        RefusedError: no worker is live.
        NekroError: the code did not run.
    """
    # The caller's chat is that of its key or of a header, and has no form.
    body = RunBody.model_construct(code=code, chat_key=caller.chat_key, user_id=caller.user_id)
    return await calls.run_code(caller.actor, body, run_id=run_id)


def _result_of_run(run: Run, waiting: Sequence[Approval]) -> CallToolResult:
    text = run.output if run.error is None else f"{run.output}\n{run.error}".lstrip("\n")
    for approval in waiting:
        text = f"{text}\n[{_awaiting_text(approval)}]".lstrip("\n")
    if run.stop_type != "NORMAL":
        text = f"{text}\n[the run ended with {run.stop_type}]".lstrip("\n")
    return data_result(run.model_dump(mode="json"), text, is_error=run.stop_type not in _ENDS)


_MOST_SHOWN = 20
#: Longest wait: clients give up on a request before it.
_MOST_SECONDS = 600.0


async def show(caller: Caller, job_id: str | None) -> CallToolResult:
    """Return a job, or the newest ones of the caller's chat if it is None."""
    caller.identity.require(Scope.READ, chat_key=caller.chat_key)
    if job_id is not None:
        return (await _seen(caller, job_id)).result
    page = await work.list_jobs(caller.actor, chat_key=caller.chat_key, limit=_MOST_SHOWN)
    found = [job.model_dump(mode="json") for job in page.items]
    return data_result({"jobs": found}, "\n".join(map(_line, page.items)) or "the chat has no jobs")


async def wait_for(caller: Caller, job_id: str, seconds: float, *, report: Report | None) -> CallToolResult:
    """Wait for the end of a job, at most ``seconds``, and return it.

    Args:
        job_id: also of a call that waits for approval, and is a job when a person has permitted it.
    """
    caller.identity.require(Scope.READ)
    loop = asyncio.get_running_loop()
    until = loop.time() + min(max(seconds, 0.0), _MOST_SECONDS)
    shown = -1
    while True:
        seen = await _seen(caller, job_id)
        if seen.is_final or loop.time() >= until:
            return seen.result
        if report is not None and seen.percent > shown:
            shown = seen.percent
            await report(shown, 100, seen.message)
        await asyncio.sleep(REFRESH_SECONDS)


async def cancel(caller: Caller, job_id: str) -> CallToolResult:
    """Cancel a job."""
    return _result_of_job(await work.cancel_job(caller.actor, job_id))


class _Seen(NamedTuple):
    """A job, or a call that waits for approval, as it is now."""

    is_final: bool
    percent: int
    message: str
    result: CallToolResult


async def _seen(caller: Caller, job_id: str) -> _Seen:
    try:
        job = await work.get_job(caller.actor, job_id)
    except NotFoundError:
        approval = await approval_of_call(caller.actor, job_id)
        if approval is None:
            raise
        is_over = approval.state not in ("pending", "approved")
        return _Seen(is_over, 0, "", _result_of_approval(approval))
    return _Seen(job.finished_at is not None, job.percent, job.message, _result_of_job(job))


def _result_of_approval(approval: Approval) -> CallToolResult:
    if approval.state == "pending":
        return _awaiting(approval)
    reason = f": {approval.reason}" if approval.reason else ""
    data = {"job_id": approval.call_id, "approval_id": approval.id, "state": approval.state}
    return data_result(data, f"approval of {approval.summary} was {approval.state}{reason}")


def _awaiting(approval: Approval) -> CallToolResult:
    """Return the result of a call that did not run yet, because a person must permit it."""
    data = {
        "job_id": approval.call_id,
        "approval_id": approval.id,
        "number": approval.number,
        "call": approval.summary,
        "state": "awaiting",
    }
    return data_result(data, _awaiting_text(approval))


def _awaiting_text(approval: Approval) -> str:
    """Say what a call waits for, and how to learn its outcome."""
    return (
        f"{approval.summary} waits until a person approves it (approval {approval.number}); it did not run. "
        f"wait_for_job with {approval.call_id!r} waits for the decision and the result. Do not call it again."
    )


def _result_of_job(job: Job) -> CallToolResult:
    return data_result(job.model_dump(mode="json"), _line(job))


def _line(job: Job) -> str:
    shown = job.message or ("" if job.finished_at is not None else f"{job.percent} %")
    return f"job {job.id} ({job.type}) is {job_state(job)}" + (f": {shown}" if shown else "")
