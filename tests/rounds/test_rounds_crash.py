"""A worker that dies, freezes or loses its database: the chat continues and nothing happens twice."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Awaitable, Callable

import pytest
from loguru import logger
from round_bench import Bench, Model, invocation, states
from waiting import WAIT_SECONDS, eventually

from nekro.agent.llm import LLMRequest
from nekro.app.leases import CHAT
from nekro.sandbox.models import StopType
from nekro_agent.errors import FencedError
from storage.repositories.rounds import Round, RoundReport
from storage.states import TriggerKind

OpenBench = Callable[..., Awaitable[Bench]]
SAY = 'send_msg_text(_ck, "done")'
HOLD = 'keep("a promise")\nhold("it")\nsend_msg_text(_ck, "never said")'


async def begun(bench: Bench, chat_key: str, model: Model, *, owner: str = "w1") -> asyncio.Task[None]:
    """Start a drain as a worker would; the test ends it."""
    return asyncio.create_task(bench.drain(model, owner=owner).drain(chat_key))


async def die(task: asyncio.Task[None]) -> None:
    """Cancel a drain; its leases are released, as after their expiry."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_an_unanswered_round_is_sent_to_the_model_again(bench: Bench) -> None:
    asked = asyncio.Event()

    async def hang(_: LLMRequest) -> str:
        asked.set()
        await asyncio.Event().wait()
        raise AssertionError

    await bench.say("chat", "hello")
    first = await begun(bench, "chat", Model(hang))
    await asked.wait()
    await die(first)
    assert states(await bench.rounds("chat")) == ["running"]
    rounds = await bench.play("chat", bench.drain(Model(SAY), owner="w2"))
    assert states(rounds) == ["done"]
    assert (rounds[0].attempt, rounds[0].worker) == (2, "w2")
    assert [message.text for message in await bench.messages("chat")] == ["hello", "done"]


@pytest.mark.extended
async def test_code_that_may_have_run_is_not_run_again_and_the_model_is_informed(bench: Bench) -> None:
    await bench.say("chat", "hello", user_id="ada")
    first = await begun(bench, "chat", Model(HOLD))
    await bench.noted("begin it")
    await die(first)
    model = Model(SAY)
    rounds = await bench.play("chat", bench.drain(model, owner="w2"))
    assert [(item.trigger_kind, item.state.value, item.number) for item in rounds] == [
        (TriggerKind.MESSAGE, "done", 1),
        (TriggerKind.ROUND, "done", 2),
    ]
    interrupted = rounds[0]
    assert (interrupted.stop_type, interrupted.worker, interrupted.attempt) == (StopType.ERROR, "w1", 1)
    assert [call["method"] for call in interrupted.calls or []] == ["tests.scene.keep"]
    assert rounds[1].user_id == "ada"
    (prompt,) = model.prompts
    assert "went down" in prompt and "`keep`: done" in prompt and HOLD in prompt
    assert bench.journal().count("keep a promise") == 1
    assert "never said" not in [message.text for message in await bench.messages("chat")]


async def agent_call(bench: Bench, round_: Round, call_id: str) -> None:
    """Run an AGENT call of a round in a worker of methods."""
    made = invocation("tests.scene.look", ("tea",), call_id=call_id, round_=round_)
    await bench.caller.call(made, lane="methods")


async def running_round(bench: Bench, chat_key: str, *, answered: bool) -> Round:
    """A round of a crashed worker: running, with an expired lease."""
    await bench.say(chat_key, "hello")
    async with bench.database.begin() as tx:
        fence = await tx.chats.acquire(chat_key, owner="w1", lease_seconds=60)
        assert fence is not None
    claimed = await bench.services.ledger.start_next(chat_key, fence=fence, worker="w1")
    assert claimed is not None
    if answered:
        report = RoundReport(answer="```python\nlook('tea')\n```", code="look('tea')")
        async with bench.database.begin() as tx:
            await tx.rounds.record(claimed.round.id, fence=fence, report=report)
    await bench.let_leases_run_out()
    return claimed.round


async def test_a_result_that_woke_the_model_wakes_it_once_although_its_round_was_interrupted(
    bench: Bench,
) -> None:
    interrupted = await running_round(bench, "chat", answered=True)
    await agent_call(bench, interrupted, "c1")
    model = Model(SAY)
    rounds = await bench.play("chat", bench.drain(model, owner="w2"))
    assert [(item.trigger_kind, item.stop_type) for item in rounds] == [
        (TriggerKind.MESSAGE, StopType.AGENT),
        (TriggerKind.CALL, StopType.NORMAL),
    ]
    assert model.prompts[0].count("seen: tea") == 1


@pytest.mark.extended
async def test_a_result_that_arrives_after_the_takeover_wakes_the_model(bench: Bench) -> None:
    interrupted = await running_round(bench, "chat", answered=True)
    drain = bench.drain(model := Model(SAY), owner="w2")
    await bench.play("chat", drain)
    await agent_call(bench, interrupted, "c1")
    rounds = await bench.play("chat", drain)
    assert [item.trigger_kind.value for item in rounds] == ["message", "round", "call"]
    assert "seen: tea" in model.prompts[1]


async def test_a_round_that_kills_its_workers_is_given_up_and_the_chat_notified(bench: Bench) -> None:
    await bench.say("chat", "hello")
    for attempt in range(4):
        async with bench.database.begin() as tx:
            fence = await tx.chats.acquire("chat", owner=f"w{attempt}", lease_seconds=60)
            assert fence is not None
        claimed = await bench.services.ledger.start_next("chat", fence=fence, worker=f"w{attempt}")
        assert (claimed is None) is (attempt == 3)
        await bench.let_leases_run_out()
    rounds = await bench.rounds("chat")
    assert states(rounds) == ["failed"]
    last = (await bench.messages("chat"))[-1]
    assert (last.kind.value, last.round_id) == ("system", rounds[0].id)
    assert "started 3 times" in last.text


