"""Detached calls, blocking methods that change lane, and the jobs command, on real workers."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from waiting import WAIT_SECONDS, eventually
from worker_fleet import plugin_of

from nekro.app import use_cases
from nekro.app.rounds.runs import CodeReport
from nekro.app.services import Services
from nekro.sandbox.models import StopType
from nekro.wire.values import decode_value
from nekro_agent.ports import JobState
from storage.caller_reads import lane_overrides
from storage.repositories.calls import Call
from storage.repositories.jobs import Job

AUTOGROUPS = Path("/proc/sys/kernel/sched_autogroup_enabled")
SCRIPT = """
- when: '.'
  answer: |
    ```python
    send_msg_text(_ck, "seen")
    ```
"""


@pytest.fixture(scope="module")
def fleet(make_fleet: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    script = tmp_path_factory.mktemp("llm") / "script.yaml"
    script.write_text(SCRIPT)
    system = make_fleet(
        llm={"script": script},
        agent={"lease_seconds": 2},
        workers={"wait_seconds": 8},
    )
    system.start("methods", "long", "rounds", concurrency=4)
    return system


async def run(services: Services, code: str, chat: str) -> CodeReport:
    return await use_cases.run_code(
        services, code, chat_key=chat, user_id="u", follow_up=True, file_name="test.py"
    )


async def let_go(services: Services, name: str) -> None:
    plugin = plugin_of(services, "tests.hauler")
    await plugin.store.set(store_key=f"go {name}", value="1")


async def job_of(services: Services, chat: str) -> Job:
    async with services.database.read() as tx:
        (job,) = await tx.jobs.newest(limit=9, chat_key=chat)
    return job


async def texts(services: Services, chat: str) -> list[str]:
    async with services.database.read() as tx:
        return [message.text for message in await tx.messages.newest(chat, limit=20)]


async def ended(fleet: Any, services: Services, chat: str) -> Call:
    """Wait for the end of the chat's only detached call."""
    job = await job_of(services, chat)

    async def call() -> Call | None:
        async with services.database.read() as tx:
            found = await tx.calls.get(job.id)
        return found if found.finished_at is not None else None

    return await eventually(call, what=fleet.waiting_for("the call to end"))  # type: ignore[no-any-return]


async def rounds_done(fleet: Any, services: Services, chat: str, count: int) -> list[Any]:
    async def done() -> list[Any]:
        async with services.database.read() as tx:
            rounds = await tx.rounds.newest(chat, limit=9)
        return rounds if len(rounds) == count and all(round_.finished_at for round_ in rounds) else []

    return await eventually(done, what=fleet.waiting_for(f"{count} rounds"))  # type: ignore[no-any-return]


async def test_a_behavior_of_lane_long_is_detached_at_once_and_reports_to_the_chat_once(
    fleet: Any, services: Services
) -> None:
    report = await run(services, "print(haul('stones'))", "behavior")
    job = await job_of(services, "behavior")
    assert report.stop_type is StopType.NORMAL
    assert f"haul is still running, as job {job.id}" in report.output
    assert job.type == "haul" and job.state is JobState.RUNNING

    async def shown() -> bool:
        job = await job_of(services, "behavior")
        return (job.percent, job.message) == (40, "hauling")

    await eventually(shown, what=fleet.waiting_for("the progress"))
    assert await texts(services, "behavior") == []
    await let_go(services, "stones")
    await ended(fleet, services, "behavior")
    assert await texts(services, "behavior") == ["hauled stones"]
    async with services.database.read() as tx:
        assert await tx.rounds.newest("behavior", limit=9) == [], "a BEHAVIOR requests no round"

    async def closed() -> bool:
        return (await job_of(services, "behavior")).state is JobState.SUCCEEDED

    await eventually(closed, what=fleet.waiting_for("the job's end"))


@pytest.mark.extended
async def test_a_failure_of_a_detached_behavior_reaches_the_chat_and_wakes_the_agent_once(
    fleet: Any, services: Services
) -> None:
    await run(services, "haul('glass', fails=True)", "failure")
    await let_go(services, "glass")
    call = await ended(fleet, services, "failure")
    rounds = await rounds_done(fleet, services, "failure", 1)
    announced = f"haul (job {call.id}) failed: ValueError: the rope broke"
    assert [round_.observation for round_ in rounds] == [announced]
    assert await texts(services, "failure") == [announced, "seen"]
    assert (await job_of(services, "failure")).state is JobState.FAILED


async def test_an_agent_call_of_lane_long_ends_its_code_and_wakes_the_agent_when_it_ends(
    fleet: Any, services: Services
) -> None:
    report = await run(services, "study('maps')\nprint('not reached')", "agent")
    assert report.stop_type is StopType.AGENT and "not reached" not in report.output
    await let_go(services, "maps")
    rounds = await rounds_done(fleet, services, "agent", 1)
    assert [round_.observation for round_ in rounds] == ["studied maps"]
    assert await texts(services, "agent") == ["studied maps", "seen"]


