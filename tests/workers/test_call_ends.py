"""Ends of calls that no caller waits for any more, and of calls that end in an outage of the database."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cut_proxy import CutProxy
from waiting import eventually

from broker_config.settings import DatabaseSettings, Settings
from nekro.app.calls.detached import CallDetacher
from nekro.wire.invocation import Invocation, Signer, new_id
from nekro.wire.values import encode_arguments
from nekro_agent.errors import CallTimeoutError, MethodFailedError
from storage.repositories.calls import Call
from storage.repositories.rounds import Round
from storage.states import CallState
from workers.calls.claims import DuplicateDelivery
from workers.services import WorkerServices

PLUGIN = '''
import asyncio

from nekro_agent.api.plugin import NekroPlugin, SandboxMethodType
from nekro_agent.api.schemas import AgentCtx

plugin = NekroPlugin("P", "p", "", "1", "tests", "")
begun = asyncio.Event()
on_haul = []


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "weigh")
async def weigh(_ctx: AgentCtx) -> int:
    """Never returns."""
    begun.set()
    await asyncio.Event().wait()


@plugin.mount_sandbox_method(SandboxMethodType.BEHAVIOR, "carry")
async def carry(_ctx: AgentCtx) -> str:
    """Never returns."""
    begun.set()
    await asyncio.Event().wait()


@plugin.mount_sandbox_method(SandboxMethodType.BEHAVIOR, "haul")
async def haul(_ctx: AgentCtx) -> str:
    """Return at once."""
    for act in on_haul:
        act()
    return "hauled"


@plugin.mount_on_system_message()
async def hear(_ctx: AgentCtx, text: str) -> None:
    pass
'''


class Worker:
    """The services of a worker in this process, and the module of its plugin."""

    def __init__(self, services: WorkerServices) -> None:
        self.services = services
        plugin: Any = next(one for one in services.host.plugins if one.key == "tests.p")
        self.module = plugin.sandbox_methods[0].func.__globals__

    async def call(self, made: Invocation) -> Any:
        """Run a call as its delivery does."""
        body = Signer.from_text("test-signing-key").sign(made)
        find = self.services.methods.find
        return await self.services.call_handler.handle(body, task_name=made.method, find=find)

    async def row(self, call_id: str) -> Call:
        async with self.services.database.read() as tx:
            return await tx.calls.get(call_id)

    async def texts(self) -> list[str]:
        async with self.services.database.read() as tx:
            return [message.text for message in await tx.messages.newest("chat", limit=9)]

    async def rounds(self) -> list[Round]:
        async with self.services.database.read() as tx:
            return await tx.rounds.newest("chat", limit=9)


def invocation(name: str, **changes: Any) -> Invocation:
    now = datetime.now(UTC)
    made = Invocation(
        call_id=new_id(), method=f"tests.p.{name}", chat_key="chat", container_key="k", issued_at=now,
        deadline=now + timedelta(seconds=600), args=encode_arguments((), {}),
    )  # fmt: skip
    return made.model_copy(update=changes)


@pytest.fixture(params=["sqlite", "postgres"])
def database(request: pytest.FixtureRequest, migrated_copy: Callable[[str], DatabaseSettings]) -> Any:
    return migrated_copy(request.param)


@pytest.fixture
async def proxy(database: DatabaseSettings) -> AsyncIterator[CutProxy | None]:
    """The proxy in front of PostgreSQL."""
    if not str(database.url).startswith("postgresql"):
        yield None
        return
    proxy = CutProxy(database)
    yield proxy
    proxy.come_back()
    await proxy.stop()


@pytest.fixture
async def worker(
    make_settings: Callable[..., Settings],
    database: DatabaseSettings,
    proxy: CutProxy | None,
    tmp_path: Path,
) -> AsyncIterator[Worker]:
    (tmp_path / "plugins").mkdir()
    (tmp_path / "plugins" / "p.py").write_text(PLUGIN)
    if proxy is not None:
        database = await proxy.start()
    settings = make_settings(
        database=database.model_copy(update={"pool_timeout_seconds": 5}).model_dump(),
        plugins={"dirs": (tmp_path / "plugins",), "load_shipped": False},
    )
    services = WorkerServices.load(settings, role="methods")
    await services.start()
    yield Worker(services)
    if proxy is not None:
        proxy.come_back()
    await services.close()


def delivered_late(made: Invocation) -> Invocation:
    """The same call as a worker receives it after its deadline."""
    return made.model_copy(update={"deadline": datetime.now(UTC) - timedelta(seconds=1)})


async def test_a_delivery_after_the_deadline_gets_what_an_earlier_one_recorded(worker: Worker) -> None:
    made = invocation("haul")
    runs: list[None] = []
    worker.module["on_haul"].append(lambda: runs.append(None))
    answered = await worker.call(made)
    assert await worker.call(delivered_late(made)) == answered
    assert len(runs) == 1


async def test_a_delivery_after_the_deadline_gets_the_failure_that_an_earlier_one_recorded(
    worker: Worker,
) -> None:
    def fail() -> None:
        raise ValueError("of the method")

    made = invocation("haul")
    worker.module["on_haul"].append(fail)
    with pytest.raises(ValueError, match="of the method"):
        await worker.call(made)
    with pytest.raises(MethodFailedError, match="of the method"):
        await worker.call(delivered_late(made))


async def test_a_delivery_after_the_deadline_leaves_the_answer_to_the_one_that_runs(worker: Worker) -> None:
    made = invocation("carry")
    running = asyncio.create_task(worker.call(made))
    await worker.module["begun"].wait()
    with pytest.raises(DuplicateDelivery):
        await worker.call(delivered_late(made))
    running.cancel()
    await asyncio.wait({running})


@pytest.mark.parametrize("name", ["weigh", "haul"], ids=["tool", "claimed"])
async def test_a_first_delivery_after_the_deadline_does_not_start(worker: Worker, name: str) -> None:
    worker.module["on_haul"].append(lambda: pytest.fail("it started"))
    with pytest.raises(CallTimeoutError, match="passed in the queue"):
        await worker.call(delivered_late(invocation(name)))


@pytest.mark.parametrize("name", ["weigh", "carry"], ids=["tool", "claimed"])
async def test_a_detached_call_that_is_stopped_at_its_time_limit_is_reported_as_such(
    worker: Worker, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    services, begun = worker.services, worker.module["begun"]
    made = invocation(name, waits_until=datetime.now(UTC) - timedelta(seconds=60))
    detacher = CallDetacher(services.database, services.publisher)
    await detacher.detach(services.registry.find(made.method), made, lane="methods")
    calling = asyncio.create_task(worker.call(made))
    await begun.wait()
    monkeypatch.setattr("nekro.wire.invocation.shared_now", lambda: time.time() + 601)
    calling.cancel()  # as the pool does
    with pytest.raises(asyncio.CancelledError):
        await calling
    row = await worker.row(made.call_id)
    assert (row.state, row.error_type) == (CallState.FAILED, "CallTimeoutError")
    (text,) = await worker.texts()
    assert text == (
        f"{name} (job {made.call_id}) failed: CallTimeoutError: {made.method}: call {made.call_id} was "
        "stopped at its time limit"
    )
    assert [woken.observation for woken in await worker.rounds()] == [text]


async def test_a_detached_tool_call_that_is_stopped_before_its_time_limit_stays_open(worker: Worker) -> None:
    services, begun = worker.services, worker.module["begun"]
    made = invocation("weigh", waits_until=datetime.now(UTC) - timedelta(seconds=60))
    detacher = CallDetacher(services.database, services.publisher)
    await detacher.detach(services.registry.find(made.method), made, lane="methods")
    calling = asyncio.create_task(worker.call(made))
    await begun.wait()
    calling.cancel()  # as a pool that shuts down: the message is delivered again
    with pytest.raises(asyncio.CancelledError):
        await calling
    assert (await worker.row(made.call_id)).state is CallState.RUNNING
    assert await worker.texts() == []


@pytest.mark.parametrize("database", ["postgres"], indirect=True)
async def test_a_call_that_returns_in_an_outage_is_recorded_without_its_message_hooks(
    worker: Worker, proxy: CutProxy, logged: list[tuple[str, dict[str, Any]]]
) -> None:
    worker.module["on_haul"].append(proxy.go_away)
    made = invocation("haul")
    calling = asyncio.create_task(worker.call(made))
    # What the hooks ask is repeated, so they may end at their time limit instead.
    ends = {"system_message_hooks_failed", "system_message_hooks_too_slow"}
    await eventually(
        lambda: calling.done() or ends & {event for event, _ in logged}, what="the hooks to fail"
    )
    proxy.come_back()
    assert (await calling)["text"] == "hauled"
    assert (await worker.row(made.call_id)).state is CallState.DONE
    assert await worker.texts() == ["hauled"]
