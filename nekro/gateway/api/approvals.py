"""Calls that wait for approval, and decisions on them."""

from __future__ import annotations

import asyncio
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request, Response

from nekro.app.services import Services
from nekro.gateway.dependencies import IdentityDep, PathText, ServicesDep, record_act
from nekro.gateway.idempotency import OnceDep
from nekro.gateway.views import approval_answer
from nekro.gateway.web.bodies import KeyedRoute
from nekro.gateway.web.paging import Cursor, Limit
from nekro.operations.actor import Identity, Scope
from nekro.operations.pages import cursor_of, number_of
from nekro_agent.errors import InvalidValueError, NotFoundError
from nekro_client.models import Approval, DecisionBody, Page
from storage.accounts.approvals import Approval as ApprovalRow
from storage.states import ApprovalScope, ApprovalState

__all__ = ["router"]

router = APIRouter(route_class=KeyedRoute, tags=["approvals"])
OfChat = Annotated[str | None, Query(max_length=1250, description="only of this chat")]
OfState = Annotated[
    Literal["pending", "approved", "denied", "expired", "cancelled"] | None,
    Query(description="only in this state"),
]


@router.get("/approvals")
async def list_approvals(
    services: ServicesDep,
    identity: IdentityDep,
    chat_key: OfChat = None,
    state: OfState = None,
    limit: Limit = 50,
    cursor: Cursor = None,
) -> Page[Approval]:
    """List requests for approval, the newest first, each call on one line; one request has it exactly."""
    identity.require_list(_reading(identity), chat_key=chat_key)
    before = None if cursor is None else number_of(cursor)
    async with services.database.read() as transaction:
        rows = await transaction.approvals.newest(
            limit=limit,
            chat_key=chat_key,
            state=None if state is None else ApprovalState(state),
            before=before,
        )
    more = cursor_of(str(rows[-1].sequence)) if len(rows) == limit else None
    # On a thread: the arguments of each are text of others, and may be 64 KiB of it.
    items = await asyncio.to_thread(lambda: [approval_answer(row, in_full=False) for row in rows])
    return Page(items=items, next_cursor=more)


@router.get("/approvals/{approval_id}")
async def get_approval(approval_id: PathText, services: ServicesDep, identity: IdentityDep) -> Approval:
    """Show a request for approval: the call exactly as it would run, and what became of it."""
    return await _answer(services, await _row(services, identity, approval_id, _reading(identity)))


@router.post("/approvals/{approval_id}/decision", response_model=Approval)
async def decide_approval(
    approval_id: PathText,
    body: DecisionBody,
    request: Request,
    services: ServicesDep,
    identity: IdentityDep,
    once: OnceDep,
) -> Response:
    """Approve or deny a call, once: a second decision is refused, and says who decided before.

    An approved call runs once, and its result goes to the chat. `args` and `kwargs` replace its arguments.
    """
    row = await _row(services, identity, approval_id, Scope.APPROVE)
    is_edited = body.args is not None or body.kwargs is not None
    if body.decision == "deny" and (is_edited or body.scope != "once"):
        raise InvalidValueError("a call that is denied has neither a scope nor changed arguments")
    decisions = services.approval_decisions

    async def work() -> Approval:
        async with services.database.begin() as transaction:
            data = {"decision": body.decision, "scope": body.scope, "is_edited": is_edited}
            await record_act(transaction.audit, request, identity, "approval.decide", row.id, data)
        if body.decision == "deny":
            decided = await decisions.deny(
                row.id, by=identity.name, reason=body.reason, is_repetition=once.is_repetition
            )
        else:
            decided = await decisions.approve(
                row.id,
                by=identity.name,
                scope=ApprovalScope(body.scope),
                reason=body.reason,
                arguments=(tuple(body.args or ()), dict(body.kwargs or {})) if is_edited else None,
                is_repetition=once.is_repetition,
            )
        return await _answer(services, decided)

    return await once.respond(work)


@router.post("/approvals/{approval_id}/revoke", response_model=Approval)
async def revoke_approval(
    approval_id: PathText,
    request: Request,
    services: ServicesDep,
    identity: IdentityDep,
    once: OnceDep,
) -> Response:
    """End what an approval for a turn or a chat permits; its own call is not affected."""
    row = await _row(services, identity, approval_id, Scope.APPROVE)

    async def work() -> Approval:
        async with services.database.begin() as transaction:
            await transaction.approvals.revoke(row.chat_key, approval_id=row.id)
            await record_act(transaction.audit, request, identity, "approval.revoke", row.id)
        return await _answer(services, await _row(services, identity, approval_id, Scope.APPROVE))

    return await once.respond(work)


def _reading(identity: Identity) -> Scope:
    """Return the scope that lets a key read approvals: to decide them, or to read the chat."""
    return Scope.APPROVE if Scope.APPROVE in identity.scopes else Scope.READ


async def _row(services: Services, identity: Identity, approval_id: str, scope: Scope) -> ApprovalRow:
    identity.require(scope)
    async with services.database.read() as transaction:
        row = await transaction.approvals.get(approval_id)
    if not identity.has_chat(row.chat_key):
        raise NotFoundError(f"there is no approval {approval_id!r}")
    return row


async def _answer(services: Services, row: ApprovalRow) -> Approval:
    async with services.database.read() as transaction:
        call = await transaction.calls.find(row.call_id)
    # On a thread: the arguments are text of others, and may be 64 KiB of it, twice if they were edited.
    return await asyncio.to_thread(approval_answer, row, call)
