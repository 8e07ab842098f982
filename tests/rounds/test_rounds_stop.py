"""Stopping a chat: its running and waiting rounds, their calls, and follow-ups."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from datetime import UTC, datetime

import pytest
from round_bench import Bench, Model, invocation, states
from waiting import WAIT_SECONDS

from nekro.agent.llm import LLMRequest
from nekro.app import use_cases
from nekro.app.rounds.stop import StoppedRounds
from nekro.wire.invocation import Envelope, Invocation
from nekro_agent.errors import CallCancelledError, NotFoundError, OutcomeUnknownError
from nekro_agent.methods import SandboxMethodType
from storage.repositories.rounds import Round, RoundRepository
from storage.states import CallState, RoundState

SAY = 'send_msg_text(_ck, "done")'
LINGER = 'keep("first")\nlinger("it")\nsend_msg_text(_ck, "never said")'


@asynccontextmanager
async def draining(bench: Bench, chat_key: str, model: Model) -> AsyncIterator[None]:
    """Drain concurrently with the block, and wait for the end of the drain."""
    async with asyncio.timeout(WAIT_SECONDS), asyncio.TaskGroup() as group:
        group.create_task(bench.drain(model).drain(chat_key))
        yield


async def stop(bench: Bench, chat_key: str) -> StoppedRounds:
    return await bench.services.stopper.stop(chat_key, reason="enough", wait_seconds=WAIT_SECONDS)


@pytest.mark.extended
async def test_a_program_is_stopped_with_its_calls_and_nothing_follows(bench: Bench) -> None:
    await bench.say("chat", "hello")
    async with draining(bench, "chat", Model(LINGER)):
        await bench.noted("begin it")
        await bench.say("chat", "and another thing")
        report = await stop(bench, "chat")
    assert (len(report.stopped), len(report.cancelled), report.still_running) == (1, 1, ())
    rounds = await bench.rounds("chat")
    assert states(rounds) == ["cancelled", "cancelled"]
    assert (rounds[0].error, rounds[1].error) == ("stopped on request", "enough")
    assert "cancelled it" in bench.journal()
    async with bench.database.read() as tx:
        calls = await tx.calls.of_round(rounds[0].id)
    # The second one is recorded by the stopped worker or by the round's own end, whichever is first.
    assert calls[0].state is CallState.DONE
    assert calls[1].state in (CallState.FAILED, CallState.CANCELLED)
    story = rounds[0].calls or []
    assert [call["method"] for call in story] == ["tests.scene.keep", "tests.scene.linger"]
    assert story[1]["error"].startswith("cancelled: ")
    said = [message.text for message in await bench.messages("chat")]
    assert said == ["hello", "kept first", "and another thing"]


async def test_a_round_waiting_for_the_model_is_stopped(bench: Bench) -> None:
    asked, hung_up = asyncio.Event(), asyncio.Event()

    async def hang(_: LLMRequest) -> str:
        asked.set()
        try:
            await asyncio.Event().wait()
        finally:
            hung_up.set()
        raise AssertionError

    await bench.say("chat", "hello")
    async with draining(bench, "chat", Model(hang)):
        await asked.wait()
        await stop(bench, "chat")
    assert hung_up.is_set()
    assert states(await bench.rounds("chat")) == ["cancelled"]


@pytest.mark.extended
async def test_one_query_reads_the_stop_requests_of_all_rounds_of_a_process(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[frozenset[str]] = []
    look = RoundRepository.cancel_requested

    async def cancel_requested(rounds: RoundRepository, round_ids: Collection[str]) -> set[str]:
        looks.append(frozenset(round_ids))
        return await look(rounds, round_ids)

    monkeypatch.setattr(RoundRepository, "cancel_requested", cancel_requested)
    over = asyncio.Event()

    async def wait(_: LLMRequest) -> str:
        await over.wait()
        return SAY

    chats = ("one", "two", "three")
    for chat in chats:
        await bench.say(chat, "hello")
    drain = bench.drain(Model(wait, wait, wait), slots=3)
    async with asyncio.timeout(WAIT_SECONDS), asyncio.TaskGroup() as group:
        for chat in chats:
            group.create_task(drain.drain(chat))
        running = frozenset[str]()
        while len(running) < len(chats):
            await asyncio.sleep(0.01)
            rounds = [item for chat in chats for item in await bench.rounds(chat)]
            running = frozenset(item.id for item in rounds if item.state is RoundState.RUNNING)
        while running not in looks:
            await asyncio.sleep(0.01)
        first = looks.index(running)
        while len(looks) < first + 3:
            await asyncio.sleep(0.01)
        assert set(looks[first:]) == {running}, "a check asks for some of the rounds only"
        over.set()
    assert [states(await bench.rounds(chat)) for chat in chats] == [["done"]] * 3


async def test_a_chat_that_was_stopped_answers_the_next_message(bench: Bench) -> None:
    await bench.say("chat", "hello")
    await stop(bench, "chat")
    await bench.say("chat", "again")
    rounds = await bench.play("chat", bench.drain(Model(SAY)))
    assert states(rounds) == ["cancelled", "done"]


async def test_a_round_that_ends_while_it_is_being_stopped_has_no_follow_up(bench: Bench) -> None:
    async def stopped_meanwhile(_: LLMRequest) -> str:
        async with bench.database.begin() as tx:
            await tx.rounds.cancel("chat", reason="enough")
        return "1 / 0"

    await bench.say("chat", "hello")
    rounds = await bench.play("chat", bench.drain(Model(stopped_meanwhile)))
    assert states(rounds) == ["cancelled"]


async def running(bench: Bench, chat_key: str) -> Round:
    await bench.say(chat_key, "hello")
    async with bench.database.begin() as tx:
        fence = await tx.chats.acquire(chat_key, owner="w1", lease_seconds=60)
        assert fence is not None
    claimed = await bench.services.ledger.start_next(chat_key, fence=fence, worker="w1")
    assert claimed is not None
    return claimed.round


def saw_something(made: Invocation) -> Envelope:
    """Outcome of the method ``look``, which is an AGENT."""
    now = datetime.now(UTC)
    return Envelope.of(
        call_id=made.call_id,
        type=SandboxMethodType.AGENT,
        value=None,
        text="it",
        worker="w",
        started_at=now,
        finished_at=now,
    )


async def test_a_call_of_a_stopped_round_does_not_start(bench: Bench) -> None:
    round_ = await running(bench, "chat")
    async with bench.database.begin() as tx:
        await tx.rounds.cancel("chat", reason="enough")
    with pytest.raises(CallCancelledError):
        await bench.caller.call(invocation("tests.scene.look", ("x",), call_id="c1", round_=round_), lane="m")
    assert bench.journal() == ["heard hello"]


async def test_a_result_that_arrives_after_the_stop_wakes_no_agent(bench: Bench) -> None:
    """The stop request falls between the claim of an AGENT call and its end."""
    round_ = await running(bench, "chat")
    claims, registry = bench.services.claims, bench.services.registry
    made = invocation("tests.scene.look", ("x",), call_id="c1", round_=round_)
    entry = registry.find("look")
    claim = await claims.claim(entry, made, worker="w")
    async with bench.database.begin() as tx:
        await tx.rounds.cancel("chat", reason="enough")
    ended = await claims.finish(claim, made, saw_something(made))
    assert ended.round_id is None
    assert states(await bench.rounds("chat")) == ["running"]


async def test_a_cancelled_call_records_nothing(bench: Bench) -> None:
    round_ = await running(bench, "chat")
    claims, registry = bench.services.claims, bench.services.registry
    made = invocation("tests.scene.look", ("x",), call_id="c1", round_=round_)
    entry = registry.find("look")
    claim = await claims.claim(entry, made, worker="w")
    async with bench.database.begin() as tx:
        await tx.calls.cancel_round(round_.id, reason="enough")
    with pytest.raises(OutcomeUnknownError):
        await claims.finish(claim, made, saw_something(made))
    assert len(await bench.messages("chat")) == 1


async def test_a_round_of_a_dead_worker_is_stopped_without_a_worker(bench: Bench) -> None:
    await running(bench, "chat")
    await bench.let_leases_run_out()
    report = await stop(bench, "chat")
    assert [item.state.value for item in report.stopped] == ["cancelled"]


async def test_a_round_whose_worker_does_not_answer_is_named(bench: Bench) -> None:
    round_ = await running(bench, "chat")
    report = await bench.services.stopper.stop("chat", reason="enough", wait_seconds=0.2)
    assert [item.id for item in report.still_running] == [round_.id]


async def test_an_unknown_chat_cannot_be_stopped(bench: Bench) -> None:
    with pytest.raises(NotFoundError, match="'nobody'"):
        await stop(bench, "nobody")


@pytest.mark.extended
async def test_a_reset_stops_the_round_before_the_new_conversation_starts(bench: Bench) -> None:
    await bench.say("chat", "hello")
    async with draining(bench, "chat", Model(LINGER)):
        await bench.noted("begin it")
        await use_cases.reset_chat(bench.services, "chat")
    assert states(await bench.rounds("chat")) == ["cancelled"]
    assert await bench.messages("chat") == []
    assert len(await bench.messages("chat", with_past=True)) == 2
    model = Model(SAY)
    await bench.say("chat", "new")
    await bench.play("chat", bench.drain(model))
    assert "kept first" not in model.prompts[0]
