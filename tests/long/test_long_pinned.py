"""Pinned plugins: one owner, failover with init on another worker, calls that wait meanwhile."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from waiting import WAIT_SECONDS, eventually
from worker_fleet import host_of, plugin_of

from nekro.app import use_cases
from nekro.app.calls.dispatch import CallScope
from nekro.app.chats.writer import context_of
from nekro.app.services import Services
from nekro.wire.invocation import Envelope, new_id
from nekro.wire.values import encode_arguments
from nekro_agent.methods import Lane
from workers.calls import remote_hooks

pytestmark = pytest.mark.extended

PLUGINS = Path(__file__).parent / "pinned_plugins"


@pytest.fixture(scope="module")
def fleet(make_fleet: Callable[..., Any]) -> Any:
    return make_fleet(
        plugins={"dirs": (PLUGINS,)},
        agent={"lease_seconds": 6},
        broker={"visibility_timeout_seconds": 6},
    )


@pytest.fixture(scope="module")
def idle_fleet(make_fleet: Callable[..., Any]) -> Any:
    """A fleet without workers."""
    return make_fleet(plugins={"dirs": (PLUGINS,)})


async def invoke(services: Services, name: str, chat_key: str, *args: Any) -> Envelope:
    return await use_cases.invoke(
        services, name, args, {}, chat_key=chat_key, user_id=None, timeout_seconds=WAIT_SECONDS
    )


async def call(services: Services, name: str) -> list[int]:
    envelope = await invoke(services, name, "p")
    value: list[int] = json.loads(envelope.value_bytes())
    return value


async def value_of(services: Services, name: str) -> Any:
    return json.loads((await invoke(services, name, "p")).value_bytes())


def journal(services: Services, plugin_key: str = "tests.counter") -> list[list[str]]:
    plugin = plugin_of(services, plugin_key)
    path = plugin.get_plugin_data_dir() / "journal.txt"
    return [line.split() for line in path.read_text().splitlines()]


async def test_after_the_owner_is_killed_another_worker_continues_counting(
    fleet: Any, services: Services
) -> None:
    workers = fleet.start("pinned", "pinned", "methods", concurrency=20)
    first = [await call(services, "bump") for _ in range(3)]
    owner = first[0][1]
    assert first == [[1, owner], [2, owner], [3, owner]]
    assert journal(services) == [["init", str(owner)]], "init runs in the owner and nowhere else"
    assert owner in [worker.pid for worker in workers[:2]]
    (dying,) = [worker for worker in workers if worker.pid == owner]
    dying.kill()
    waiting = [call(services, "bump") for _ in range(10)]
    values = await asyncio.gather(*waiting)
    (heir,) = {pid for _, pid in values}
    assert heir != owner and heir in [worker.pid for worker in workers[:2]]
    # A TOOL call may run again when its worker died, so numbers may be skipped; none is returned twice.
    counts = {count for count, _ in values}
    assert len(counts) == 10 and min(counts) >= 4, "no call was lost, and the counter went on"
    assert journal(services) == [["init", str(owner)], ["init", str(heir)]]
    (leaving,) = [worker for worker in workers if worker.pid == heir]
    assert await asyncio.to_thread(leaving.stop) == 0
    assert journal(services)[2] == ["cleanup", str(heir)]
    count, fallback = await call(services, "bump")
    assert count > max(counts)
    assert fallback == workers[2].pid, "without a pinned worker a methods worker owns it"


async def test_a_plugin_that_leaves_a_loop_running_is_pinned_automatically(
    fleet: Any, services: Services
) -> None:
    fleet.start("methods", concurrency=20)
    done = await asyncio.to_thread(fleet.run, "methods", "looper.turns", "--json")
    (method,) = json.loads(done.stdout)
    assert method["lane"] == "pinned.tests.looper"
    assert method["lane_reason"] == "left a task running after its init (watchdog)"
    seen = [await call(services, "turns") for _ in range(6)]
    assert len({pid for _, pid in seen}) == 1

    async def grows() -> bool:
        return (await call(services, "turns"))[0] > seen[0][0]

    await eventually(grows, what=fleet.waiting_for("the loop of the owner"))


async def test_calls_from_processes_that_do_not_know_the_pin_reach_its_owner(
    fleet: Any, services: Services
) -> None:
    fleet.start("methods", "methods", concurrency=20)
    owner = (await call(services, "bump"))[1]
    entry = await services.find_method("bump")
    scope = CallScope(chat=await services.chat("p"), user_id=None)
    calls = [
        services._caller.call(  # the dispatcher has read the pin
            scope.call(
                entry,
                encode_arguments((), {}),
                call_id=new_id(),
                deadline=datetime.now(UTC) + timedelta(seconds=WAIT_SECONDS),
            ),
            lane=Lane.METHODS,
        )
        for _ in range(20)
    ]
    values = [json.loads(envelope.value_bytes()) for envelope in await asyncio.gather(*calls)]
    assert {pid for _, pid in values} == {owner}
    assert len({count for count, _ in values}) == 20


async def test_hooks_of_a_pinned_plugin_run_in_its_owner(fleet: Any, services: Services) -> None:
    fleet.start("methods", "methods", concurrency=20)
    chat = f"h-{new_id()}"
    owner = json.loads((await invoke(services, "hooked_owner", chat)).value_bytes())
    send = partial(use_cases.receive_message, services, chat, user_id="u1", user_name="Ada")
    assert await send("hello")
    assert await send("some spam") is None, "its memory says that this is blocked"
    assert await send("break"), "a hook that raises blocks nothing"

    ctx = context_of(await services.chat(chat), user_id="u1")
    hooked = plugin_of(services, "tests.hooked")
    prompt = await host_of(services).inject(hooked, ctx)
    assert prompt == f"{chat} for u1: ['Ada: hello', 'Ada: some spam'] in {owner}"

    # System messages come from every process, including the owner.
    speakers = set()
    async with asyncio.timeout(WAIT_SECONDS):
        while len(speakers) < 2:
            envelopes = [
                await invoke(services, "say_to_model", chat, f"{word} of x") for word in ("spam", "news")
            ]
            speakers |= {json.loads(envelope.value_bytes()) for envelope in envelopes}
    async with services.database.read() as transaction:
        messages = await transaction.messages.newest(chat, limit=100)
    assert {message.text for message in messages} == {"hello", "break", "news of x"}

    await use_cases.reset_chat(services, chat)
    assert f"['reset of {chat}']" in await host_of(services).inject(hooked, ctx)


async def test_a_hook_whose_owner_does_not_answer_is_skipped(
    idle_fleet: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_hooks, "HOOK_SECONDS", 0.6)
    services = idle_fleet.services()
    await services.start()
    try:
        chat = f"h-{new_id()}"
        assert await use_cases.receive_message(services, chat, "some spam", user_id="u1", user_name="Ada")
        ctx = context_of(await services.chat(chat), user_id=None)
        assert await host_of(services).inject(plugin_of(services, "tests.hooked"), ctx) == ""
    finally:
        await services.close()


async def test_what_on_enabled_set_up_exists_again_in_the_heir_of_a_killed_owner(
    fleet: Any, services: Services
) -> None:
    fleet.start("methods", "methods", concurrency=20)
    state = await value_of(services, "starter_state")
    owner = state["pid"]
    assert state["owner"] == owner, "the methods run beside the hook"
    assert journal(services, "tests.starter").count(["enabled", str(owner)]) == 1
    (dying,) = [worker for worker in fleet.workers if worker.pid == owner]
    await eventually(partial(is_listed, fleet, dying), what=fleet.waiting_for("the timer in the list"))
    (services.settings.data_dir / "plugins" / "tests.starter" / "soon.txt").touch()
    dying.kill()
    state = await value_of(services, "starter_state")
    assert state["owner"] == state["pid"] != owner
    (heir,) = [worker for worker in fleet.workers if worker.pid == state["pid"]]
    # Its timer may have fired already.
    assert journal(services, "tests.starter").count(["enabled", str(heir.pid)]) == 1

    async def all_run() -> bool:
        now = await value_of(services, "starter_state")
        return all(now[loop] > state[loop] for loop in ("task", "thread", "scheduler"))

    await eventually(all_run, what=fleet.waiting_for("the loops of the heir"))
    await eventually(
        lambda: ["fired", str(heir.pid)] in journal(services, "tests.starter"),
        what=fleet.waiting_for("the timer of the heir"),
    )
    await eventually(partial(is_listed, fleet, heir), what=fleet.waiting_for("the heir's timer in the list"))
    (timer,) = timers_of(fleet)
    done = await asyncio.to_thread(fleet.run, "timers", "delete", timer["id"])
    assert done.returncode != 0 and "calls a function of plugin tests.starter" in done.stderr


def timers_of(fleet: Any) -> list[dict[str, Any]]:
    done = fleet.run("timers", "--json")
    return [timer for timer in json.loads(done.stdout) if timer["chat_key"] == "system_starter"]


async def is_listed(fleet: Any, worker: Any) -> bool:
    """Whether the timer of tomorrow is listed once, as owned by a worker."""
    found = await asyncio.to_thread(timers_of, fleet)
    listed = [(timer["plugin"], timer["description"]) for timer in found]
    is_owner = [timer["owner"].endswith(f":{worker.pid}") for timer in found]
    return listed == [("tests.starter", "tomorrow")] and is_owner == [True]
