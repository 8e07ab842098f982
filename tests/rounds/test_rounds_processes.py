"""Rounds on real workers: killed, frozen, cancelled and watched."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
from collections.abc import AsyncIterator, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from forked_process import ForkedCommand
from scene_model import HANG, SceneModel
from sqlalchemy import select
from surviving_programs import descendants
from waiting import WAIT_SECONDS, eventually
from worker_fleet import Fleet, Worker, build_fleet

from nekro.app import use_cases
from nekro.app.services import Services
from nekro.sandbox.models import StopType
from storage.repositories.rounds import Round
from storage.states import FINAL_ROUND_STATES
from storage.tables import CHATS

pytestmark = pytest.mark.extended

LEASE_SECONDS = 2
SWEEP_SECONDS = LEASE_SECONDS / 3
#: Seconds for a process to be scheduled on a busy machine; no wait depends on it.
SLACK_SECONDS = 60
SAY = 'send_msg_text(_ck, "done")'
#: Both end when ``let_go`` makes a file.
TICKS = """
import os, time
for n in range(10_000):
    tick(f"{_ck} {n}")
    time.sleep(0.02)
    if os.path.exists("shared/go"): break
"""
WAIT = """
import os, time
kept, ticked = keep("once"), tick("waits")
while not os.path.exists("shared/go"): time.sleep(0.02)
print(kept, ticked)
"""


@pytest.fixture(scope="module")
def model() -> Iterator[SceneModel]:
    model = SceneModel()
    yield model
    model.stop()


@pytest.fixture(scope="module", params=["postgres", pytest.param("sqlite", marks=pytest.mark.slow)])
def fleet(
    request: pytest.FixtureRequest,
    redis_server: Any,
    model: SceneModel,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Fleet]:
    model.rewind()  # the scenes were used up by the other database
    directory = tmp_path_factory.mktemp("fleet")
    url = f"sqlite:///{directory}/nekro.db"
    if request.param == "postgres":
        url = request.getfixturevalue("postgres_server").create_database()
    fleet = build_fleet(
        directory,
        redis_server.url,
        url,
        plugins={"dirs": (Path(__file__).parent / "plugins",)},
        llm={"base_url": model.start(), "model": "tests-1", "stream": False, "input_price_per_million": 2},
        agent={"lease_seconds": LEASE_SECONDS},
        # A limit that no test reaches: only work that a budget limits is counted before it has ended.
        budgets={"day": "rounds=1000"},
        # No sandbox waits and none is forked, so that every process below a worker belongs to its run.
        sandbox={"fork_server": False},
        workers={"drain_seconds": 1},
    )
    fleet.start("methods", "rounds", "rounds")
    yield fleet
    fleet.stop()


@contextlib.asynccontextmanager
async def opened(fleet: Fleet) -> AsyncIterator[Services]:
    services = fleet.services()
    await services.start()
    try:
        yield services
    finally:
        await services.close()


async def rounds_of(services: Services, chat_key: str) -> list[Round]:
    async with services.database.read() as tx:
        return await tx.rounds.newest(chat_key, limit=50)


async def ended(fleet: Fleet, services: Services, chat_key: str) -> list[Round]:
    """Wait until a chat has no waiting and no running round."""

    async def look() -> list[Round]:
        found = await rounds_of(services, chat_key)
        return found if found and all(item.state in FINAL_ROUND_STATES for item in found) else []

    found: list[Round] = await eventually(look, what=fleet.waiting_for(f"the rounds of {chat_key}"))
    return found


async def say(services: Services, chat_key: str, text: str) -> None:
    await use_cases.receive_message(services, chat_key, text, user_id="ada", user_name="Ada")


def journal(fleet: Fleet) -> list[str]:
    path = fleet.settings.data_dir / "plugins" / "tests.scene" / "journal.txt"
    return path.read_text().splitlines() if path.exists() else []


async def worker_in(fleet: Fleet, services: Services, chat_key: str) -> Worker:
    """The worker that runs the chat's newest round."""
    return fleet.worker_of((await rounds_of(services, chat_key))[-1].worker)


def are_gone(pids: set[int]) -> bool:
    def state(pid: int) -> str:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
        except OSError:
            return "gone"

    return all(state(pid) in ("gone", "Z", "X") for pid in pids)


async def killed(fleet: Fleet, services: Services, chat_key: str) -> Any:
    """Kill the worker that runs the chat and start another; returns when its lease expires."""
    worker = await worker_in(fleet, services, chat_key)
    worker.kill()
    async with services.database.read() as tx:
        until = select(CHATS.c.lease_until).where(CHATS.c.chat_key == chat_key)
        expires_at = (await tx.connection.execute(until)).scalar()
    await asyncio.to_thread(fleet.start, "rounds")
    return expires_at


