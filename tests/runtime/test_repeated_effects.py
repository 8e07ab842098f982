"""What a call writes for people exists once, however often the call runs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from runtime_bench import Bench, RecordingPublisher, shutdown

from broker_config.settings import StoreSettings
from nekro.app.chats.writer import TimerFirings
from nekro_agent import runtime
from nekro_agent.api import recurring_timer, timer
from nekro_agent.api.plugin import NekroPlugin, task
from nekro_agent.api.schemas import AgentCtx
from nekro_agent.execution.current import effect_id, effects_of
from nekro_agent.jobs import AsyncTaskHandle
from nekro_agent.ports import JobState, MessageKind
from nekro_agent.runtime import Runtime
from nekro_agent.services.message.message_service import message_service
from storage.engine import Database
from storage.files.areas import DataAreas
from storage.kv import SqlKeyValueStore
from storage.timer_services import SqlCronJobs, SqlTimers
from workers.jobs.service import SqlJobs
from workers.sdk_runtime import SqlMessages, SqlRecords

Method = Callable[[AgentCtx], Awaitable[object]]


@dataclass
class Calls:
    """Runs methods as calls of a chat, as a worker does with each delivery."""

    database: Database
    ctx: AgentCtx
    recorder: RecordingPublisher
    jobs: SqlJobs

    async def run(self, *methods: Method, call_id: str = "call") -> None:
        """Run each method as another attempt of one call."""
        for method in methods:
            with effects_of(call_id):
                # A task of its own, so that the stack of the call does not contain lines of the test.
                await asyncio.create_task(_run(method, self.ctx))

    async def texts(self) -> list[str]:
        """The texts of the chat's messages, in order."""
        async with self.database.read() as tx:
            return [row.text for row in await tx.messages.newest("chat", limit=100)]


async def _run(method: Method, ctx: AgentCtx) -> None:
    await method(ctx)


@pytest.fixture
async def calls(
    database: Database, jobs: SqlJobs, recorder: RecordingPublisher, tmp_path: Path
) -> AsyncIterator[Calls]:
    services = Runtime(
        data_dir=tmp_path,
        store=SqlKeyValueStore(database, StoreSettings()),
        messages=SqlMessages(database, recorder),
        areas=DataAreas(tmp_path),
        timers=SqlTimers(database),
        cron_jobs=SqlCronJobs(database, on_fire=TimerFirings(recorder).fire),
        jobs=jobs,
        records=SqlRecords(database, recorder),
    )
    with runtime.bound(services):
        yield Calls(database, AgentCtx.for_call(chat_key="chat", call_id="call"), recorder, jobs)


async def test_equal_messages_of_a_call_are_sent_once_each(calls: Calls) -> None:
    async def method(ctx: AgentCtx) -> None:
        for _ in range(3):
            await ctx.send_text("equal")
        await ctx.send_text("equal")

    await calls.run(method, method)
    assert await calls.texts() == ["equal"] * 4
    assert len(calls.recorder.events) == 4, "a message that is not written is not announced"


async def test_a_repeated_call_sends_what_the_first_attempt_did_not_reach(calls: Calls) -> None:
    attempts: list[None] = []

    async def method(ctx: AgentCtx) -> None:
        attempts.append(None)
        for number in range(len(attempts)):
            await ctx.send_text(f"part {number}")
        if len(attempts) == 3:
            await ctx.send_text("end")

    await calls.run(method, method, method)
    assert await calls.texts() == ["part 0", "part 1", "part 2", "end"]


async def test_a_text_that_changes_with_each_attempt_is_sent_once(calls: Calls) -> None:
    async def method(ctx: AgentCtx) -> None:
        await ctx.send_text(f"at {time.monotonic_ns()}")

    await calls.run(method, method)
    assert len(await calls.texts()) == 1


async def test_a_repeated_call_that_takes_another_way_sends_its_message(calls: Calls) -> None:
    """The second attempt finds a file that the first one downloaded."""
    downloaded: list[None] = []

    async def method(ctx: AgentCtx) -> None:
        if not downloaded:
            await ctx.send_text("downloading")
            downloaded.append(None)
            return
        await ctx.send_text("here it is")

    await calls.run(method, method)
    assert await calls.texts() == ["downloading", "here it is"]


async def test_lines_that_share_a_function_of_the_plugin_are_different_effects(calls: Calls) -> None:
    async def say(ctx: AgentCtx, text: str) -> None:
        await ctx.send_text(text)

    async def first(ctx: AgentCtx) -> None:
        await say(ctx, "first")

    async def other(ctx: AgentCtx) -> None:
        await say(ctx, "other")

    await calls.run(first, other, first, other)
    assert await calls.texts() == ["first", "other"]


async def test_concurrent_attempts_and_branches_send_each_message_once(calls: Calls) -> None:
    async def method(ctx: AgentCtx) -> None:
        await asyncio.gather(*(ctx.send_text(f"{number}") for number in range(5)))

    await asyncio.gather(*(calls.run(method) for _ in range(3)))
    assert sorted(await calls.texts()) == ["0", "1", "2", "3", "4"]


async def test_another_call_and_code_outside_of_calls_send_again(calls: Calls) -> None:
    async def method(ctx: AgentCtx) -> None:
        await ctx.send_text("hello")

    await calls.run(method, call_id="one")
    await calls.run(method, call_id="two")
    await method(calls.ctx)
    await method(calls.ctx)
    assert await calls.texts() == ["hello"] * 4


