"""Events of turns, rounds and calls: in order, once each, and one end per turn."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import psycopg
import pytest
from cancellation import cancelled_at
from round_bench import Bench, Model, invocation, states
from waiting import WAIT_SECONDS, eventually

from nekro.agent.llm import LLMAnswer, LLMRequest
from nekro.app.chats.events import LiveText
from nekro.base.redaction import Redactor
from nekro.operations.actor import LOCAL, Actor
from nekro.operations.turns import get_call, read_turn
from nekro_agent.errors import LLMError, NotFoundError, StorageUnavailableError
from nekro_agent.methods import SandboxMethodType
from nekro_client import models
from nekro_client.event_types import EventType
from storage.engine import Database
from storage.repositories.events import TOOLS_NOT_KEPT, ChatEvent
from storage.repositories.rounds import RoundReport
from workers.rounds import attempt_events as module
from workers.rounds.attempt_events import AttemptEvents

CHAT = "c"
SAY = 'send_msg_text(_ck, "done")'


@pytest.fixture
def kind() -> str:
    """One kind of database: the rows of events are tested on both."""
    return "sqlite"


async def events_of(bench: Bench, chat_key: str = CHAT) -> list[ChatEvent]:
    async with bench.database.read() as tx:
        return await tx.events.after(chat_key, number=0, limit=1000)


async def ends_of(bench: Bench) -> dict[str, dict[str, Any]]:
    """Data of the events that end turns; each turn has at most one, and exactly those that began."""
    found = await events_of(bench)
    ends = [event for event in found if event.type == EventType.TURN_ENDED]
    begun = Counter(event.turn_id for event in found if event.type == EventType.TURN_STARTED)
    assert Counter(event.turn_id for event in ends) == begun
    return {event.turn_id or "": event.data for event in ends}


async def test_a_secret_is_removed_before_a_long_text_is_cut(bench: Bench) -> None:
    secret = "hunter-22"
    model = Model(f'look("x" * 3900 + "{secret}" * 50)', SAY)
    await bench.say(CHAT, "hello")
    await bench.play(CHAT, bench.drain(model, slots=2, redact=Redactor([secret])))
    ends = [event.data for event in await events_of(bench) if event.type == EventType.CALL_ENDED]
    (shown,) = [data["value"] for data in ends if data["type"] == "agent"]
    assert len(shown) == 4000 and "x" * 3900 in shown
    assert "hun" not in shown


async def test_a_turn_has_events_of_its_messages_rounds_and_calls(bench: Bench) -> None:
    message_id = await bench.say(CHAT, "hello")
    model = Model('look("tea")', f'print(tick("one"))\n{SAY}')
    first, second = await bench.play(CHAT, bench.drain(model, slots=2))
    found = await events_of(bench)
    assert [event.number for event in found] == list(range(1, len(found) + 1))
    assert [event.type for event in found if event.type not in ("call.started", "call.ended")] == [
        "message.received",
        "turn.started",
        "round.started",
        "model.requested",
        "code.ready",
        "message.noted",
        "round.ended",
        "round.started",
        "model.requested",
        "code.ready",
        "message.sent",
        "round.ended",
        "turn.ended",
    ]
    assert {event.turn_id for event in found} == {first.id}
    assert found[0].message_id == message_id and found[0].data["text"] == "hello"
    assert found[1].data["cause"] == {"kind": "message", "id": message_id}
    sent = next(event for event in found if event.type == "message.sent")
    assert (sent.round_id, sent.data["text"]) == (second.id, "done")
    calls = [event for event in found if event.type.startswith("call.")]
    assert Counter((event.type, event.round_id) for event in calls) == {
        ("call.started", first.id): 1,
        ("call.ended", first.id): 1,
        ("call.started", second.id): 2,
        ("call.ended", second.id): 2,
    }
    tick = [event for event in calls if event.data["method"].endswith(".tick")]
    assert [event.data.get("arguments", event.data.get("value")) for event in tick] == [
        [["one"], {}],
        "one",
    ]
    assert found[-1].data == {"state": "done"}


@pytest.mark.extended
async def test_the_tree_of_a_turn_has_everything(bench: Bench) -> None:
    await bench.say(CHAT, "hello")
    model = Model('look("tea")', f'print(tick("one"))\n{SAY}')
    first, second = await bench.play(CHAT, bench.drain(model, slots=2))
    turn = await read_turn(bench.services, first.id)
    assert (turn.state, turn.error, turn.merged_into) == ("done", None, None)
    assert [(item.id, item.state, item.stop_type) for item in turn.rounds] == [
        (first.id, "done", "AGENT"),
        (second.id, "done", "NORMAL"),
    ]
    assert turn.rounds[1].output is not None and "one" in turn.rounds[1].output
    look, tick = turn.rounds[0].calls[0], turn.rounds[1].calls[0]
    assert (look.arguments, look.state, look.attempts, look.follow_up) == (
        [["tea"], {}],
        "done",
        1,
        second.id,
    )
    assert (tick.arguments, tick.value, tick.state) == ([["one"], {}], "one", "done")
    assert (tick.line, turn.rounds[1].calls[1].line, tick.round_attempt) == (1, 2, 1)
    assert [(one.number, one.outcome) for one in turn.rounds[0].attempts] == [(1, "ended")]
    assert turn.rounds[0].prompted_at is not None and turn.rounds[0].model_tries == 1
    bare = await read_turn(bench.services, first.id, with_values=False)
    assert [call.arguments for item in bare.rounds for call in item.calls] == [None] * 3
    local = Actor(services=bench.services, identity=LOCAL)
    assert await get_call(local, first.id, tick.id) == tick
    for turn_id, call_id in ((first.id, "none"), ("none", tick.id)):
        with pytest.raises(NotFoundError):
            await get_call(local, turn_id, call_id)
    assert [(item.kind, item.text) for item in turn.messages] == [
        ("user", "hello"),
        ("system", "seen: tea"),
        ("assistant", "done"),
    ]


@pytest.mark.extended
@pytest.mark.parametrize("database", ["sqlite", "postgres"])
async def test_a_turn_of_an_older_release_may_keep_no_tool_calls(
    database: str, open_bench: Callable[..., Awaitable[Bench]], monkeypatch: pytest.MonkeyPatch
) -> None:
    add = AttemptEvents._add

    def add_as_before(self: AttemptEvents, kind: EventType, *, data: dict[str, Any], **fields: Any) -> None:
        if kind is EventType.CODE_READY:
            data = {**TOOLS_NOT_KEPT, **data}
        if data.get("type") != SandboxMethodType.TOOL:
            add(self, kind, data=data, **fields)

    monkeypatch.setattr(AttemptEvents, "_add", add_as_before)
    bench = await open_bench(database, agent={"lease_seconds": 30})
    await bench.say(CHAT, "hello")
    model = Model(f'print(tick("one"))\n{SAY}\nhold("it")', 'look("tea")', SAY)
    work = asyncio.create_task(bench.drain(model).drain(CHAT))

    async def sent() -> bool:
        return "message.sent" in [event.type for event in await events_of(bench)]

    await eventually(sent, what="the message of a call that is not kept, while its round runs")
    (running,) = await bench.rounds(CHAT)
    await bench.services.stopper.stop(CHAT, reason="enough", wait_seconds=WAIT_SECONDS)
    await work
    tree = (await read_turn(bench.services, running.id)).rounds[0]
    assert tree.tool_calls_kept is False
    assert {call.method.rpartition(".")[2]: call.arguments for call in tree.calls}["tick"] is None
    await bench.say(CHAT, "and now?")
    await bench.play(CHAT, bench.drain(model, slots=2))
    kept = {event.data["method"] for event in await events_of(bench) if event.type == "call.started"}
    assert "tests.scene.look" in kept and "tests.scene.tick" not in kept


async def test_merged_turns_end_with_the_round_that_took_them(bench: Bench) -> None:
    for text in ("one", "two", "three"):
        await bench.say(CHAT, text)
    rounds = await bench.play(CHAT, bench.drain(Model(SAY)))
    assert states(rounds) == ["done", "merged", "merged"]
    ends = await ends_of(bench)
    first = rounds[0].id
    assert ends[first] == {"state": "done"}
    for merged in rounds[1:]:
        assert ends[merged.id] == {"state": "done", "merged_into": first}
        turn = await read_turn(bench.services, merged.id)
        assert (turn.state, turn.merged_into) == ("done", first)
        assert [item.id for item in turn.rounds] == [first, merged.id]


async def test_a_failed_turn_has_an_error(bench: Bench) -> None:
    async def refuse(_request: LLMRequest) -> str:
        raise LLMError("no model")

    await bench.say(CHAT, "hello")
    (failed,) = await bench.play(CHAT, bench.drain(Model(refuse)))
    assert await ends_of(bench) == {
        failed.id: {"state": "failed", "error": {"code": "llm", "text": "no model"}}
    }
    turn = await read_turn(bench.services, failed.id)
    assert turn.error == models.TurnError(code="llm", text="no model")


async def test_a_turn_that_used_up_its_rounds_has_failed(
    kind: str, open_bench: Callable[..., Awaitable[Bench]]
) -> None:
    bench = await open_bench(kind, agent={"lease_seconds": 30, "rounds_per_turn": 2})
    await bench.say(CHAT, "hello")
    rounds = await bench.play(CHAT, bench.drain(Model("1 / 0")))
    assert states(rounds) == ["done", "done"]
    (end,) = (await ends_of(bench)).values()
    assert (end["state"], end["error"]["code"]) == ("failed", "turn_limit")


async def test_waiting_and_running_turns_end_when_they_are_cancelled(bench: Bench) -> None:
    await bench.say(CHAT, "hold")
    drain = bench.drain(Model('hold("it")', SAY))
    work = asyncio.create_task(drain.drain(CHAT))
    await bench.noted("begin it")
    await bench.say(CHAT, "waits")
    stopped = await bench.services.stopper.stop(CHAT, reason="no more", wait_seconds=WAIT_SECONDS)
    await work
    assert (len(stopped.stopped), len(stopped.cancelled)) == (1, 1)
    assert [end["state"] for end in (await ends_of(bench)).values()] == ["cancelled", "cancelled"]


@pytest.mark.extended
async def test_a_cancelled_turn_does_not_cancel_others_that_its_round_had_taken(bench: Bench) -> None:
    await bench.say(CHAT, "first")
    await bench.say(CHAT, "second")
    drain = bench.drain(Model('hold("it")', SAY))
    work = asyncio.create_task(drain.drain(CHAT))
    await bench.noted("begin it")
    first, second = await bench.rounds(CHAT)
    assert second.merged_into == first.id
    await bench.services.stopper.stop(CHAT, reason="no", wait_seconds=WAIT_SECONDS, turn_id=first.id)
    await work
    await bench.play(CHAT, drain)
    assert states(await bench.rounds(CHAT)) == ["cancelled", "done"]
    assert await ends_of(bench) == {first.id: {"state": "cancelled"}, second.id: {"state": "done"}}


async def test_a_turn_is_cancelled_alone(bench: Bench) -> None:
    await bench.say(CHAT, "hold")
    drain = bench.drain(Model('hold("it")\n', SAY))
    work = asyncio.create_task(drain.drain(CHAT))
    await bench.noted("begin it")
    await bench.say(CHAT, "waits")
    running, waiting = await bench.rounds(CHAT)
    stopped = await bench.services.stopper.stop(CHAT, reason="no", wait_seconds=0, turn_id=waiting.id)
    assert [item.id for item in stopped.cancelled] == [waiting.id] and not stopped.still_running
    assert states(await bench.rounds(CHAT)) == ["running", "cancelled"]
    await bench.services.stopper.stop(CHAT, reason="no", wait_seconds=WAIT_SECONDS, turn_id=running.id)
    await work
    assert len(await ends_of(bench)) == 2


async def test_a_round_of_a_dead_worker_ends_its_turn_once(bench: Bench) -> None:
    """Its worker died in each attempt: before the answer until the attempts are used up."""
    await bench.say(CHAT, "hello")
    await bench.say(CHAT, "and more")
    attempts = bench.settings.broker.max_deliveries
    for attempt in range(attempts):
        async with bench.database.begin() as tx:
            fence = await tx.chats.acquire(CHAT, owner=f"w{attempt}", lease_seconds=30)
            assert fence is not None
        await bench.services.ledger.start_next(CHAT, fence=fence, worker=f"w{attempt}")
        await bench.let_leases_run_out()
    rounds = await bench.play(CHAT, bench.drain(Model(SAY)))
    assert states(rounds) == ["failed", "merged"]
    ends = await ends_of(bench)
    assert {(end["state"], end["error"]["code"]) for end in ends.values()} == {("failed", "worker_died")}
    found = await events_of(bench)
    started = [event for event in found if event.type == "round.started"]
    assert [event.data["attempt"] for event in started] == list(range(1, attempts + 1))
    assert [event.type for event in found].count("round.ended") == 1
    tree = (await read_turn(bench.services, rounds[0].id)).rounds[0]
    assert [(one.number, one.worker, one.outcome) for one in tree.attempts] == [
        (number, f"w{number - 1}", "lost" if number < attempts else "ended")
        for number in range(1, attempts + 1)
    ]
    assert tree.attempts[-1].ended_at is not None and tree.attempts[0].last_event_at is not None


@pytest.mark.parametrize("database", ["sqlite", pytest.param("postgres", marks=pytest.mark.extended)])
async def test_events_are_written_once_wherever_a_stop_interrupts_their_transaction(
    database: str, open_bench: Callable[..., Awaitable[Bench]], monkeypatch: pytest.MonkeyPatch
) -> None:
    # psycopg yields to a busy loop even where it need not wait for the server.
    monkeypatch.setattr(psycopg.waiting, "MAX_BUSY_TIME", 0)
    # A commit on the loop cannot be interrupted; every 16th one on SQLite runs on a thread.
    monkeypatch.setattr("storage.driver.sqlite._COMMITS_HERE", 0)
    bench = await open_bench(database)
    llm = LLMAnswer(
        text="", model="m", prompt_tokens=1, answer_tokens=1, finish_reason="stop", tries=1, cost=0.0
    )
    report, ledger = RoundReport(prompt_chars=1, model="m", answer="", code="1"), bench.services.ledger
    for wait in itertools.count(1):
        chat_key = f"chat {wait}"
        await bench.say(chat_key, "hello")
        async with bench.database.begin() as tx:
            fence = await tx.chats.acquire(chat_key, owner="w", lease_seconds=30)
        assert fence is not None
        claimed = await ledger.start_next(chat_key, fence=fence, worker="w")
        assert claimed is not None
        events = AttemptEvents(bench.database, bench.services.publisher, claimed.round, fence=fence)
        events.model_requested(LLMRequest(messages=()))
        work = cancelled_at(ledger.answered(claimed, report, llm, events, fence=fence), wait)
        outcome = (await asyncio.gather(work, return_exceptions=True))[0]
        await ledger.stop(claimed, (), events, fence=fence)
        await events.close()
        found = Counter(event.type for event in await events_of(bench, chat_key))
        assert (found["model.requested"], found["code.ready"]) == (1, 1), f"cancelled at wait {wait}"
        if outcome is None:
            break
        assert isinstance(outcome, asyncio.CancelledError)
    assert wait > 1


@pytest.mark.extended
async def test_a_result_after_the_end_of_its_turn_begins_another_turn(bench: Bench) -> None:
    await bench.say(CHAT, "hello")
    (ended,) = await bench.play(CHAT, bench.drain(Model(SAY)))
    call = invocation("tests.scene.look", ("late",), call_id="late", round_=ended)
    envelope = await bench.caller.call(call, lane="methods")
    rounds = await bench.play(CHAT, bench.drain(Model(SAY)))
    assert envelope.round_id == rounds[-1].id == rounds[-1].turn_id
    assert set(await ends_of(bench)) == {ended.id, rounds[-1].id}


async def test_calls_are_recorded_while_the_round_runs(bench: Bench) -> None:
    await bench.say(CHAT, "hold")
    drain = bench.drain(Model('tick("a")\nhold("it")', SAY))
    work = asyncio.create_task(drain.drain(CHAT))

    async def seen() -> list[str]:
        found = [event.type for event in await events_of(bench)]
        return found if found.count("call.started") == 2 else []

    found = await eventually(seen, what="the events of the calls")
    assert found.count("call.ended") == 1 and "round.ended" not in found
    (running,) = await bench.rounds(CHAT)
    turn = await read_turn(bench.services, running.id)
    assert turn.state == "running"
    assert [(call.method, call.state) for call in turn.rounds[0].calls] == [
        ("tests.scene.tick", "done"),
        ("tests.scene.hold", "running"),
    ]
    await bench.services.stopper.stop(CHAT, reason="enough", wait_seconds=WAIT_SECONDS)
    await work


async def test_events_of_a_batch_whose_commit_is_in_doubt_are_recorded_once(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost: list[str] = []
    begin = Database.begin

    class Lossy:
        """Commits, and reports that the connection broke."""

        def __init__(self, database: Database) -> None:
            self._inner = begin(database)

        async def __aenter__(self) -> Any:
            self.transaction = await self._inner.__aenter__()
            return self.transaction

        async def __aexit__(self, *error: Any) -> Any:
            is_batch = asyncio.current_task().get_name() == "nekro-round-events"  # type: ignore[union-attr]
            result = await self._inner.__aexit__(*error)
            if is_batch and not lost:
                lost.append("commit")
                raise StorageUnavailableError("the connection broke")
            return result

    # The callbacks of the lost commit must not run, as they would not when the connection breaks.
    real = module.AttemptEvents.take

    async def take(self: Any, transaction: Any, **options: Any) -> None:
        await real(self, transaction, **options)
        if asyncio.current_task().get_name() == "nekro-round-events" and not lost:  # type: ignore[union-attr]
            transaction._callbacks.clear()

    monkeypatch.setattr(Database, "begin", lambda database: Lossy(database))
    monkeypatch.setattr(module.AttemptEvents, "take", take)
    await bench.say(CHAT, "hold")
    drain = bench.drain(Model('tick("a")\nkeep("b")\nhold("it")', SAY))
    work = asyncio.create_task(drain.drain(CHAT))
    await bench.noted("begin it")
    await eventually(lambda: lost, what="the lost commit")
    await bench.services.stopper.stop(CHAT, reason="enough", wait_seconds=WAIT_SECONDS)
    await work
    calls = [event for event in await events_of(bench) if event.type.startswith("call.")]
    assert Counter((event.type, event.data["method"]) for event in calls) == {
        (kind, f"tests.scene.{name}"): 1
        for kind in ("call.started", "call.ended")
        for name in ("tick", "keep", "hold")
    }


async def test_answer_and_output_are_published_while_they_come(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, dict[str, Any]]] = []

    def live(chat_key: str, event: dict[str, Any]) -> bool:
        seen.append((chat_key, event))
        return True

    async def answer(request: LLMRequest) -> str:
        assert request.on_delta is not None
        request.on_delta(1, "pri")
        request.on_delta(2, "print(1")
        request.on_delta(2, ")")
        return 'print("early")\nhold("it")'

    monkeypatch.setattr(bench.services.publisher, "live", live)
    await bench.say(CHAT, "hello")
    work = asyncio.create_task(bench.drain(Model(answer, SAY)).drain(CHAT))
    await eventually(lambda: any(event["type"] == "output.chunk" for _, event in seen), what="the output")
    (running,) = await bench.rounds(CHAT)
    assert running.state.value == "running"
    await bench.services.stopper.stop(CHAT, reason="enough", wait_seconds=WAIT_SECONDS)
    await work
    assert {(chat, event["turn_id"], event["round_id"]) for chat, event in seen} == {
        (CHAT, running.id, running.id)
    }
    deltas = [event["data"] for _, event in seen if event["type"] == "model.delta"]
    assert [data["try"] for data in deltas] == sorted(data["try"] for data in deltas)
    assert "".join(data["text"] for data in deltas if data["try"] == 2) == "print(1)"
    output = [event["data"] for _, event in seen if event["type"] == "output.chunk"]
    assert output[0]["offset"] == 0
    assert "".join(data["text"] for data in output) == "early\n"


async def test_live_text_is_bounded_and_says_where_it_belongs() -> None:
    seen: list[dict[str, Any]] = []
    text = LiveText(seen.append, seconds=0.01)
    text.begin({"try": 1})
    text.add("a")
    assert seen == [{"try": 1, "offset": 0, "text": "a"}]
    for _ in range(3):
        text.add("b" * 5_000)
    await eventually(lambda: len(seen) == 2, what="the waiting text")
    assert (seen[1]["offset"], len(seen[1]["text"])) == (1, 8_000)
    text.add("c")
    text.flush()
    assert seen[2]["offset"] == 15_001 and seen[2]["text"] == "c"


def told(found: list[ChatEvent]) -> list[tuple[str, str]]:
    """What calls did and wrote, in order."""
    names = {
        event.call_id: event.data["method"].rpartition(".")[2]
        for event in found
        if event.type == "call.started"
    }
    return [
        (event.type, event.data["text"] if event.message_id else names[event.call_id])
        for event in found
        if event.call_id is not None
    ]


def as_coded(*texts: str) -> list[tuple[str, str]]:
    """What ``told`` returns for ``tick`` and ``send_msg_text`` of each text, by turns."""
    return [
        step
        for text in texts
        for step in (
            ("call.started", "tick"),
            ("call.ended", "tick"),
            ("call.started", "send_msg_text"),
            ("message.sent", text),
            ("call.ended", "send_msg_text"),
        )
    ]


@pytest.mark.extended
@pytest.mark.parametrize("pause", [0.0, 0.02, module._PAUSE_SECONDS, 60.0])
async def test_a_message_follows_the_call_that_wrote_it_and_what_was_called_before(
    bench: Bench, pause: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Messages are written at once, calls in batches: after ``pause``, at the latest with the round's end."""
    monkeypatch.setattr(module, "FLUSH_SECONDS", min(pause, module.FLUSH_SECONDS) if pause < 60 else pause)
    monkeypatch.setattr(module, "_PAUSE_SECONDS", pause)
    texts = [f"{number}" for number in range(6)]
    code = f"for text in {texts}:\n    tick(text)\n    send_msg_text(_ck, text)"
    for _ in range(3):
        await bench.say(CHAT, "hello")
        await bench.play(CHAT, bench.drain(Model(code)))
    found = await events_of(bench)
    assert told(found) == as_coded(*texts) * 3
    assert [event.number for event in found] == list(range(1, len(found) + 1))
    sent = [event for event in found if event.type == "message.sent"]
    assert [event.message_id for event in sent] == [
        message.id for message in await bench.messages(CHAT) if message.kind == "assistant"
    ]


