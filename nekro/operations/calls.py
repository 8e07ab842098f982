"""Calls of methods, commands of plugins, and runs of code."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from nekro.app import use_cases
from nekro.app.calls.dispatch import CallScope
from nekro.app.calls.records import value_of
from nekro.app.catalogue import is_command
from nekro.base.plain import to_json_value
from nekro.broker.tracing.tool_span import tool_span
from nekro.operations.actor import Actor, Scope
from nekro.plugins.entry_registry import refuse_unfit
from nekro.wire.values import encode_arguments
from nekro_agent.commands.schemas import CommandExecutionContext
from nekro_agent.commands.schemas import CommandResponse as PluginResponse
from nekro_agent.errors import NotFoundError, UsageError
from nekro_client.models import (
    Approval,
    Call,
    CallBody,
    CommandBody,
    CommandResponse,
    CommandResult,
    Run,
    RunBody,
    TurnError,
)

if TYPE_CHECKING:
    from nekro.app.chats.attachments import FileIds
    from nekro.app.chats.files import ChatFiles
    from nekro.app.rounds.runs import CodeReport
    from nekro.app.services import Services
    from nekro.plugins.entries import MethodEntry
    from nekro.wire.invocation import Envelope
    from storage.accounts.approvals import Approval as ApprovalRow

__all__ = ["call_method", "call_or_detach", "run_answer", "run_code", "run_command"]

_LEVELS_OF_ADMINS: Final = ("advanced", "super_user")


async def call_method(actor: Actor, body: CallBody) -> Call:
    """Call a method and wait for its result; the result of an AGENT method starts no round.

    A call that requires approval waits for it, unless the key has the scope `approve`: the answer is 202 with
    `approval_id`, and the result goes to the chat.
    """
    services, identity = actor.services, actor.identity
    identity.require(Scope.CALL, chat_key=body.chat_key)
    user_id = identity.user_for(body.user_id)
    approver = identity.name if Scope.APPROVE in identity.scopes else None
    method = await services.find_method(body.method)
    # A repetition after a crash is the same call, which has at most one effect.
    call_id = actor.once.id
    given = json.dumps([body.args, body.kwargs])

    async def ask() -> Call:
        await _begin_paying(actor, call_id, given)
        row = await use_cases.ask_approval(
            services,
            body.method,
            tuple(body.args),
            body.kwargs,
            chat_key=body.chat_key,
            user_id=user_id,
            call_id=call_id,
        )
        return _awaiting_call(row, type_=method.type.value)

    async def work() -> Call:
        await _begin_paying(actor, call_id, given)
        envelope = await use_cases.invoke(
            services,
            body.method,
            tuple(body.args),
            body.kwargs,
            chat_key=body.chat_key,
            user_id=user_id,
            timeout_seconds=body.timeout_seconds,
            call_id=call_id,
            approver=approver,
        )
        return _finished_call(services, method, envelope)

    return await actor.once.run(Call, ask if method.requires_approval and approver is None else work)


async def call_or_detach(
    actor: Actor,
    method: MethodEntry,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    chat_key: str,
    user_id: str | None,
    call_id: str,
) -> Call | Approval:
    """Call a method for a model, as code calls one; the result of an AGENT method starts no round.

    A call that takes longer than code waits for one (``NEKRO_WORKERS__WAIT_SECONDS``) is returned as running,
    and continues as a job. A call that requires approval has it if its chat has a standing one, or if the key
    has the scope `approve`; else its request for approval is returned, and a decision sends the call. Who has
    no key permits none: a model decides which tools its host calls. Cancelling the wait revokes the call.

    Raises:
        RefusedError: 403, 404, the key may not; 429, its budget is used up.
        NekroError: as from ``Dispatcher.admit`` and ``Dispatcher.invoke_or_detach``.
    """
    services, identity, dispatcher = actor.services, actor.identity, actor.services.dispatcher
    identity.require(Scope.CALL, chat_key=chat_key)
    refuse_unfit(method, len(args), kwargs)
    scope = CallScope(
        chat=await services.chat(chat_key),
        user_id=identity.user_for(user_id),
        wakes_agent=False,
        account_id=call_id,
    )
    arguments, lane = encode_arguments(tuple(args), dict(kwargs)), dispatcher.lane_of(method)
    await _begin_paying(actor, call_id, arguments)
    if method.requires_approval:
        if identity.key_id is not None and Scope.APPROVE in identity.scopes:
            invocation = dispatcher.awaiting(method, arguments, scope, call_id=call_id, lane=lane)
            await services.approval_requests.permit(invocation, lane=lane, by=identity.name)
        else:
            approval_id = await dispatcher.admit(method, arguments, scope, call_id=call_id, lane=lane)
            if approval_id is not None:
                from nekro.operations.approvals import approval_answer

                async with services.database.read() as transaction:
                    return approval_answer(await transaction.approvals.get(approval_id), in_full=False)
    with tool_span(method.task, kind=method.type.value, call_id=call_id, lane=lane):
        envelope = await dispatcher.invoke_or_detach(method, arguments, scope, call_id=call_id, lane=lane)
    if envelope is None:
        return Call(id=call_id, method=method.task, type=method.type.value, state="running", lane=lane)
    return _finished_call(services, method, envelope)


async def run_code(
    actor: Actor, body: RunBody, *, run_id: str, on_begun: Callable[[], None] = lambda: None
) -> Run:
    """Run code in a sandbox of a rounds worker and wait for its end; cancelling the wait stops it.

    Args:
        run_id: a second run with this id is the same one.
        on_begun: called when nothing refuses the run any more.

    Raises:
        RefusedError: 403, 404, the key may not; 429, its budget is used up; 503, no worker is live.
        NekroError: the code did not run.
    """
    services, identity = actor.services, actor.identity
    identity.require(Scope.RUN, chat_key=body.chat_key)
    if body.follow_up:
        identity.require(Scope.POST, chat_key=body.chat_key)
    user_id = identity.user_for(body.user_id)
    from nekro.operations.admission import require_rounds_worker

    await _begin_paying(actor, run_id, body.code)
    await require_rounds_worker(services)
    chat = await services.chat(body.chat_key)
    on_begun()
    report = await services.remote_runs.run(
        body.code,
        run_id=run_id,
        chat=chat,
        user_id=user_id,
        wakes_agent=body.follow_up,
        timeout_seconds=body.timeout_seconds,
    )
    return run_answer(run_id, report)


async def _begin_paying(actor: Actor, account_id: str, *texts: str) -> None:
    """Call ``begin_paying`` if there is a key; without one, no library of the database is imported."""
    if actor.identity.key_id is not None:
        from nekro.operations.admission import begin_paying

        await begin_paying(actor.services, actor.identity, account_id, *texts)


async def run_command(actor: Actor, body: CommandBody) -> CommandResult:
    """Run a plugin's command, or answer the last one that asked a question in the chat.

    The levels `advanced` and `super_user` need the scope `admin`. A command that fails is a result with the
    status `error`.
    """
    services, identity = actor.services, actor.identity
    identity.require(Scope.CALL, chat_key=body.chat_key)
    if body.level in _LEVELS_OF_ADMINS:
        identity.require(Scope.ADMIN, chat_key=body.chat_key)
    user_id = identity.user_for(body.user_id) or ""
    who = CommandExecutionContext(
        user_id=user_id,
        username=user_id,
        chat_key=body.chat_key,
        is_super_user=body.level == "super_user",
        is_advanced_user=body.level in _LEVELS_OF_ADMINS,
    )
    call_id = actor.once.id

    async def work() -> CommandResult:
        responses = await use_cases.run_command(
            services, body.line, who=who, timeout_seconds=body.timeout_seconds, call_id=call_id
        )
        files = services.files_of(await services.chat(body.chat_key))

        def show() -> list[CommandResponse]:
            return [_shown(services.file_ids, body.chat_key, files, response) for response in responses]

        shown = await asyncio.to_thread(show)
        return CommandResult(status=shown[-1].status, responses=shown)

    # A repetition of a command is the same call. An answer has taken its question from the chat.
    return await actor.once.run(CommandResult, work, is_repeatable=is_command(body.line))


def _shown(ids: FileIds, chat_key: str, files: ChatFiles, response: PluginResponse) -> CommandResponse:
    """Return a response with those of its files that the chat's uploads hold."""
    from nekro.operations.chats import file_info

    shown = response.model_dump(mode="json", exclude={"callback_cmd", "on_timeout_message", "context_data"})
    for part in shown["output_segments"] or ():
        path = part.pop("file_path")
        if path is not None:
            with contextlib.suppress(NotFoundError, UsageError):
                file = files.describe(path, name=part["file_name"])
                part["file"] = file_info(ids, chat_key, file)
    return CommandResponse.model_validate(shown)


