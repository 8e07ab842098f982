"""Old ended rows are deleted; all other rows are kept."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from broker_config.settings import RetentionSettings
from nekro.extensions.webhooks.rows import WebhookRows
from nekro_agent.methods import SandboxMethodType
from nekro_agent.ports import MessageKind
from nekro_agent.shared_clock import shared_time
from storage.accounts.approvals import Decision, NewApproval
from storage.accounts.spendings import NewSpending
from storage.engine import Database
from storage.repositories.calls import CallRequest
from storage.repositories.events import NewEvent
from storage.repositories.jobs import NewJob
from storage.repositories.messages import NewMessage
from storage.repositories.rounds import RoundRequest
from storage.retention import delete_expired
from storage.states import ApprovalScope, ApprovalState, DeliveryState, JobState, TriggerKind
from storage.transaction import Transaction

PAST = datetime(2020, 1, 1, tzinfo=UTC)
AGES = {
    "calls": ("requested_at", "finished_at"),
    "approvals": ("requested_at", "decided_at"),
    "rounds": ("requested_at", "finished_at"),
    "jobs": ("updated_at", "finished_at"),
    "round_prompts": ("sent_at",),
    "messages": ("created_at",),
    "adapter_sends": ("finished_at",),
    "adapter_clients": ("seen_at",),
    "webhook_deliveries": ("finished_at",),
    "spendings": ("created_at",),
    "spending_totals": ("updated_at",),
}


async def _fill(database: Database, *, prefix: str) -> None:
    """Add an ended and an open row of each kind."""
    async with database.begin() as tx:
        await tx.chats.ensure(prefix)
        for number in range(3):
            request = CallRequest(
                id=f"{prefix}{number}", method="m", type=SandboxMethodType.TOOL, chat_key=prefix
            )
            await tx.calls.claim(request, worker="w", lease_seconds=60)
            await tx.jobs.add(
                NewJob(type="t", task_id=f"{prefix}{number}", plugin_key="p", chat_key=prefix, id=request.id)
            )
            await tx.rounds.request(
                RoundRequest(chat_key=prefix, trigger_kind=TriggerKind.CALL, trigger_id=request.id)
            )
            await tx.timers.add(prefix, fire_at=PAST, description="x")
            await tx.messages.append(NewMessage(chat_key=prefix, kind=MessageKind.USER, text="x"))
        for number in range(2):
            await tx.calls.finish(f"{prefix}{number}", fence=1, outcome=None)
            await tx.jobs.claim(f"{prefix}{number}", worker="w", lease_seconds=60)
            await tx.jobs.finish(f"{prefix}{number}", fence=1, state=JobState.FAILED, message="")
        await _fill_outbound(tx, prefix)
        await _fill_approvals(tx, prefix)
        await tx.spendings.add(NewSpending(id=prefix, day=f"{prefix} day", chat_key=prefix))
        await tx.timers.fire_due(limit=2)
        await tx.rounds.cancel(prefix, reason="x")
        open_, _ = await tx.rounds.request(
            RoundRequest(chat_key=prefix, trigger_kind=TriggerKind.CALL, trigger_id=prefix + "open")
        )
        await tx.prompts.keep(open_.id, "[]")


async def _fill_approvals(tx: Transaction, prefix: str) -> None:
    """Add a denied request, one that still permits calls, and a pending one."""
    soon = shared_time() + timedelta(days=1)
    decided = (
        Decision(state=ApprovalState.DENIED, decided_by="shell:root"),
        Decision(
            state=ApprovalState.APPROVED, decided_by="shell:root", scope=ApprovalScope.CHAT, grant_until=soon
        ),
        None,
    )
    for number, decision in enumerate(decided):
        new = NewApproval(
            id=f"{prefix}{number}", call_id=f"{prefix}{number}", chat_key=prefix, turn_id=None, round_id=None,
            root_turn_id=None, user_id=None, method="m", lane="methods", arguments="[[],{}]", digest="",
            expires_at=soon,
        )  # fmt: skip
        assert await tx.approvals.add(new, decision)


async def _fill_outbound(tx: Transaction, prefix: str) -> None:
    """Add a confirmed and an open request to a connected client and a client that left, and deliveries."""
    for name in ("here", "gone"):
        client_id = f"{prefix}-{name}"
        await tx.adapters.register(client_id, adapter_key="sse", platform="", name="", version="")
        await tx.adapters.subscribe(client_id, [prefix])
    fence = await tx.adapters.connect(f"{prefix}-here", owner="w", lease_seconds=60)
    for number in range(2):
        await tx.adapters.add_message(f"{prefix}{number}", adapter_key="sse", channel_id=prefix)
    await tx.adapters.take_due(f"{prefix}-here", fence, adapter_key="sse", answer_seconds=60, limit=9)
    assert await tx.adapters.confirm(f"{prefix}0", client_id=f"{prefix}-here", answer={})
    webhooks = WebhookRows(tx.connection)
    await webhooks.add(prefix, url="https://example.com", description="", events=["*"], chats="*")
    await tx.events.append(prefix, [NewEvent(type="turn.ended"), NewEvent(type="turn.ended")])
    assert await webhooks.read_on(prefix, prefix, body_of=lambda event: "{}") == 2
    (first, _) = await webhooks.take_due(prefix, lease_seconds=60, limit=9)
    await webhooks.end(first.id, DeliveryState.DEAD, status=None, error="x")


async def test_old_ended_rows_are_deleted_and_open_or_recent_ones_kept(database: Database) -> None:
    await _fill(database, prefix="old")
    async with database.begin() as tx:
        for table, columns in AGES.items():
            for column in columns:
                await tx.connection.exec_driver_sql(
                    f"UPDATE {table} SET {column} = '2020-01-01 00:00:00.000000' WHERE {column} IS NOT NULL"
                )
    await _fill(database, prefix="young")
    keep = RetentionSettings(messages_days=0)
    async with database.begin() as tx:
        paused = (await tx.timers.of_chat("young"))[0]
        assert await tx.timers.set_paused(paused.id, True)
    # The age of a timer is that of its time; four of the six have fired.
    expected = {"calls": 2, "rounds": 3, "jobs": 2, "timers": 4, "chat_events": 0, "round_prompts": 1}
    expected |= {"file_entries": 0}
    expected |= {"approvals": 1, "idempotent_requests": 0, "key_turns": 0, "openai_responses": 0}
    expected |= {"adapter_sends": 1, "adapter_clients": 1, "webhook_deliveries": 1, "turn_variables": 0}
    # Totals of the chat and of the day.
    expected |= {"spendings": 1, "spending_totals": 2, "key_storage": 0}
    assert await delete_expired(database, keep, batch=2) == expected
    assert set((await delete_expired(database, keep)).values()) == {0}
    assert (await delete_expired(database, RetentionSettings(messages_days=1)))["messages"] == 3
    async with database.read() as tx:
        assert (await tx.calls.get("old2")).finished_at is None
        assert len(await tx.messages.newest("young", limit=9)) == 3
        assert [item.trigger_id for item in await tx.rounds.newest("old", limit=9)] == ["oldopen"]
        assert len(await tx.rounds.newest("young", limit=9)) == 4
        assert len(await tx.timers.open_ids("young", after="", limit=9)) == 2


async def test_acts_age_out_only_if_the_settings_say_so(database: Database) -> None:
    async with database.begin() as tx:
        for number in range(5):
            await tx.audit.add("key.create", f"old{number}", key_id=None)
        await tx.connection.exec_driver_sql("UPDATE audit SET at = '2020-01-01 00:00:00.000000'")
        await tx.audit.add("key.revoke", "young", key_id="k")
    assert "audit" not in await delete_expired(database, RetentionSettings())
    async with database.read() as tx:
        assert len(await tx.audit.newest(limit=9)) == 6
    deleted = await delete_expired(database, RetentionSettings(audit_days=1), batch=2)
    assert deleted["audit"] == 5
    async with database.read() as tx:
        assert [act.subject for act in await tx.audit.newest(limit=9)] == ["young"]