@pytest.mark.extended
@pytest.mark.parametrize("pause", [0.0, 60.0])
async def test_a_job_follows_the_call_that_started_it(
    bench: Bench, pause: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Jobs are written at once, calls in batches, as messages are."""
    monkeypatch.setattr(module, "FLUSH_SECONDS", pause)
    monkeypatch.setattr(module, "_PAUSE_SECONDS", pause)
    for _ in range(2):
        await bench.say(CHAT, "hello")
        await bench.play(CHAT, bench.drain(Model('brew("tea")\nbrew("soup")')))
    found = await events_of(bench)
    steps = ("call.started", "job.started", "message.sent", "job.ended", "call.ended")
    of_calls = [event for event in found if event.call_id is not None]
    assert [event.type for event in of_calls] == list(steps) * 4
    # Each of the five is of the same call.
    assert [len({event.call_id for event in of_calls[at : at + 5]}) for at in range(0, 20, 5)] == [1] * 4
    jobs = [event.data["job_id"] for event in of_calls if event.type.startswith("job.")]
    assert jobs[::2] == jobs[1::2] and len(set(jobs)) == 4
    assert [event.number for event in found] == list(range(1, len(found) + 1))


async def test_an_observation_follows_its_call_also_when_the_call_is_delivered_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FLUSH_SECONDS", 60.0)
    real = bench.caller.call

    async def twice(sent: Any, *, lane: str) -> Any:
        await real(sent, lane=lane)
        return await real(sent, lane=lane)

    monkeypatch.setattr(bench.caller, "call", twice)
    await bench.say(CHAT, "hello")
    await bench.play(CHAT, bench.drain(Model('look("tea")', SAY), slots=2))
    steps = told(await events_of(bench))
    assert steps[:3] == [("call.started", "look"), ("message.noted", "seen: tea"), ("call.ended", "look")]
    # A TOOL may run again; what it sent is not sent again.
    assert steps[3:] == [
        ("call.started", "send_msg_text"),
        ("message.sent", "done"),
        ("call.ended", "send_msg_text"),
    ]


async def test_events_of_messages_precede_the_end_of_a_round_whose_worker_died(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FLUSH_SECONDS", 60.0)
    await bench.say(CHAT, "hello")
    work = asyncio.create_task(bench.drain(Model(f'{SAY}\nhold("it")')).drain(CHAT))
    await bench.noted("begin it")
    (waiting,) = [message for message in await bench.messages(CHAT) if message.kind == "assistant"]
    # Its worker has not written what it called, and never will.
    assert "message.sent" not in [event.type for event in await events_of(bench)]
    work.cancel()
    await asyncio.gather(work, return_exceptions=True)
    await bench.let_leases_run_out()
    await bench.play(CHAT, bench.drain(Model("pass"), owner="w2"))
    found = await events_of(bench)
    types = [event.type for event in found]
    assert [event.message_id for event in found if event.type == "message.sent"] == [waiting.id]
    assert types.index("message.sent") < types.index("round.ended")
    assert [event.number for event in found] == list(range(1, len(found) + 1))


async def test_live_text_that_repeats_has_its_beginning_for_late_readers() -> None:
    seen: list[dict[str, Any]] = []
    text = LiveText(seen.append, seconds=0.0, repeats=True)
    text.add("a")
    assert seen == [{"offset": 0, "text": "a"}]
    async with asyncio.timeout(WAIT_SECONDS):
        while seen[-1]["offset"] or len(seen) == 1:
            text.add("b")
            text.flush()
            await asyncio.sleep(0.01)
    assert seen[-1]["text"] == "a" + "b" * (len(seen) - 1)
    assert [event["offset"] for event in seen[1:-1]] == list(range(1, len(seen) - 1))


@pytest.mark.parametrize(
    ("tries", "words", "live", "withdrawn"),
    [
        (["Hello, Ada."], "Hello, Ada. Bye.", "Hello, Ada.", []),
        (["Hello, ", "Hello, Ada."], "Hello, Ada.", "Hello, Ada.", []),
        (["Hello, ", "Good day."], "Good day.", "Hello, ", ["Hello, "]),
        (["I look."], None, "I look.", ["I look."]),
        ([], "Hello.", "", []),
    ],
)
async def test_words_that_no_message_begins_with_are_withdrawn(
    bench: Bench,
    monkeypatch: pytest.MonkeyPatch,
    tries: list[str],
    words: str | None,
    live: str,
    withdrawn: list[str],
) -> None:
    seen: list[dict[str, Any]] = []
    monkeypatch.setattr(bench.services.publisher, "live", lambda _, event: seen.append(event["data"]))
    await bench.say(CHAT, "hello")
    async with bench.services.database.read() as transaction:
        (waiting,) = await transaction.rounds.newest(CHAT, limit=1)
    events = AttemptEvents(bench.services.database, bench.services.publisher, waiting, fence=1)
    for number, text in enumerate(tries, start=1):
        for begin in range(0, len(text), 3):
            events.words(number, text[begin : begin + 3])
    events.settle_words(words)
    assert "".join(data["text"] for data in seen if data["offset"] or data is seen[0]) == live
    kept = [one.event for one in events._waiting]
    assert [event.data["text"] for event in kept] == withdrawn
    assert {event.type.value for event in kept} <= {"message.withdrawn"}
    await events.close()
