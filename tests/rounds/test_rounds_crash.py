"""A worker that dies, freezes or loses its database: the chat continues and nothing happens twice."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Awaitable, Callable
from datetime import timedelta

import pytest
from loguru import logger
from round_bench import Bench, Model, invocation, states
from sqlalchemy import select, update
from test_rounds_story import described
from waiting import WAIT_SECONDS, eventually

from nekro.agent.llm import LLMRequest
from nekro.app.calls.journal import CallIds
from nekro.app.leases import CHAT
from nekro.cli.views.round_text import round_lines
from nekro.operations.turns import read_turn
from nekro.sandbox.models import StopType
from nekro.wire.values import encode_arguments
from nekro_agent.errors import FencedError
from storage.repositories.rounds import Round, RoundReport
from storage.states import TriggerKind
from storage.tables import CALLS

OpenBench = Callable[..., Awaitable[Bench]]
SAY = 'send_msg_text(_ck, "done")'


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


GO_ON = """
import os, time
kept = keep("a promise")
numbers = [tick(str(number)) for number in range(3)]
while not os.path.exists("shared/go"):
    time.sleep(0.01)
print(kept, numbers, tick("late"))
send_msg_text(_ck, f"said {len(numbers)}")
"""


async def let_go(bench: Bench, chat_key: str) -> None:
    """Let the code of ``GO_ON`` go on."""
    async with bench.database.read() as tx:
        chat = await tx.chats.get(chat_key)
    (bench.services.areas.shared_dir(chat.container_key) / "go").touch()


async def test_a_program_runs_on_although_its_worker_died(bench: Bench) -> None:
    await bench.say("chat", "hello", user_id="ada")
    first = await begun(bench, "chat", Model(GO_ON))
    await bench.noted("tick 2")
    await die(first)
    await let_go(bench, "chat")
    model = Model(SAY)
    (round_,) = await bench.play("chat", bench.drain(model, owner="w2"))
    assert (round_.state.value, round_.stop_type, round_.worker) == ("done", StopType.NORMAL, "w2")
    assert model.prompts == [] and (round_.prompt_chars or 0) > 1000
    assert bench.journal() == ["heard hello", "keep a promise", *(f"tick {n}" for n in (0, 1, 2, "late"))]
    assert round_.output == "kept a promise ['0', '1', '2'] late\n"
    assert [message.text for message in await bench.messages("chat")] == [
        "hello",
        "kept a promise",
        "said 3",
    ]
    made = [call["method"].rpartition(".")[2] for call in round_.calls or []]
    assert made == ["keep", "tick", "tick", "tick", "tick", "send_msg_text"]
    async with bench.database.read() as tx:
        events = [event.type for event in await tx.events.of_turn(round_.turn_id)]
    assert events.count("program.resumed") == 1 and events.count("round.started") == 1
    assert events.count("call.started") == events.count("call.ended") == 6
    (shown,) = (await read_turn(bench.services, round_.turn_id)).rounds
    attempts = [(one.number, one.worker, one.outcome, one.is_resumed) for one in shown.attempts]
    assert attempts == [(1, "w1", "lost", False), (2, "w2", "ended", True)]
    lost_at = shown.attempts[0].last_event_at
    assert lost_at is not None and lost_at <= shown.attempts[1].started_at


@pytest.mark.parametrize("kind", ["sqlite"])
async def test_attack_the_same_program_in_another_chat_reads_nothing_of_a_lost_one(bench: Bench) -> None:
    await bench.say("chat", "hello", user_id="ada")
    first = await begun(bench, "chat", Model(GO_ON))
    await bench.noted("tick 2")
    await die(first)
    await bench.say("other", "hello", user_id="ada")
    await let_go(bench, "other")
    (theirs,) = await bench.play("other", bench.drain(Model(GO_ON), owner="w2"))
    assert theirs.output == "kept a promise ['0', '1', '2'] late\n"
    assert [bench.journal().count(line) for line in ("keep a promise", "tick 0", "tick late")] == [2, 2, 1]
    await let_go(bench, "chat")
    (ours,) = await bench.play("chat", bench.drain(Model(SAY), owner="w2"))
    assert (ours.attempt, ours.output) == (2, theirs.output)
    assert [bench.journal().count(line) for line in ("keep a promise", "tick 0", "tick late")] == [2, 2, 2]


@pytest.mark.extended
async def test_code_that_cannot_be_run_again_is_not_and_the_model_is_informed(
    kind: str, open_bench: OpenBench
) -> None:
    bench = await open_bench(kind, agent={"journal_bytes": 0})
    await bench.say("chat", "hello", user_id="ada")
    first = await begun(bench, "chat", Model(GO_ON))
    await bench.noted("tick 2")
    await die(first)
    model = Model(SAY)
    rounds = await bench.play("chat", bench.drain(model, owner="w2"))
    assert [(item.trigger_kind, item.state.value, item.number) for item in rounds] == [
        (TriggerKind.MESSAGE, "done", 1),
        (TriggerKind.ROUND, "done", 2),
    ]
    interrupted = rounds[0]
    assert (interrupted.stop_type, interrupted.worker, interrupted.attempt) == (StopType.ERROR, "w1", 1)
    assert "NEKRO_AGENT__JOURNAL_BYTES" in (interrupted.not_resumable or "")
    assert [call["method"] for call in interrupted.calls or []] == ["tests.scene.keep"]
    assert rounds[1].user_id == "ada"
    (prompt,) = model.prompts
    assert "went down" in prompt and "`keep`: done: kept a promise." in prompt
    assert bench.journal().count("keep a promise") == 1
    assert "said 3" not in [message.text for message in await bench.messages("chat")]


async def call_of(bench: Bench, method: str, argument: str, round_: Round, *, call_id: str = "") -> None:
    """Run a call of a round's program in a worker of methods; a given id is one that it does not make."""
    ids = CallIds(bench.services.dispatcher.secrets.ids(round_.id))
    call_id = call_id or ids.next(method, encode_arguments((argument,), {}).encode())
    made = invocation(method, (argument,), call_id=call_id, round_=round_)
    await bench.caller.call(made, lane="methods")


