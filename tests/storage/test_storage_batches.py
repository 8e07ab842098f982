"""A statement with a row limit takes no more rows, whatever plan the database chooses."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sized
from datetime import UTC, datetime, timedelta

import pytest

from nekro_agent.methods import SandboxMethodType
from storage.engine import Database
from storage.repositories.calls import CallRequest
from storage.repositories.jobs import NewJob
from storage.states import CrashPolicy
from storage.timer_services import Firing, fire_due
from storage.transaction import Transaction

PAST = datetime(2020, 1, 1, tzinfo=UTC)
FUTURE = datetime.now(UTC) + timedelta(days=1)
ROWS, LIMIT = 4, 2

RunOut = Callable[[], Awaitable[None]]

#: Each takes rows of those that ``_fill`` adds.
STATEMENTS: dict[str, Callable[[Transaction], Awaitable[Sized]]] = {
    "timers": lambda tx: tx.timers.fire_due(limit=LIMIT),
    "unclaimed calls": lambda tx: tx.calls.take_unclaimed(waiting_seconds=-1, limit=LIMIT),
    "lost calls": lambda tx: tx.calls.sweep_lost(limit=LIMIT),
    "expired calls": lambda tx: tx.calls.sweep_expired(limit=LIMIT),
    "orphaned jobs": lambda tx: tx.jobs.take_orphans(waiting_seconds=-1, limit=LIMIT),
    "failed jobs": lambda tx: tx.jobs.fail_orphans(limit=LIMIT),
}

#: Restricts PostgreSQL to nested loops that run their inner side again for each row.
SWITCHED_OFF = ("hashagg", "hashjoin", "mergejoin", "material", "sort", "indexscan", "bitmapscan")


async def _fill(tx: Transaction) -> None:
    """Add as many rows of each kind as ``ROWS`` says."""
    for number in range(ROWS):
        chat = f"chat{number}"
        await tx.chats.ensure(chat)
        await tx.timers.add(chat, fire_at=PAST, description="due")

        def call(kind: str, *, deadline: datetime, chat: str = chat) -> CallRequest:
            return CallRequest(
                id=f"{kind}.{chat}", method="a.b.m", type=SandboxMethodType.AGENT, chat_key=chat,
                deadline=deadline, invocation={"invocation": {}},
            )  # fmt: skip

        await tx.calls.enqueue(call("unclaimed", deadline=FUTURE))
        await tx.calls.enqueue(call("expired", deadline=PAST))
        await tx.calls.claim(call("lost", deadline=FUTURE), worker="dead", lease_seconds=60)
        await tx.jobs.add(NewJob(type="t", task_id=f"queued{number}", plugin_key="a.b", chat_key=chat))
        orphan = await tx.jobs.add(
            NewJob(
                type="t", task_id=f"lost{number}", plugin_key="a.b", chat_key=chat, on_crash=CrashPolicy.FAIL
            )
        )
        await tx.jobs.claim(orphan.id, worker="dead", lease_seconds=60)


@pytest.mark.parametrize("name", STATEMENTS)
async def test_statement_takes_no_more_rows_than_its_limit(
    database: Database, let_leases_run_out: RunOut, name: str
) -> None:
    async with database.begin() as tx:
        await _fill(tx)
    await let_leases_run_out()
    async with database.begin() as tx:
        if not database.is_sqlite:
            for switch in SWITCHED_OFF:
                await tx.connection.exec_driver_sql(f"SET LOCAL enable_{switch} = off")
        assert len(await STATEMENTS[name](tx)) == LIMIT


async def test_no_firing_is_lost_when_the_statistics_estimate_one_timer(database: Database) -> None:
    async with database.begin() as tx:
        await tx.chats.ensure("chat")
        await tx.timers.add("chat", fire_at=PAST, description="0")
        await tx.connection.exec_driver_sql("ANALYZE timers")
        for number in range(1, 6):
            await tx.timers.add("chat", fire_at=PAST, description=f"{number}")
    fired: list[str] = []

    async def on_fire(_tx: Transaction, firing: Firing) -> None:
        fired.append(firing.text)

    counts = [
        await fire_due(database, on_fire=on_fire, next_fire_at=lambda _job: None, limit=3) for _ in range(3)
    ]
    assert (counts, sorted(fired)) == ([3, 3, 0], [f"{number}" for number in range(6)])
