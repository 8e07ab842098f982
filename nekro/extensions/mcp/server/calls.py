"""Calls of methods and runs of code for tools: their ids, results, and those that continue as jobs.

A gateway runs code on rounds workers, as `POST /runs` does.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from mcp_types import CallToolResult

from nekro.app.calls.dispatch import CallScope
from nekro.app.services import Services
from nekro.broker.tracing.tool_span import tool_span
from nekro.extensions.mcp.server.callers import Caller
from nekro.extensions.mcp.server.methods import arguments_of
from nekro.extensions.mcp.server.resources import awaiting, awaiting_text, job_uri
from nekro.extensions.mcp.server.results import Report, data_result, method_result, reported
from nekro.gateway.streams.hub import EventHub
from nekro.operations import calls
from nekro.operations.actor import Scope
from nekro.operations.admission import begin_paying
from nekro.plugins.entries import MethodEntry
from nekro.plugins.entry_registry import refuse_unfit
from nekro.wire.values import encode_arguments
from nekro_client.models import Run, RunBody

if TYPE_CHECKING:
    from storage.accounts.approvals import Approval

__all__ = [
    "CodeRun",
    "call_method",
    "on_workers",
    "request_digest",
    "run_code",
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
    services: Services,
    hub: EventHub,
    caller: Caller,
    entry: MethodEntry,
    given: Mapping[str, Any],
    *,
    call_id: str,
    report: Report | None,
) -> CallToolResult:
    """Call a method. Cancelling the wait revokes the call.

    A call that requires approval waits for it as a row. A call that takes longer than code waits for one
    (``NEKRO_WORKERS__WAIT_SECONDS``) continues as a job. The result names either. The result of an AGENT
    method requests no round.

    Raises:
        RefusedError: the key may not call methods.
        NekroError: as from ``Dispatcher.invoke_or_detach``.
    """
    caller.identity.require(Scope.CALL, chat_key=caller.chat_key)
    args, kwargs = arguments_of(entry, given)
    refuse_unfit(entry, len(args), kwargs)
    chat = await services.chat(caller.chat_key)
    scope = CallScope(chat=chat, user_id=caller.user_id, wakes_agent=False, account_id=call_id)
    arguments, lane = encode_arguments(args, kwargs), services.dispatcher.lane_of(entry)
    await begin_paying(services, caller.identity, call_id, arguments)
    if entry.requires_approval:
        approval_id = await _admit(services, caller, entry, arguments, scope, call_id=call_id, lane=lane)
        if approval_id is not None:
            async with services.database.read() as transaction:
                return awaiting(await transaction.approvals.get(approval_id))
    with tool_span(entry.task, kind=entry.type.value, call_id=call_id, lane=lane):
        async with reported(hub, caller.chat_key, call_id, report):
            envelope = await services.dispatcher.invoke_or_detach(
                entry, arguments, scope, call_id=call_id, lane=lane
            )
    if envelope is None:
        return _continues(entry, call_id)
    return method_result(envelope, max_bytes=services.settings.sandbox.return_bytes)


async def _admit(
    services: Services,
    caller: Caller,
    entry: MethodEntry,
    arguments: str,
    scope: CallScope,
    *,
    call_id: str,
    lane: str,
) -> str | None:
    """Return None if a call may be sent, else the approval that it waits for; a decision sends it.

    A key with the scope `approve` permits its own calls. Who has no key permits none: a model decides which
    tools its host calls.
    """
    identity, dispatcher = caller.identity, services.dispatcher
    if identity.key_id is None or Scope.APPROVE not in identity.scopes:
        return await dispatcher.admit(entry, arguments, scope, call_id=call_id, lane=lane)
    invocation = dispatcher.awaiting(entry, arguments, scope, call_id=call_id, lane=lane)
    await services.approval_requests.permit(invocation, lane=lane, by=identity.name)
    return None


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


async def run_code(
    services: Services, run: CodeRun, caller: Caller, code: str, *, run_id: str
) -> CallToolResult:
    """Run code; cancelling the wait stops it.

    Raises:
        RefusedError: the key may not run code.
        The errors of ``run``.
    """
    caller.identity.require(Scope.RUN, chat_key=caller.chat_key)
    ran = await run(caller, code, run_id)
    waiting = [call.approval_id for call in ran.calls if call.approval_id and call.state == "awaiting"]
    async with services.database.read() as transaction:
        return _result(ran, [await transaction.approvals.get(one) for one in waiting])


def on_workers(services: Services) -> CodeRun:
    """Return what runs code on rounds workers, once per run id.

    It raises a RefusedError if no worker is live, and a NekroError if the code did not run.
    """

    async def run(caller: Caller, code: str, run_id: str) -> Run:
        # The caller's chat is that of its key or of a header, and has no form.
        body = RunBody.model_construct(code=code, chat_key=caller.chat_key, user_id=caller.user_id)
        return await calls.run_code(caller.actor(services), body, run_id=run_id)

    return run


def _result(run: Run, waiting: Sequence[Approval]) -> CallToolResult:
    text = run.output if run.error is None else f"{run.output}\n{run.error}".lstrip("\n")
    for row in waiting:
        text = f"{text}\n[{awaiting_text(row)}]".lstrip("\n")
    if run.stop_type != "NORMAL":
        text = f"{text}\n[the run ended with {run.stop_type}]".lstrip("\n")
    return data_result(run.model_dump(mode="json"), text, is_error=run.stop_type not in _ENDS)