def _finished_call(services: Services, method: MethodEntry, envelope: Envelope) -> Call:
    """Return a call that succeeded, with its value as JSON."""
    value = value_of(envelope, max_bytes=services.settings.sandbox.return_bytes)
    lasted = (envelope.finished_at - envelope.started_at).total_seconds() * 1000
    return Call(
        id=envelope.call_id,
        method=method.task,
        type=envelope.type.value,
        state="done",
        worker=envelope.worker,
        started_at=envelope.started_at,
        finished_at=envelope.finished_at,
        duration_ms=round(lasted, 3),
        value=to_json_value(value),
    )


def _call_of_report(call: Mapping[str, Any]) -> Call:
    """Return a call of a run or round from ``nekro.app.rounds.runs.call_json``."""
    code, _, text = (call["error"] or "").partition(": ")
    return Call(
        **{name: call[name] for name in ("id", "method", "type", "lane", "requested_at", "started_at")},
        state=_state_of_report(call),
        worker=call["worker"] or None,
        finished_at=call["finished_at"],
        duration_ms=call["duration_ms"],
        error=TurnError(code=code, text=text) if call["error"] else None,
        follow_up=call["follow_up"],
        approval_id=call.get("approval_id"),
    )


def _state_of_report(call: Mapping[str, Any]) -> str:
    if call["error"]:
        return "failed"
    # A worker of an earlier release does not record it.
    return "awaiting" if call.get("awaits_approval") or call.get("is_waiting") else "done"


def _awaiting_call(row: ApprovalRow, *, type_: str) -> Call:
    """Return a call that waits for approval."""
    return Call(
        id=row.call_id,
        method=row.method,
        type=type_,
        state="awaiting" if row.state.value == "pending" else row.state.value,
        lane=row.lane,
        requested_at=row.requested_at,
        approval_id=row.id,
    )


def run_answer(run_id: str, report: CodeReport) -> Run:
    """Return the report of a run of code."""
    return Run(
        id=run_id,
        stop_type=report.stop_type.name,
        exit_code=int(report.stop_type),
        output=report.output,
        error=report.error,
        calls=[_call_of_report(call) for call in report.calls],
        follow_ups=[follow_up["round_id"] for follow_up in report.follow_ups],
    )