@pytest.mark.extended
async def test_a_tool_that_runs_longer_than_its_caller_waits_is_detached_and_its_value_sent_later(
    fleet: Any, services: Services
) -> None:
    report = await run(services, "x = weigh('gold')\nprint('not reached', x)", "tool")
    job = await job_of(services, "tool")
    assert report.stop_type is StopType.ERROR and "not reached" not in report.output
    assert f"StillRunning: weigh has no value yet: it continues as job {job.id}" in report.output
    await let_go(services, "gold")
    rounds = await rounds_done(fleet, services, "tool", 1)
    announced = f"weigh (job {job.id}) returned: 42"
    assert [round_.observation for round_ in rounds] == [announced]
    assert await texts(services, "tool") == [announced, "seen"]
    assert (await job_of(services, "tool")).state is JobState.SUCCEEDED


async def test_a_quick_tool_of_lane_long_returns_its_value(fleet: Any, services: Services) -> None:
    await let_go(services, "air")
    report = await run(services, "print(weigh('air'))", "quick")
    assert report.output.strip() == "42" and report.stop_type is StopType.NORMAL
    async with services.database.read() as tx:
        assert await tx.jobs.newest(limit=9, chat_key="quick") == []


async def test_work_in_lane_long_has_a_lower_priority_and_its_process_does_not(services: Services) -> None:
    envelope = await use_cases.invoke(
        services, "priorities", (), {}, chat_key="nice", user_id=None, timeout_seconds=WAIT_SECONDS
    )
    nice = decode_value(envelope.value_bytes(), max_bytes=1000)
    own = os.getpriority(os.PRIO_PROCESS, os.getpid())
    assert nice == {"job": own + 5, "thread": own + 5, "process": own}


@pytest.mark.skipif(
    not AUTOGROUPS.exists() or AUTOGROUPS.read_text().strip() != "1", reason="sessions are not grouped here"
)
async def test_the_session_of_a_worker_has_a_lower_priority_while_a_long_job_runs(
    fleet: Any, services: Services
) -> None:
    groups = [Path(f"/proc/{worker.pid}/autogroup") for worker in fleet.workers]

    async def niceness(*, most: int) -> None:
        await eventually(
            lambda: max(int(group.read_text().rpartition(" ")[2]) for group in groups) == most,
            what=f"niceness {most}",
        )

    await run(services, "haul('share')", "share")
    await niceness(most=5)
    await let_go(services, "share")
    await niceness(most=0)


@pytest.mark.extended
async def test_jobs_are_listed_shown_watched_and_cancelled_from_the_shell(
    fleet: Any, services: Services
) -> None:
    await run(services, "haul('forever')", "shell")
    job = await job_of(services, "shell")

    def nekro(*arguments: str, code: int = 0) -> str:
        done = fleet.run("jobs", *arguments)
        assert done.returncode == code, done.stderr
        return str(done.stdout)

    # Each command is a process that has to start: concurrent where the order does not matter.
    watching = asyncio.create_task(asyncio.to_thread(nekro, "watch", job.id))
    listing, unknown = await asyncio.gather(
        asyncio.to_thread(nekro, "--chat-key", "shell", "--json"),
        asyncio.to_thread(nekro, "show", "nope", code=4),
    )
    assert unknown == ""
    (listed,) = json.loads(listing)
    keys = ["id", "type", "plugin", "chat_key", "state", "percent", "message", "started_at", "updated_at"]
    assert list(listed) == keys
    assert (listed["id"], listed["type"], listed["plugin"]) == (job.id, "haul", "tests.hauler")
    cancelled = json.loads(await asyncio.to_thread(nekro, "cancel", job.id, "--json"))
    assert cancelled["state"] == "cancelled"
    assert "cancelled" in await watching
    shown = json.loads(await asyncio.to_thread(nekro, "show", job.id, "--json"))
    assert shown["state"] == "cancelled" and shown["finished_at"]
    await rounds_done(fleet, services, "shell", 1)
    assert any("CallCancelledError" in text for text in await texts(services, "shell"))


@pytest.mark.extended
async def test_a_blocking_method_moves_to_lane_long_and_back_by_command(
    fleet: Any, services: Services
) -> None:
    async def call(name: str, *args: Any) -> Any:
        envelope = await use_cases.invoke(
            services, name, args, {}, chat_key="block", user_id=None, timeout_seconds=WAIT_SECONDS
        )
        return envelope.worker.split("@")[0]

    assert await call("nap", 0.8) == "methods"

    async def moved() -> bool:
        async with services.database.read() as tx:
            return list(await lane_overrides(tx.connection)) == ["tests.hauler.nap"]

    await eventually(moved, what=fleet.waiting_for("the lane override"))

    async def routed() -> bool:
        return bool(await call("nap", 0.0) == "long")

    await eventually(routed, what=fleet.waiting_for("the next call in lane long"))
    nap = asyncio.create_task(call("nap", 5.0))
    assert await call("ping") == "methods"
    assert not nap.done(), "ordinary calls do not wait for it"
    assert await nap == "long"

    def methods(*arguments: str) -> str:
        done = fleet.run("methods", *arguments)
        assert done.returncode == 0, done.stderr
        return str(done.stdout)

    (listed,) = json.loads(await asyncio.to_thread(methods, "hauler.nap", "--json"))
    assert listed["lane"] == "long" and "blocked an event loop" in listed["lane_reason"]
    await asyncio.to_thread(methods, "pin", "nap", "methods")

    async def pinned() -> bool:
        return bool(await call("nap", 0.4) == "methods")

    await eventually(pinned, what=fleet.waiting_for("the operator's word"))
    await asyncio.to_thread(methods, "unpin", "nap")
    async with services.database.read() as tx:
        assert await lane_overrides(tx.connection) == {}