async def running_round(bench: Bench, chat_key: str, *, code: str, not_resumable: str | None = "") -> Round:
    """A round of a crashed worker: running, answered with code, with an expired lease."""
    await bench.say(chat_key, "hello")
    async with bench.database.begin() as tx:
        fence = await tx.chats.acquire(chat_key, owner="w1", lease_seconds=60)
        assert fence is not None
    claimed = await bench.services.ledger.start_next(chat_key, fence=fence, worker="w1")
    assert claimed is not None
    report = RoundReport(answer=f"```python\n{code}\n```", code=code, not_resumable=not_resumable)
    async with bench.database.begin() as tx:
        await tx.rounds.record(claimed.round.id, fence=fence, report=report)
    await bench.let_leases_run_out()
    return claimed.round


async def test_a_result_that_woke_the_model_wakes_it_once_although_its_round_was_interrupted(
    bench: Bench,
) -> None:
    interrupted = await running_round(bench, "chat", code="look('tea')")
    await call_of(bench, "tests.scene.look", "tea", interrupted)
    model = Model(SAY)
    rounds = await bench.play("chat", bench.drain(model, owner="w2"))
    assert [(item.trigger_kind, item.stop_type) for item in rounds] == [
        (TriggerKind.MESSAGE, StopType.AGENT),
        (TriggerKind.CALL, StopType.NORMAL),
    ]
    assert model.prompts[0].count("seen: tea") == 1
    assert bench.journal().count("look tea") == 1


async def test_a_program_of_a_worker_of_an_earlier_version_is_not_run_again(bench: Bench) -> None:
    interrupted = await running_round(bench, "chat", code="tick('again')", not_resumable=None)
    await call_of(bench, "tests.scene.keep", "old", interrupted, call_id="c1")
    model = Model(SAY)
    rounds = await bench.play("chat", bench.drain(model, owner="w2"))
    assert [item.stop_type for item in rounds] == [StopType.ERROR, StopType.NORMAL]
    assert "went down" in model.prompts[0] and "`keep`: done: kept old" in model.prompts[0]
    assert bench.journal() == ["heard hello", "keep old"]


async def test_a_program_that_takes_another_course_is_stopped_before_an_effect(bench: Bench) -> None:
    interrupted = await running_round(bench, "chat", code="tick('before')\nkeep('new')")
    await call_of(bench, "tests.scene.keep", "old", interrupted, call_id="c1")
    model = Model(SAY)
    rounds = await bench.play("chat", bench.drain(model, owner="w2"))
    assert [item.stop_type for item in rounds] == [StopType.DIVERGED, StopType.NORMAL]
    assert bench.journal() == ["heard hello", "keep old", "tick before"]
    assert "`keep`: done: kept old." in model.prompts[0]
    assert "same calls as before" in model.prompts[0]


SLOW_THREAD = """
import threading, time
def late():
    time.sleep(1.5)
    keep("late")
thread = threading.Thread(target=late)
thread.start()
keep("first")
keep("new")
thread.join()
"""