async def test_a_round_whose_workers_stop_is_asked_again_however_often(
    kind: str, open_bench: OpenBench
) -> None:
    bench, asked = await open_bench(kind), asyncio.Event()

    async def hang(_: LLMRequest) -> str:
        asked.set()
        await asyncio.Event().wait()
        raise AssertionError

    await bench.say("chat", "hello")
    for number in range(3):
        stopping = await begun(bench, "chat", Model(hang), owner=f"w{number}")
        await asyncio.wait_for(asked.wait(), WAIT_SECONDS)
        asked.clear()
        await die(stopping)
    rounds = await bench.play("chat", bench.drain(Model(SAY), owner="w3"))
    assert [(item.state.value, item.attempt, item.worker) for item in rounds] == [("done", 4, "w3")]


async def test_an_interrupted_last_round_ends_the_turn_with_a_message(
    kind: str, open_bench: OpenBench
) -> None:
    bench = await open_bench(kind, agent={"rounds_per_turn": 1})
    await running_round(bench, "chat", answered=True)
    rounds = await bench.play("chat", bench.drain(Model(SAY), owner="w2"))
    assert states(rounds) == ["done"]
    assert "1 rounds" in (await bench.messages("chat"))[-1].text


async def test_a_worker_that_lost_the_chat_makes_no_call_and_writes_nothing(bench: Bench) -> None:
    thawed = asyncio.Event()

    async def freeze(_: LLMRequest) -> str:
        await thawed.wait()
        return 'tick("late")\nlook("tea")'

    await bench.say("chat", "hello")
    frozen = await begun(bench, "chat", Model(freeze))

    async def is_running() -> bool:
        return states(await bench.rounds("chat")) == ["running"]

    await eventually(is_running, what="the round to run")
    await bench.let_leases_run_out()
    await bench.play("chat", bench.drain(Model(SAY), owner="w2"))
    before = await bench.rounds("chat")
    thawed.set()
    await frozen
    assert await bench.rounds("chat") == before
    assert bench.journal() == ["heard hello"]


async def test_a_lease_is_checked_before_each_call_once_it_may_have_expired(bench: Bench) -> None:
    await bench.say("chat", "hello")
    leases = bench.services.leases
    lease = await leases.acquire(CHAT, "chat", owner="w1", seconds=0.01, limit_seconds=0)
    assert lease is not None
    await asyncio.sleep(0.02)  # longer than the lease, as for a frozen process
    await lease.ensure()  # no other worker took it: it is renewed
    await asyncio.sleep(0.02)
    assert await leases.acquire(CHAT, "chat", owner="w2", seconds=60) is not None
    with pytest.raises(FencedError):
        await lease.ensure()
    assert lease.is_lost


WAIT = """
import os, time
tick("in")
while not os.path.exists("shared/go"):
    time.sleep(0.01)
"""


async def test_the_end_of_a_round_is_recorded_although_the_database_was_busy(open_bench: OpenBench) -> None:
    bench = await open_bench("sqlite", database={"pool_timeout_seconds": 0.1})
    await bench.say("chat", "hello")
    drain = asyncio.create_task(bench.drain(Model(WAIT)).drain("chat"))
    await bench.noted("tick in")
    refused = asyncio.Event()
    sink = logger.add(lambda line: refused.set() if "round_end_not_recorded" in line else None)
    writer = sqlite3.connect(str(bench.database.url.database), isolation_level=None)
    writer.execute("BEGIN IMMEDIATE")
    async with bench.database.read() as tx:
        chat = await tx.chats.get("chat")
    (bench.services.areas.shared_dir(chat.container_key) / "go").touch()
    async with asyncio.timeout(WAIT_SECONDS):
        await refused.wait()
    writer.execute("ROLLBACK")
    writer.close()
    await drain
    logger.remove(sink)
    rounds = await bench.rounds("chat")
    assert [(item.state.value, item.stop_type) for item in rounds] == [("done", StopType.NORMAL)]


async def test_a_round_that_lost_its_database_is_restarted(open_bench: OpenBench) -> None:
    bench = await open_bench("sqlite", database={"pool_timeout_seconds": 0.1})
    await bench.say("chat", "hello")
    interrupted = asyncio.Event()
    sink = logger.add(lambda line: interrupted.set() if "round_interrupted" in line else None)
    writer = sqlite3.connect(str(bench.database.url.database), isolation_level=None)

    async def answer(_: LLMRequest) -> str:
        writer.execute("BEGIN IMMEDIATE")  # the answer cannot be recorded
        return f"```python\n{SAY}\n```"

    drain = await begun(bench, "chat", Model(answer))
    async with asyncio.timeout(WAIT_SECONDS):
        await interrupted.wait()
    writer.execute("ROLLBACK")
    writer.close()
    await asyncio.gather(drain, return_exceptions=True)
    logger.remove(sink)
    assert states(await bench.rounds("chat")) == ["running"]
    await bench.let_leases_run_out()
    rounds = await bench.play("chat", bench.drain(Model(SAY), owner="w2"))
    assert [(item.state.value, item.attempt) for item in rounds] == [("done", 2)]
    assert [message.text for message in await bench.messages("chat")] == ["hello", "done"]
