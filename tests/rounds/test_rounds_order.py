"""Rounds of a chat: their number, their order, and the triggers that are merged."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from round_bench import Bench, Model, states
from sqlalchemy import func, select, update
from waiting import WAIT_SECONDS, eventually

from broker_config.topology import rounds_waiting
from nekro.agent.llm import LLMRequest
from nekro.sandbox.models import StopType
from nekro_agent import runtime
from nekro_agent.methods import Lane
from storage.sql import seconds_from_now
from storage.states import RoundState, TriggerKind
from storage.tables import ROUNDS
from workers.ops.sweeper import Sweep, Sweeper

OpenBench = Callable[..., Awaitable[Bench]]
SAY = 'send_msg_text(_ck, "done")'


async def due_in(bench: Bench, chat_key: str, seconds: float) -> None:
    """Set the end of the debounce of a chat's first round, in seconds from now."""
    async with bench.database.begin() as tx:
        first = select(func.min(ROUNDS.c.sequence)).where(ROUNDS.c.chat_key == chat_key).scalar_subquery()
        statement = update(ROUNDS).where(ROUNDS.c.sequence == first)
        await tx.connection.execute(statement.values(not_before=seconds_from_now(seconds)))


@pytest.mark.extended
async def test_a_burst_of_messages_within_the_debounce_is_one_round(kind: str, open_bench: OpenBench) -> None:
    bench = await open_bench(kind, agent={"debounce_seconds": 600})
    model = Model(SAY)
    drain = bench.drain(model)
    for word in ("one", "two", "three"):
        await bench.say("burst", f"message {word}")
        await drain.drain("burst")
    assert model.prompts == []
    await due_in(bench, "burst", 0)
    rounds = await bench.play("burst", drain)
    await drain.close()
    assert states(rounds) == ["done", "merged", "merged"]
    assert {item.merged_into for item in rounds[1:]} == {rounds[0].id}
    (prompt,) = model.prompts
    assert all(f"message {word}" in prompt for word in ("one", "two", "three"))


async def test_a_debounced_round_is_announced_when_it_is_due(kind: str, open_bench: OpenBench) -> None:
    bench = await open_bench(kind, agent={"debounce_seconds": 600})
    drain = bench.drain(Model(SAY))
    await bench.say("later", "hello")
    announced = announcements(bench)
    await due_in(bench, "later", 5)
    await drain.drain("later")
    assert states(await bench.rounds("later")) == ["requested"]
    await eventually(lambda: announced, what="the announcement")
    await drain.drain("later")
    assert states(await bench.rounds("later")) == ["done"]


async def test_an_agent_result_does_not_wait_for_the_debounce(kind: str, open_bench: OpenBench) -> None:
    bench = await open_bench(kind, agent={"debounce_seconds": 600})
    drain = bench.drain(Model('look("tea")', SAY))
    await bench.say("tea", "look it up")
    await due_in(bench, "tea", 0)
    rounds = await bench.play("tea", drain)
    assert [(item.trigger_kind, item.stop_type) for item in rounds] == [
        (TriggerKind.MESSAGE, StopType.AGENT),
        (TriggerKind.CALL, StopType.NORMAL),
    ]
    assert rounds[1].not_before == rounds[1].requested_at


@pytest.mark.extended
async def test_triggers_that_arrive_while_a_round_runs_are_merged_into_the_next_in_order(
    bench: Bench,
) -> None:
    async def meanwhile(_: LLMRequest) -> str:
        await bench.say("busy", "second", user_id="ada")
        await bench.say("busy", "third", user_id="bob")
        return 'look("tea")'

    model = Model(meanwhile, SAY)
    await bench.say("busy", "first")
    rounds = await bench.play("busy", bench.drain(model))
    assert states(rounds) == ["done", "done", "merged", "merged"]
    assert [item.trigger_kind.value for item in rounds] == ["message", "message", "message", "call"]
    # The result appears with its program, although a message came in between.
    second = model.prompts[1]
    assert second.index('look("tea")') < second.index("seen: tea") < second.index("third")
    assert second.count("seen: tea") == 1


@pytest.mark.extended
async def test_a_round_runs_on_behalf_of_the_user_among_its_triggers(bench: Bench) -> None:
    await runtime.current().messages.push_system("who", "a timer", trigger_agent=True, call_id=None)
    await bench.say("who", "and I", user_id="ada")
    rounds = await bench.play("who", bench.drain(Model("1 / 0", SAY)))
    assert states(rounds) == ["done", "merged", "done"]
    assert rounds[2].user_id == "ada"


async def test_two_drains_of_one_chat_run_its_round_once(bench: Bench) -> None:
    model = Model(SAY)
    await bench.say("twice", "hello")
    await asyncio.gather(*(bench.drain(model, owner=f"w{n}").drain("twice") for n in range(4)))
    assert states(await bench.rounds("twice")) == ["done"]
    assert len(model.prompts) == 1


def sweeper(bench: Bench, *sweeps: Sweep, seconds: float = 0.001, owner: str = "w") -> Sweeper:
    settings = bench.settings.agent.model_copy(update={"lease_seconds": 3 * seconds})
    return Sweeper(
        bench.database,
        bench.services.leases,
        bench.services.publisher,
        settings,
        owner=owner,
        sweeps=sweeps,
    )