async def test_a_chat_continues_within_its_lease_when_its_worker_is_killed_inside_the_model_call(
    fleet: Fleet, model: SceneModel
) -> None:
    model.scenes["llm"] = [HANG, SAY]
    async with opened(fleet) as services:
        await say(services, "llm", "scene:llm")
        await eventually(lambda: model.asked["llm"] == 1, what=fleet.waiting_for("the request"))
        lease_until = await killed(fleet, services, "llm")
        (round_,) = await ended(fleet, services, "llm")
    assert (round_.attempt, round_.stop_type) == (2, StopType.NORMAL)
    assert round_.started_at is not None and lease_until is not None
    assert round_.started_at <= lease_until + timedelta(seconds=SWEEP_SECONDS + SLACK_SECONDS)
    assert model.asked["llm"] == 2
    async with opened(fleet) as services, services.database.read() as tx:
        rows = await tx.connection.exec_driver_sql(
            "SELECT id, rounds, requests, estimated_requests, prompt_tokens + completion_tokens "
            "FROM spendings WHERE chat_key = 'llm' ORDER BY id"
        )
    # What the killed worker had asked for counts as estimated, the second attempt as the model reports it.
    (killed_id, *dead), (next_id, *alive) = rows
    assert (killed_id, next_id) == (f"{round_.id}:1", f"{round_.id}:2")
    assert dead[:3] == [1, 0, 1] and dead[3] > fleet.settings.agent.answer_tokens
    assert alive == [1, 1, 0, 1200]


async def let_go(services: Services, chat_key: str) -> None:
    """Let a program of ``TICKS`` or ``WAIT`` end."""
    (await shared_dir(services, chat_key) / "go").touch()


async def shared_dir(services: Services, chat_key: str) -> Path:
    async with services.database.read() as tx:
        chat = await tx.chats.get(chat_key)
    return services.areas.shared_dir(chat.container_key)


async def test_a_sandbox_ends_with_its_worker_and_its_program_is_run_again(
    fleet: Fleet, model: SceneModel
) -> None:
    model.scenes["program"] = [WAIT]
    async with opened(fleet) as services:
        await say(services, "program", "scene:program")
        await eventually(lambda: "tick waits" in journal(fleet), what=fleet.waiting_for("the call"))
        sandbox = descendants((await worker_in(fleet, services, "program")).pid)
        lease_until = await killed(fleet, services, "program")
        await eventually(lambda: are_gone(sandbox), what=fleet.waiting_for("the sandbox's end"))
        await let_go(services, "program")
        (round_,) = await ended(fleet, services, "program")
    assert sandbox
    assert (round_.stop_type, round_.attempt, round_.output) == (StopType.NORMAL, 2, "kept once waits\n")
    assert round_.started_at is not None and lease_until is not None
    assert round_.started_at <= lease_until + timedelta(seconds=SWEEP_SECONDS + SLACK_SECONDS)
    assert model.asked["program"] == 1
    assert journal(fleet).count("keep once") == journal(fleet).count("tick waits") == 1


@contextlib.asynccontextmanager
async def frozen(fleet: Fleet, services: Services, chat_key: str) -> AsyncIterator[Worker]:
    """Freeze the worker that runs the chat for the block, then wait until it has noticed the lost lease."""
    worker = await worker_in(fleet, services, chat_key)
    worker.freeze()
    try:
        yield worker
    finally:
        worker.thaw()
    await eventually(
        lambda: "chat_lease_lost" in worker.log.read_text(), what=fleet.waiting_for("the thawed worker")
    )


async def test_a_worker_frozen_inside_the_model_call_writes_nothing_when_it_thaws(
    fleet: Fleet, model: SceneModel
) -> None:
    model.scenes["cold"] = [HANG, SAY, 'tick("cold")']
    async with opened(fleet) as services:
        await say(services, "cold", "scene:cold")
        await eventually(lambda: model.asked["cold"] == 1, what=fleet.waiting_for("the request"))
        async with frozen(fleet, services, "cold") as worker:
            before = await ended(fleet, services, "cold")
            model.release("cold")
        assert await rounds_of(services, "cold") == before
    assert [item.state.value for item in before] == ["done"]
    # More than 2 when it was frozen within a transaction: until PostgreSQL ends that, the leases of attempts
    # that wait for its locks expire. Only one of them asks the model.
    assert before[0].attempt >= 2 and model.asked["cold"] == 2
    assert fleet.worker_of(before[0].worker) is not worker
    assert "tick cold" not in journal(fleet)


