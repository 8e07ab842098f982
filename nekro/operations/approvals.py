"""Calls that wait for approval, and decisions on them."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Annotated, Literal

from nekro.app.approvals.shown import call_line, difference, plain_arguments, shown_call
from nekro.operations.actor import Actor, Identity, Scope
from nekro.operations.pages import Cursor, Limit, OfChat, Param, number_of, page_of
from nekro_agent.errors import InvalidValueError, NotFoundError
from nekro_client.models import Approval, DecisionBody, Page, Run, TurnError
from storage.accounts.approvals import Approval as ApprovalRow
from storage.repositories.calls import Call
from storage.states import ApprovalScope, ApprovalState

__all__ = [
    "approval_answer",
    "approval_of_call",
    "approvals_of_run",
    "decide_approval",
    "get_approval",
    "list_approvals",
    "revoke_approval",
]

State = Literal["pending", "approved", "denied", "expired", "cancelled"]


async def list_approvals(
    actor: Actor,
    chat_key: OfChat = None,
    state: Annotated[State | None, Param(description="only in this state")] = None,
    beginning: Annotated[
        str,
        Param(
            alias="id",
            max_length=200,
            description="only the one of this number, else those whose ids begin with this text, which has at"
            " least 4 characters",
        ),
    ] = "",
    limit: Limit = 50,
    cursor: Cursor = None,
) -> Page[Approval]:
    """List requests for approval, the newest first, each call on one line; one request has it exactly."""
    actor.identity.require_list(_reading(actor.identity), chat_key=chat_key)
    async with actor.services.database.read() as transaction:
        rows = await transaction.approvals.newest(
            limit=limit + 1,
            chat_key=chat_key,
            state=None if state is None else ApprovalState(state),
            name=beginning or None,
            before=None if cursor is None else number_of(cursor),
        )
    # On a thread: the arguments of each are text of others, and may be 64 KiB of it.
    return await asyncio.to_thread(
        page_of,
        rows,
        limit=limit,
        answer=partial(approval_answer, in_full=False),
        position=lambda row: row.sequence,
    )


async def get_approval(actor: Actor, approval_id: str) -> Approval:
    """Show a request for approval: the call exactly as it would run, and what became of it."""
    return await _answer(actor, await _found(actor, approval_id, _reading(actor.identity)))


async def approval_of_call(actor: Actor, call_id: str) -> Approval | None:
    """Return the request for approval of a call, on one line; None if there is none that the key may read."""
    actor.identity.require(_reading(actor.identity))
    async with actor.services.database.read() as transaction:
        row = await transaction.approvals.of_call(call_id)
    if row is None or not actor.identity.has_chat(row.chat_key):
        return None
    return approval_answer(row, in_full=False)


async def approvals_of_run(actor: Actor, run: Run) -> list[Approval]:
    """List what the calls of a run wait for, for the one who ran it; that needs no right to read."""
    ids = [call.approval_id for call in run.calls if call.approval_id and call.state == "awaiting"]
    if not ids:
        return []
    async with actor.services.database.read() as transaction:
        rows = [await transaction.approvals.get(approval_id) for approval_id in ids]
    return [approval_answer(row, in_full=False) for row in rows]


async def decide_approval(actor: Actor, approval_id: str, body: DecisionBody) -> Approval:
    """Approve or deny a call, once: a second decision is refused, and says who decided before.

    An approved call runs once, and its result goes to the chat. `args` and `kwargs` replace its arguments.
    """
    row = await _found(actor, approval_id, Scope.APPROVE)
    is_edited = body.args is not None or body.kwargs is not None
    if body.decision == "deny" and (is_edited or body.scope != "once"):
        raise InvalidValueError("a call that is denied has neither a scope nor changed arguments")
    decisions, by, once = actor.services.approval_decisions, actor.identity.name, actor.once

    async def work() -> Approval:
        async with actor.services.database.begin() as transaction:
            data = {"decision": body.decision, "scope": body.scope, "is_edited": is_edited}
            await actor.record(transaction, "approval.decide", row.id, data)
        if body.decision == "deny":
            decided = await decisions.deny(
                row.id, by=by, reason=body.reason, is_repetition=once.is_repetition
            )
        else:
            decided = await decisions.approve(
                row.id,
                by=by,
                scope=ApprovalScope(body.scope),
                reason=body.reason,
                arguments=(tuple(body.args or ()), dict(body.kwargs or {})) if is_edited else None,
                is_repetition=once.is_repetition,
            )
        return await _answer(actor, decided)

    return await once.run(Approval, work)


async def revoke_approval(actor: Actor, approval_id: str) -> Approval:
    """End what an approval for a turn or a chat permits; its own call is not affected."""
    row = await _found(actor, approval_id, Scope.APPROVE)

    async def work() -> Approval:
        async with actor.services.database.begin() as transaction:
            await transaction.approvals.revoke(row.chat_key, approval_id=row.id)
            await actor.record(transaction, "approval.revoke", row.id)
        return await _answer(actor, await _found(actor, approval_id, Scope.APPROVE))

    return await actor.once.run(Approval, work)


def _reading(identity: Identity) -> Scope:
    """Return the scope that lets a key read approvals: to decide them, or to read the chat."""
    return Scope.APPROVE if Scope.APPROVE in identity.scopes else Scope.READ


async def _found(actor: Actor, approval_id: str, scope: Scope) -> ApprovalRow:
    actor.identity.require(scope)
    async with actor.services.database.read() as transaction:
        row = await transaction.approvals.get(approval_id)
    if not actor.identity.has_chat(row.chat_key):
        raise NotFoundError(f"there is no approval {approval_id!r}")
    return row


async def _answer(actor: Actor, row: ApprovalRow) -> Approval:
    async with actor.services.database.read() as transaction:
        call = await transaction.calls.find(row.call_id)
    # On a thread: the arguments are text of others, and may be 64 KiB of it, twice if they were edited.
    return await asyncio.to_thread(approval_answer, row, call)


def approval_answer(row: ApprovalRow, call: Call | None = None, *, in_full: bool = True) -> Approval:
    """Return a request for approval.

    Args:
        call: its call; None: unknown.
        in_full: False leaves out the exact arguments, for lists.
    """
    answer = Approval(
        id=row.id,
        number=row.number,
        call_id=row.call_id,
        chat_key=row.chat_key,
        turn_id=row.turn_id,
        round_id=row.round_id,
        user_id=row.user_id,
        method=row.method,
        summary=call_line(row.method, row.running_arguments),
        digest=row.digest,
        requested_at=row.requested_at,
        expires_at=row.expires_at,
        state=row.state.value,
        scope=None if row.scope is None else row.scope.value,
        grant_until=row.grant_until,
        revoked_at=row.revoked_at,
        decided_by=row.decided_by,
        decided_at=row.decided_at,
        reason=row.reason,
        is_edited=row.edited_arguments is not None,
    )
    if not in_full:
        return answer
    return answer.model_copy(
        update={
            "call": shown_call(row.method, row.running_arguments),
            "arguments": plain_arguments(row.running_arguments),
            "difference": difference(row) or None,
            "call_state": None if call is None else call.state.value,
            "call_error": None if call is None else _call_error_of(call),
        }
    )


def _call_error_of(call: Call) -> TurnError | None:
    if call.error_type is None:
        return None
    return TurnError(code=call.error_type, text=call.error_message or "")
