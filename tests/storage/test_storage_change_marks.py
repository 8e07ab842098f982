"""Fingerprints of lists: what happens between two readings of one is seen, however short it lasted."""

from __future__ import annotations

from datetime import timedelta

from sqlalchemy import update

from nekro_agent.methods import SandboxMethodType
from nekro_agent.shared_clock import shared_time
from storage.accounts.approvals import Decision, NewApproval
from storage.engine import Database
from storage.repositories.calls import CallRequest
from storage.states import ApprovalScope, ApprovalState
from storage.tables import APPROVALS


async def test_an_approved_call_that_begins_and_ends_between_two_readings_changes_the_mark(
    database: Database,
) -> None:
    soon = shared_time() + timedelta(days=1)
    call = CallRequest(id="c1", method="a.m.f", type=SandboxMethodType.BEHAVIOR, chat_key="chat")
    asked = NewApproval(
        id="a1", call_id="c1", chat_key="chat", turn_id=None, round_id=None, root_turn_id=None, user_id=None,
        method="a.m.f", lane="methods", arguments="[[],{}]", digest="d", expires_at=soon,
    )  # fmt: skip
    async with database.begin() as tx:
        await tx.chats.ensure("chat")
        await tx.approvals.add(asked)
        await tx.awaiting_calls.add(call)
        before = await tx.change_listing.approvals()
    decision = Decision(state=ApprovalState.APPROVED, decided_by="shell:root", scope=ApprovalScope.ONCE)
    async with database.begin() as tx:
        assert await tx.approvals.decide("a1", decision, digest="d")
        assert await tx.awaiting_calls.release("c1", invocation={}, deadline=soon)
        decided = await tx.change_listing.approvals()
    async with database.autocommit() as tx:
        claim = await tx.calls.claim(call, worker="w", lease_seconds=60)
    async with database.begin() as tx:
        await tx.calls.finish("c1", fence=claim.fence, outcome=None)
        ended = await tx.change_listing.approvals()
        # Age alone changes nothing: an idle page would read its list again.
        await tx.connection.execute(update(APPROVALS).values(decided_at=shared_time() - timedelta(days=1)))
        later = await tx.change_listing.approvals()
    assert before == {}
    assert before != decided != ended != before
    assert later == ended