async def test_another_order_of_threads_is_no_other_course(bench: Bench) -> None:
    interrupted = await running_round(bench, "chat", code=SLOW_THREAD)
    for text in ("first", "late"):
        await call_of(bench, "tests.scene.keep", text, interrupted)
    async with bench.database.begin() as tx:  # the first program waited long between its calls
        asked = select(CALLS.c.requested_at).order_by(CALLS.c.requested_at.desc()).limit(1)
        last = (await tx.connection.execute(asked)).scalar_one()
        moved = update(CALLS).where(CALLS.c.requested_at == last)
        await tx.connection.execute(moved.values(requested_at=last + timedelta(seconds=3)))
    model = Model(SAY)
    rounds = await bench.play("chat", bench.drain(model, owner="w2"))
    assert [item.stop_type for item in rounds] == [StopType.NORMAL] and model.prompts == []
    assert bench.journal() == ["heard hello", "keep first", "keep late", "keep new"]


async def test_equal_programs_of_two_chats_have_journals_of_their_own(bench: Bench) -> None:
    code = 'print(keep("same"), tick("same"))'
    interrupted = await running_round(bench, "chat", code=code)
    await call_of(bench, "tests.scene.keep", "same", interrupted)
    await bench.say("other", "hello")
    (other,) = await bench.play("other", bench.drain(Model(code)))
    (round_,) = await bench.play("chat", bench.drain(Model(SAY), owner="w2"))
    assert other.output == round_.output == "kept same same\n"
    assert bench.journal().count("keep same") == bench.journal().count("tick same") == 2
    ids = [call["id"] for one in (other, round_) for call in one.calls or []]
    assert len(set(ids)) == 4


LARGE = """
lots = [tick(str(number) + "x" * 5000) for number in range(10)]
keep("a promise")
hold("it")
"""


async def test_a_program_with_too_large_answers_says_so_and_is_not_run_again(
    kind: str, open_bench: OpenBench
) -> None:
    bench = await open_bench(kind, agent={"journal_bytes": 20_000})
    await bench.say("chat", "hello")
    first = await begun(bench, "chat", Model(LARGE))
    await bench.noted("begin it")
    await die(first)
    model = Model(SAY)
    rounds = await bench.play("chat", bench.drain(model, owner="w2"))
    assert [item.stop_type for item in rounds] == [StopType.ERROR, StopType.NORMAL]
    assert "20000 bytes (NEKRO_AGENT__JOURNAL_BYTES)" in (rounds[0].not_resumable or "")
    assert "went down" in model.prompts[0] and "`keep`: done" in model.prompts[0]
    assert bench.journal().count("keep a promise") == bench.journal().count("begin it") == 1
    shown = "\n".join(round_lines((await described(bench))[0]))
    assert "not to be run again if its worker dies: its calls have more than 20000 bytes" in shown


async def test_a_program_that_ends_before_the_effects_that_it_had_is_not_taken_for_done(bench: Bench) -> None:
    interrupted = await running_round(bench, "chat", code="tick('before')")
    await call_of(bench, "tests.scene.keep", "old", interrupted, call_id="c1")
    rounds = await bench.play("chat", bench.drain(Model(SAY), owner="w2"))
    assert [item.stop_type for item in rounds] == [StopType.DIVERGED, StopType.NORMAL]


async def test_messages_that_come_meanwhile_are_answered_after_the_program(bench: Bench) -> None:
    await running_round(bench, "chat", code=SAY)
    await bench.say("chat", "and now?")
    model = Model('send_msg_text(_ck, "now")')
    rounds = await bench.play("chat", bench.drain(model, owner="w2"))
    assert [(item.state.value, item.merged_into) for item in rounds] == [("done", None), ("done", None)]
    assert len(model.prompts) == 1 and "and now?" in model.prompts[0]
    assert [one.text for one in await bench.messages("chat")] == ["hello", "and now?", "done", "now"]


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


async def let_it_run_out_of_attempts(bench: Bench) -> None:
    """As if the program had killed all workers that ran it."""
    async with bench.database.begin() as tx:
        await tx.connection.exec_driver_sql("UPDATE rounds SET attempt = 3")


async def test_an_interrupted_last_round_ends_the_turn_with_a_message(
    kind: str, open_bench: OpenBench
) -> None:
    bench = await open_bench(kind, agent={"rounds_per_turn": 1})
    await running_round(bench, "chat", code="keep('new')")
    await let_it_run_out_of_attempts(bench)
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
    bench = await open_bench("sqlite", database={"pool_timeout_seconds": 1})
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
    bench = await open_bench("sqlite", database={"pool_timeout_seconds": 1})
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