def announcements(bench: Bench) -> list[str]:
    """Suppress and record what the publisher would send from now on."""
    announced: list[str] = []

    async def announce(chat_key: str, *, later: bool = False) -> None:
        announced.append(chat_key)

    bench.services.publisher.round_requested = announce  # type: ignore[method-assign]
    return announced


def lose_messages(bench: Bench) -> None:
    """Remove the messages of lane ``rounds``."""
    queue = bench.services.app.amqp.queues[Lane.ROUNDS.value]
    with bench.services.app.producer_or_acquire() as producer:
        queue(producer.channel).purge()


async def test_the_sweep_restarts_a_chat_whose_message_was_lost(bench: Bench) -> None:
    await bench.say("lost", "hello")
    lose_messages(bench)
    await sweeper(bench).sweep()
    assert rounds_waiting(bench.services.app) == 1
    assert states(await bench.play("lost", bench.drain(Model(SAY)))) == ["done"]


async def test_the_sweep_publishes_nothing_while_messages_are_queued(bench: Bench) -> None:
    await bench.say("waiting", "hello")
    await sweeper(bench).sweep()
    assert rounds_waiting(bench.services.app) == 1


async def test_the_sweep_wakes_when_the_lease_of_a_running_round_expires(bench: Bench) -> None:
    await bench.say("chat", "hello")
    assert await sweeper(bench).sweep() is None
    async with bench.database.begin() as tx:
        fence = await tx.chats.acquire("chat", owner="w1", lease_seconds=60)
        assert fence is not None
    await bench.services.ledger.start_next("chat", fence=fence, worker="w1")
    lose_messages(bench)
    seconds = await sweeper(bench).sweep()
    assert seconds is not None and 50 < seconds <= 60
    assert rounds_waiting(bench.services.app) == 0
    await bench.let_leases_run_out()
    assert await sweeper(bench).sweep() is None
    assert rounds_waiting(bench.services.app) == 1


async def test_another_worker_sweeps_when_the_sweeping_one_dies(bench: Bench) -> None:
    swept: dict[str, asyncio.Event] = {"w1": asyncio.Event(), "w2": asyncio.Event()}

    def note(owner: str) -> Sweep:
        async def sweep() -> None:
            swept[owner].set()
            raise RuntimeError("one that fails ends neither the others nor the sweeper")

        return sweep

    first = sweeper(bench, note("w1"), seconds=3, owner="w1")
    second = sweeper(bench, note("w2"), seconds=3, owner="w2")
    async with asyncio.timeout(WAIT_SECONDS):
        first.start()
        await swept["w1"].wait()
        second.start()
        swept["w1"].clear()
        await swept["w1"].wait()
        assert not swept["w2"].is_set()
        first._task.cancel()  # type: ignore[union-attr] - it dies and gives nothing back
        await swept["w2"].wait()
    await second.close()


KEYS = [
    "qq:group/12 34",
    "a.b:c/../d#*",
    "群組:話/🌈:" + "長" * 180,
    "x" * 200,
    "-rf --help",
    "~" * 60,
]


@pytest.mark.extended
async def test_a_chat_key_of_any_platform_works(open_bench: OpenBench) -> None:
    bench = await open_bench("postgres")
    code = "import os\nopen('shared/x', 'w').write(_ck)\ntick(_ck)\nlook(_ck)"
    for chat_key in KEYS:
        await bench.say(chat_key, "hello")
        rounds = await bench.play(chat_key, bench.drain(Model(code, SAY)))
        assert [item.stop_type for item in rounds] == [StopType.AGENT, StopType.NORMAL], chat_key
        assert f"tick {chat_key}" in bench.journal()
        texts = [message.text for message in await bench.messages(chat_key)]
        assert texts[1:] == [f"seen: {chat_key}", "done"]


SIGNALS: list[tuple[str, bool, bool]] = [
    ("hello there", True, True),
    ("quietly: I only mention it", True, False),
    ("drop: this", False, False),
    ("now: answer", True, True),
]


async def test_hooks_decide_whether_a_message_is_recorded_and_whether_it_wakes_the_agent(
    bench: Bench,
) -> None:
    for number, (text, recorded, wakes) in enumerate(SIGNALS):
        chat_key = f"hooks {number}"
        message_id = await bench.say(chat_key, text)
        assert (message_id is not None) is recorded, text
        assert [message.text for message in await bench.messages(chat_key)] == ([text] if recorded else [])
        assert states(await bench.rounds(chat_key)) == (["requested"] if wakes else []), text
    assert bench.journal() == [f"heard {text}" for text, _, _ in SIGNALS]


async def test_a_message_without_wake_up_is_seen_by_the_next_round(bench: Bench) -> None:
    model = Model(SAY)
    await bench.say("quiet", "quietly: the key is 42")
    await bench.say("quiet", "what is the key?")
    rounds: Any = await bench.play("quiet", bench.drain(model))
    assert [item.state for item in rounds] == [RoundState.DONE]
    assert "the key is 42" in model.prompts[0]
