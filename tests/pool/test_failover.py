"""Sentinel promotes a replica that lacks the last calls: they are published again."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pytest
from sentinel_group import SentinelGroup
from worker_process import WorkerProcess, read_ledger

from broker_config.app import create_app
from broker_config.settings import Settings
from nekro.broker.calls import MethodCaller
from nekro.wire.invocation import Invocation, new_id
from nekro_agent.methods import Lane

pytestmark = pytest.mark.extended


@pytest.fixture
def settings(make_settings: Callable[..., Settings], sentinel_group: SentinelGroup) -> Settings:
    """Settings that name the Sentinels."""
    return make_settings(broker=sentinel_group.settings())


def invocation() -> Invocation:
    """A call of a TOOL method that records its execution."""
    now = datetime.now(UTC)
    return Invocation(
        call_id=new_id(), method="m.wait", chat_key="c", container_key="k",
        issued_at=now, deadline=now + timedelta(seconds=55), args="0",
    )  # fmt: skip


@pytest.mark.timeout(150)
async def test_calls_missing_on_a_promoted_replica_are_published_again(
    settings: Settings, sentinel_group: SentinelGroup, start_worker: Callable[..., WorkerProcess]
) -> None:
    worker = start_worker("asyncio")
    lost = [invocation() for _ in range(5)]
    app = create_app(settings)
    async with MethodCaller(app, settings) as caller:
        await caller.call(invocation(), lane=Lane.METHODS)
        worker.send(signal.SIGSTOP)
        old = await asyncio.to_thread(sentinel_group.cut_off)
        tasks = [asyncio.create_task(caller.call(call, lane=Lane.METHODS)) for call in lost]
        while sum(pending.place is not None for pending in caller._pending.values()) < len(lost):
            failed = [task.exception() for task in tasks if task.done()]
            assert not failed, failed
            await asyncio.sleep(0.01)
        old.kill()
        await asyncio.to_thread(sentinel_group.wait_for_failover, old)
        worker.send(signal.SIGCONT)
        answers = await asyncio.gather(*tasks)
        assert (await caller.call(invocation(), lane=Lane.METHODS)).call_id
    app.backend.client.close()
    app.close()
    assert {answer.call_id for answer in answers} == {call.call_id for call in lost}
    runs = Counter(task_id for task_id, what, *_ in read_ledger(settings) if what == "started")
    # The one that the stopped worker had been handed directly may run twice: a TOOL call.
    assert sorted(runs[call.call_id] for call in lost) in ([1] * 5, [1] * 4 + [2])