async def test_a_program_of_a_frozen_worker_makes_no_call_after_the_thaw(
    fleet: Fleet, model: SceneModel
) -> None:
    model.scenes["ticks"] = [TICKS]
    async with opened(fleet) as services:
        await say(services, "ticks", "scene:ticks")
        await eventually(lambda: "tick ticks 3" in journal(fleet), what=fleet.waiting_for("a call"))
        async with frozen(fleet, services, "ticks") as worker:
            sandbox = descendants(worker.pid)
            reached = len(journal(fleet))
            await eventually(
                lambda: len(journal(fleet)) > reached + 3, what=fleet.waiting_for("the program to go on")
            )
            await let_go(services, "ticks")
            before = await ended(fleet, services, "ticks")
            ticks = [line for line in journal(fleet) if line.startswith("tick ticks")]
        await eventually(lambda: are_gone(sandbox), what=fleet.waiting_for("the sandbox's end"))
        assert [line for line in journal(fleet) if line.startswith("tick ticks")] == ticks
        assert ticks == [f"tick ticks {number}" for number in range(len(ticks))]
        assert await rounds_of(services, "ticks") == before
        # The worker is fully usable.
        for other in ("thawed-1", "thawed-2"):
            await say(services, other, "scene:other")
            await ended(fleet, services, other)
    assert [item.stop_type for item in before] == [StopType.NORMAL]
    assert model.asked["ticks"] == 1


async def test_cancel_stops_the_sandbox_and_the_coroutines_of_its_calls(
    fleet: Fleet, model: SceneModel
) -> None:
    model.scenes["cancel"] = ['hold("held")\n' + SAY]
    async with opened(fleet) as services:
        await say(services, "cancel", "scene:cancel")
        await eventually(lambda: "begin held" in journal(fleet), what=fleet.waiting_for("the call"))
        worker = await worker_in(fleet, services, "cancel")
        sandbox = descendants(worker.pid)
        await say(services, "cancel", "and more")
        done = await asyncio.to_thread(fleet.run, "cancel", "cancel", "--json")
        report = json.loads(done.stdout)
        await eventually(
            lambda: "cancelled held" in journal(fleet), what=fleet.waiting_for("the method's end")
        )
        await eventually(lambda: are_gone(sandbox), what=fleet.waiting_for("the sandbox's end"))
        rounds = await rounds_of(services, "cancel")
    assert sandbox and done.returncode == 0, done.stderr
    assert [len(report[name]) for name in ("stopped", "cancelled", "still_running")] == [1, 1, 0]
    assert [item.state.value for item in rounds] == ["cancelled", "cancelled"]
    assert [call["method"] for call in rounds[0].calls or []] == ["tests.scene.hold"]
    assert worker.process.poll() is None


async def test_tail_shows_a_chats_events_and_leaves_no_queue(
    fleet: Fleet, model: SceneModel, redis_server: Any
) -> None:
    import redis

    model.scenes["tail"] = ['look("tea")', SAY]
    chat_key = "群/1: tail"
    process = fleet.command("tail", chat_key, "--json")
    assert process.stderr is not None
    assert "watching" in await asyncio.to_thread(process.stderr.readline)
    async with opened(fleet) as services:
        await say(services, "another chat", "scene:other")
        await say(services, chat_key, "scene:tail")
        await ended(fleet, services, chat_key)
        events = await asyncio.to_thread(_events_to_the_end, process)
    process.send_signal(signal.SIGINT)
    out, err = await asyncio.to_thread(process.communicate, timeout=WAIT_SECONDS)
    assert (process.returncode, out) == (0, ""), err
    shown = [(event["type"], event["data"].get("text") or event["data"].get("stop_type")) for event in events]
    assert [item for item in shown if item[0].startswith(("message.", "round.", "turn."))] == [
        ("message.received", "scene:tail"),
        ("turn.started", None),
        ("round.started", None),
        ("message.noted", "seen: tea"),
        ("round.ended", "AGENT"),
        ("round.started", None),
        ("message.sent", "done"),
        ("round.ended", "NORMAL"),
        ("turn.ended", None),
    ]
    first = events[0]["number"]
    assert [event["number"] for event in events] == list(range(first, first + len(events)))
    assert {event["chat_key"] for event in events} == {chat_key}
    assert {event["turn_id"] for event in events} == {events[1]["turn_id"]}
    prefix = fleet.settings.broker.key_prefix
    with redis.Redis.from_url(redis_server.url) as client:
        assert [key for key in client.scan_iter(f"{prefix}*watch*")] == []
        bound = client.smembers(f"{prefix}_kombu.binding.agent.events")
    assert [member for member in bound if b"watch." in member] == []