async def test_a_system_message_wakes_the_agent_once(calls: Calls) -> None:
    async def method(ctx: AgentCtx) -> None:
        await ctx.push_system("loud", trigger_agent=True)
        await message_service.schedule_agent_task(ctx.chat_key)

    await calls.run(method, method)
    async with calls.database.read() as tx:
        rounds = await tx.rounds.newest("chat", limit=9)
    assert (await calls.texts(), len(rounds)) == (["loud"], 2)


async def test_files_and_records_are_written_once(calls: Calls, tmp_path: Path) -> None:
    async def method(ctx: AgentCtx) -> None:
        path = await ctx.fs.mixed_forward_file(f"{time.monotonic_ns()}".encode(), "report.txt")
        await ctx.send_file(path)
        await message_service.push_bot_message(ctx.chat_key, "said elsewhere")

    await calls.run(method, method)
    async with calls.database.read() as tx:
        rows = await tx.messages.newest("chat", limit=9)
    assert [(row.kind, row.text) for row in rows] == [
        (MessageKind.ASSISTANT, ""),
        (MessageKind.ASSISTANT, "said elsewhere"),
    ]


async def test_timers_are_set_once(calls: Calls) -> None:
    async def method(ctx: AgentCtx) -> None:
        await timer.set_timer(ctx.chat_key, -1, "")
        await timer.set_timer(ctx.chat_key, int(time.time()) + 3600, "tea")
        await timer.set_timer(ctx.chat_key, int(time.time()) + 3600, "tea")
        await timer.set_temp_timer(ctx.chat_key, int(time.time()) + 3600, "look again")
        await recurring_timer.create_cron_job(ctx.chat_key, "0 9 * * *", "morning", "UTC")

    await calls.run(method, method)
    tasks = await timer.get_timers("chat")
    assert sorted(task.event_desc for task in tasks) == ["look again", "tea", "tea"]
    assert [job.event_desc for job in await recurring_timer.list_jobs("chat")] == ["morning"]


async def test_a_timer_that_has_fired_is_not_set_again(calls: Calls) -> None:
    async def method(ctx: AgentCtx) -> None:
        await timer.set_timer(ctx.chat_key, int(time.time()) + 3600, "soon")

    await calls.run(method)
    async with calls.database.begin() as tx:
        await tx.connection.exec_driver_sql("UPDATE timers SET fire_at = created_at")
        assert len(await tx.timers.fire_due(limit=9)) == 1
    await calls.run(method)
    assert list(await timer.get_timers("chat")) == []


async def test_a_repeated_call_gets_the_job_that_it_has_started(
    calls: Calls, bench: Bench, plugin: NekroPlugin
) -> None:
    handles: list[AsyncTaskHandle] = []

    @plugin.mount_async_task("work")
    async def work(handle: AsyncTaskHandle) -> None:
        return

    async def method(ctx: AgentCtx) -> None:
        handles.append(await task.start("work", "1", ctx.chat_key, plugin))

    await calls.run(method, method)
    await bench.runner(plugin).run(handles[0].job_id, interruption=shutdown)
    await calls.run(method)
    assert len({handle.job_id for handle in handles}) == 1
    async with calls.database.read() as tx:
        assert [job.state for job in await tx.jobs.newest(limit=9)] == [JobState.SUCCEEDED]
    # Another call starts another one.
    await calls.run(method, call_id="other")
    assert len({handle.job_id for handle in handles}) == 2


async def test_a_repeated_call_that_replaces_a_job_has_a_job(calls: Calls, plugin: NekroPlugin) -> None:
    @plugin.mount_async_task("work")
    async def work(handle: AsyncTaskHandle) -> None:
        return

    async def method(ctx: AgentCtx) -> None:
        await task.cancel("work", "1")
        await task.start("work", "1", ctx.chat_key, plugin)

    await calls.run(method, method)
    async with calls.database.read() as tx:
        states = [job.state for job in await tx.jobs.newest(limit=9)]
    assert sorted(states) == [JobState.CANCELLED, JobState.QUEUED]


def test_an_id_of_a_call_has_the_form_of_other_ids() -> None:
    def ids() -> list[Any]:
        with effects_of("call"):
            return [effect_id("kind", "a\udc80") for _ in range(2)]

    first = ids()
    assert len({*first, effect_id("kind")}) == 3
    assert all(len(each) == 32 and int(each, 16) >= 0 for each in first)


def functions_in(module: str) -> list[Callable[[], str]]:
    """Return two functions of a module, each of which causes an effect."""
    namespace: dict[str, Any] = {"__name__": module, "effect_id": effect_id}
    exec("def one(): return effect_id('kind')\ndef other(): return effect_id('kind')", namespace)
    return [namespace["one"], namespace["other"]]


def test_a_repetition_that_skips_a_line_gives_the_next_one_its_former_id() -> None:
    cause, _ = functions_in("nekro.app.sample")  # its frames are no lines of the plugin

    def attempt(*, both: bool) -> list[str]:
        with effects_of("call"):
            skipped = [cause()] if both else []
            return [*skipped, cause()]

    (first, second), repeated = [attempt(both=both) for both in (True, False)]
    assert first != second
    assert repeated == [second]


def test_the_lines_of_the_plugin_of_mcp_tools_count() -> None:
    one, other = functions_in("nekro.extensions.mcp.sample")

    def attempt(*functions: Callable[[], str]) -> list[str]:
        with effects_of("call"):
            return [function() for function in functions]

    assert attempt(other) == attempt(one, other)[1:]