def _events_to_the_end(process: ForkedCommand) -> list[dict[str, Any]]:
    """Output of `nekro tail --json` up to the end of a turn."""
    assert process.stdout is not None
    events: list[dict[str, Any]] = []
    while not events or events[-1]["type"] != "turn.ended":
        line = process.stdout.readline()
        assert line, "it ended"
        events.append(json.loads(line))
    return events


async def test_tail_ends_at_ctrl_c_during_a_read(fleet: Fleet, redis_server: Any) -> None:
    import redis

    process = fleet.command("tail", "silence")
    assert process.stderr is not None
    assert "watching" in await asyncio.to_thread(process.stderr.readline)
    with redis.Redis.from_url(redis_server.url) as client:
        client.execute_command("CLIENT", "PAUSE", 1500, "ALL")
    await asyncio.sleep(0.5)  # it reads every tenth of a second, and is waiting for the reply now
    process.send_signal(signal.SIGINT)
    _, err = await asyncio.to_thread(process.communicate, timeout=WAIT_SECONDS)
    assert (process.returncode, err) == (0, "")
    with redis.Redis.from_url(redis_server.url) as client:
        assert [key for key in client.scan_iter(f"{fleet.settings.broker.key_prefix}*watch*")] == []


async def test_tail_ends_after_count_events(fleet: Fleet, model: SceneModel) -> None:
    model.scenes["count"] = [SAY]
    process = fleet.command("tail", "count", "--count", "2")
    assert process.stderr is not None
    await asyncio.to_thread(process.stderr.readline)
    async with opened(fleet) as services:
        await say(services, "count", "scene:count")
        await ended(fleet, services, "count")
    out, _ = await asyncio.to_thread(process.communicate, timeout=WAIT_SECONDS)
    assert (process.returncode, len(out.splitlines())) == (0, 2)
    assert "Ada: scene:count" in out


async def test_history_shows_the_course_of_a_turn(fleet: Fleet, model: SceneModel) -> None:
    model.scenes["story"] = ['tick("story")\nlook("tea")', SAY]
    done = await asyncio.to_thread(fleet.run, "send", "story", "scene:story", "--user-id", "ada", "--wait")
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
    shown = await asyncio.to_thread(fleet.run, "history", "story", "--trace", "--json")
    rounds = json.loads(shown.stdout)["rounds"]
    assert [item["stop_type"] for item in rounds] == ["AGENT", "NORMAL"]
    first = rounds[0]
    assert (first["user"], first["model"], first["prompt_tokens"]) == ("ada", "tests-1-real", 1000)
    assert first["cost"] == pytest.approx(0.002) and first["prompt_chars"] > 1000
    assert [(call["method"], call["lane"], bool(call["worker"])) for call in first["calls"]] == [
        ("tests.scene.tick", "methods", True),
        ("tests.scene.look", "methods", True),
    ]
    assert all(call["started_at"] and call["finished_at"] for call in first["calls"])
    text = (await asyncio.to_thread(fleet.run, "history", "story", "--trace")).stdout
    assert "call tests.scene.tick (tool) in lane methods on methods@" in text
    assert "1000 + 200 tokens, cost 0.002" in text


@pytest.mark.parametrize("chat_key", ["qq:group/1", "群組:話/🌈 " + "長" * 190, "a.b#*:/../c"], ids=range(3))
async def test_send_reaches_a_chat_of_any_key(fleet: Fleet, model: SceneModel, chat_key: str) -> None:
    model.scenes["keys"] = [SAY]
    done = await asyncio.to_thread(fleet.run, "send", chat_key, "scene:keys", "--wait", "--json")
    assert done.returncode == 0, done.stderr
    assert [answer["text"] for answer in json.loads(done.stdout)["answers"]] == ["done"]


async def test_reset_stops_the_round_and_starts_a_new_conversation(fleet: Fleet, model: SceneModel) -> None:
    model.scenes["reset"] = ['hold("reset")']
    async with opened(fleet) as services:
        await say(services, "reset", "scene:reset")
        await eventually(lambda: "begin reset" in journal(fleet), what=fleet.waiting_for("the call"))
        done = await asyncio.to_thread(fleet.run, "reset", "reset")
        assert done.returncode == 0, done.stderr
        rounds = await ended(fleet, services, "reset")
        async with services.database.read() as tx:
            assert await tx.messages.newest("reset", limit=10) == []
    assert [(item.state.value, item.error) for item in rounds] == [("cancelled", "stopped on request")]
