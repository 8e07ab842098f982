"""A drain that continues with its chat's next round, and the conditions under which it releases the chat."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import pytest
from round_bench import Bench, Model, states
from sqlalchemy import Dialect
from waiting import WAIT_SECONDS

from nekro.agent.llm import LLMRequest
from nekro.app.spending import Spending
from nekro.sandbox.models import StopType
from storage.driver.statements import FixedStatement, prepared
from storage.engine import Database
from storage.repositories.rounds import ClaimedRound, RoundReport
from storage.states import TriggerKind
from storage.transaction import Transaction
from workers.calls.claims import CallClaims
from workers.rounds.chat_view import ChatView, RoundPast, TurnPast
from workers.rounds.ledger import RoundLedger

OpenBench = Callable[..., Awaitable[Bench]]
LOOK = 'look("tea")'
SAY = 'send_msg_text(_ck, "done")'


async def is_free(bench: Bench, chat_key: str) -> bool:
    """Whether another worker can take the chat at once."""
    async with bench.database.begin() as tx:
        fence = await tx.chats.acquire(chat_key, owner="other", lease_seconds=30)
        return fence is not None and await tx.chats.release(chat_key, fence=fence)


async def hang(_: LLMRequest) -> str:
    await asyncio.Event().wait()
    raise AssertionError("never answers")


async def test_one_drain_executes_all_rounds_of_a_turn(bench: Bench) -> None:
    model = Model(LOOK, "1 / 0", 'look("milk")', SAY)
    await bench.say("chat", "hello")
    await bench.drain(model, slots=2).drain("chat")
    rounds = await bench.rounds("chat")
    assert [(item.trigger_kind, item.stop_type) for item in rounds] == [
        (TriggerKind.MESSAGE, StopType.AGENT),
        (TriggerKind.CALL, StopType.ERROR),
        (TriggerKind.ROUND, StopType.AGENT),
        (TriggerKind.CALL, StopType.NORMAL),
    ]
    assert states(rounds) == ["done"] * 4
    assert [item.number for item in rounds] == [1, 2, 3, 4]
    assert {item.turn_id for item in rounds} == {rounds[0].turn_id}
    # Under one lease, and one after the other.
    assert len({item.fence for item in rounds}) == 1
    for earlier, later in itertools.pairwise(rounds):
        assert earlier.finished_at is not None
        assert later.started_at is not None
        assert earlier.finished_at <= later.started_at
    assert "seen: tea" in model.prompts[1]
    assert "ZeroDivisionError" in model.prompts[2]
    assert await is_free(bench, "chat")


@pytest.mark.extended
async def test_a_follow_up_round_builds_no_statement(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """SQLAlchemy takes several times as long to build a statement as the database to run it."""
    built: list[str] = []

    def noting(statement: Any, values: Mapping[str, Any], dialect: Dialect) -> tuple[Any, ...]:
        if not isinstance(statement, FixedStatement):
            built.append(str(statement))
        return prepared(statement, values, dialect)

    async def begin(_: LLMRequest) -> str:
        monkeypatch.setattr("storage.driver.statements.prepared", noting)
        return 'look("milk")'

    async def end(_: LLMRequest) -> str:
        monkeypatch.undo()
        return SAY

    await bench.say("chat", "hello")
    await bench.drain(Model(LOOK, begin, end), slots=2).drain("chat")
    assert states(await bench.rounds("chat")) == ["done"] * 3
    assert built == []


@pytest.mark.extended
async def test_a_later_turn_builds_no_statement(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does one from its start to its end; that of a list is built once for each process."""
    seen: dict[int, Any] = {}
    new: list[str] = []

    def noting(statement: Any, values: Mapping[str, Any], dialect: Dialect) -> tuple[Any, ...]:
        if not isinstance(statement, FixedStatement) and id(statement) not in seen:
            seen[id(statement)] = statement  # kept, so that no later one has its id
            new.append(str(statement.compile(dialect=dialect)))
        return prepared(statement, values, dialect)

    monkeypatch.setattr("storage.driver.statements.prepared", noting)
    for _ in range(2):
        new.clear()
        await bench.say("chat", "hello")
        await bench.drain(Model(LOOK, SAY), slots=2).drain("chat")
    assert new == []
    assert states(await bench.rounds("chat")) == ["done"] * 4


@pytest.mark.extended
async def test_a_follow_up_round_runs_few_statements(
    bench: Bench, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From an AGENT result to the next request each statement delays the model."""
    # On a busy machine the round would write the begin of the call meanwhile; then its end is not held back.
    monkeypatch.setattr("workers.rounds.attempt_events.FLUSH_SECONDS", WAIT_SECONDS)
    part: ContextVar[str] = ContextVar("part", default="")
    ran: list[str] = []

    def counted(owner: type, name: str) -> None:
        function = getattr(owner, name)

        async def run(*given: Any, **named: Any) -> Any:
            if owner is CallClaims:
                ran.clear()  # the method has returned
            token = part.set(f"{owner.__name__}.{name}")
            try:
                return await function(*given, **named)
            finally:
                part.reset(token)

        monkeypatch.setattr(owner, name, run)

    def noting(*given: Any) -> tuple[Any, ...]:
        ran.append(part.get())
        return prepared(*given)

    async def begin(_: LLMRequest) -> str:
        counted(CallClaims, "finish")
        counted(RoundLedger, "finish")
        counted(ChatView, "read")
        counted(Spending, "reserve")  # nothing limits it
        monkeypatch.setattr("storage.driver.statements.prepared", noting)
        return 'look("milk")'

    async def end(_: LLMRequest) -> str:
        monkeypatch.undo()
        return SAY

    await bench.say("chat", "hello")
    await bench.drain(Model(LOOK, begin, end), slots=2).drain("chat")
    assert states(await bench.rounds("chat")) == ["done"] * 3
    counts = Counter(name for name in ran if name)  # without those of timers
    assert counts == {
        "CallClaims.finish": 4 if kind == "sqlite" else 5,
        "RoundLedger.finish": 7 if kind == "sqlite" else 8,
        "ChatView.read": 1,
    }


@pytest.mark.extended
async def test_a_message_between_two_rounds_is_merged_into_the_next_one(bench: Bench) -> None:
    async def meanwhile(_: LLMRequest) -> str:
        await bench.say("chat", "and another thing", user_id="ada")
        return LOOK

    model = Model(meanwhile, SAY)
    await bench.say("chat", "hello")
    await bench.drain(model, slots=2).drain("chat")
    rounds = await bench.rounds("chat")
    assert states(rounds) == ["done", "done", "merged"]
    assert [item.trigger_kind.value for item in rounds] == ["message", "message", "call"]
    second = model.prompts[1]
    assert second.index("seen: tea") < second.index("and another thing")
    assert len(model.prompts) == 2


TWO_LOOKS = """
import threading
threads = [threading.Thread(target=look, args=(topic,)) for topic in ("milk", "honey")]
for thread in threads: thread.start()
for thread in threads: thread.join()
"""


@pytest.mark.extended
@pytest.mark.parametrize(
    ("answers", "reads"),
    [
        ((LOOK, "1 / 0", 'look("milk")', "exit(9)", SAY), 1),
        ((LOOK, "no program at all", LOOK, SAY), 1),
        # More than the expected trigger has arrived: the rest must be read.
        ((LOOK, TWO_LOOKS, LOOK, 'look("rice")', SAY), 2),
        ((LOOK, 'nag()\nlook("milk")', LOOK, SAY), 2),
        ((LOOK, "nag()", LOOK, SAY), 2),
    ],
)
async def test_the_cached_state_of_a_chat_equals_its_rows(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, answers: tuple[str, ...], reads: int
) -> None:
    read, read_turn = ChatView.read, TurnPast.read
    compared: list[tuple[RoundPast, RoundPast]] = []
    turns_read = 0

    async def both(view: ChatView, database: Database, claimed: ClaimedRound) -> RoundPast:
        nonlocal turns_read
        most = bench.settings.agent.history_messages
        anew = await read(ChatView("chat", most_messages=most), database, replace(claimed, chat=None))
        turns_read -= 1
        past = await read(view, database, claimed)
        compared.append((past, anew))
        return past

    async def count(transaction: Transaction, claimed: ClaimedRound) -> TurnPast:
        nonlocal turns_read
        turns_read += 1
        return await read_turn(transaction, claimed)

    monkeypatch.setattr(ChatView, "read", both)
    monkeypatch.setattr(TurnPast, "read", count)
    await bench.say("chat", "hello")
    await bench.drain(Model(*answers), slots=2).drain("chat")
    assert len(compared) == len(answers)
    for past, anew in compared:
        assert past.chat == anew.chat
        assert list(past.messages) == list(anew.messages)
        assert (past.turn.started_at, past.turn.previous, past.turn.loose) == (
            anew.turn.started_at,
            anew.turn.previous,
            anew.turn.loose,
        )
    assert turns_read <= reads
    assert len({item.turn_id for item in await bench.rounds("chat")}) == 1


@pytest.mark.extended
async def test_a_message_at_the_end_of_a_turn_is_answered_by_the_same_drain(bench: Bench) -> None:
    async def meanwhile(_: LLMRequest) -> str:
        await bench.say("chat", "one more")
        return SAY

    model = Model(meanwhile, SAY)
    await bench.say("chat", "hello")
    await bench.drain(model, slots=2).drain("chat")
    rounds = await bench.rounds("chat")
    assert states(rounds) == ["done", "done"]
    assert rounds[0].turn_id != rounds[1].turn_id
    assert "one more" in model.prompts[1]


@pytest.mark.extended
async def test_a_drain_with_the_last_slot_releases_its_chat(bench: Bench) -> None:
    drain = bench.drain(Model(LOOK, SAY), slots=1)
    await bench.say("chat", "hello")
    await drain.drain("chat")
    assert states(await bench.rounds("chat")) == ["done", "requested"]
    assert states(await bench.play("chat", drain)) == ["done", "done"]


@pytest.mark.extended
async def test_a_drain_releases_its_chat_once_another_chat_has_taken_the_last_slot(bench: Bench) -> None:
    other: list[asyncio.Task[None]] = []
    asked = asyncio.Event()

    async def answer(request: LLMRequest) -> str:
        if request.chat_key == "other":
            asked.set()
            return await hang(request)
        if not other:
            other.append(asyncio.create_task(drain.drain("other")))
            await asked.wait()
        return LOOK

    drain = bench.drain(Model(answer), slots=2)
    await bench.say("chat", "hello")
    await bench.say("other", "hello")
    await drain.drain("chat")
    assert states(await bench.rounds("chat")) == ["done", "requested"]
    other[0].cancel()
    await asyncio.gather(*other, return_exceptions=True)


@pytest.mark.extended
async def test_a_drain_of_a_stopping_worker_releases_its_chat(bench: Bench) -> None:
    stopping = asyncio.Event()

    async def meanwhile(_: LLMRequest) -> str:
        stopping.set()  # as SIGTERM does
        return LOOK

    await bench.say("chat", "hello")
    await bench.drain(Model(LOOK, meanwhile, SAY), slots=2, is_stopping=stopping.is_set).drain("chat")
    assert states(await bench.rounds("chat")) == ["done", "done", "requested"]
    assert await is_free(bench, "chat")
    assert states(await bench.play("chat", bench.drain(Model(SAY), owner="w2"))) == ["done"] * 3


@pytest.mark.extended
async def test_a_drain_releases_its_chat_after_as_many_rounds_as_a_turn_may_have(
    kind: str, open_bench: OpenBench
) -> None:
    bench = await open_bench(kind, agent={"rounds_per_turn": 2})

    async def during_another_message(_request: LLMRequest) -> str:
        await bench.say("chat", "and then?")
        return SAY

    await bench.say("chat", "hello")
    await bench.drain(Model(LOOK, during_another_message), slots=2).drain("chat")
    assert states(await bench.rounds("chat")) == ["done", "done", "requested"]


async def test_a_stop_in_a_later_round_of_a_drain_ends_it(bench: Bench) -> None:
    asked = asyncio.Event()

    async def wait(request: LLMRequest) -> str:
        asked.set()
        return await hang(request)

    await bench.say("chat", "hello")
    draining = asyncio.create_task(bench.drain(Model(LOOK, wait), slots=2).drain("chat"))
    async with asyncio.timeout(WAIT_SECONDS):
        await asked.wait()
    report = await bench.services.stopper.stop("chat", reason="enough", wait_seconds=WAIT_SECONDS)
    await draining
    assert (len(report.stopped), len(report.cancelled)) == (1, 0)
    assert states(await bench.rounds("chat")) == ["done", "cancelled"]


@pytest.mark.extended
async def test_nothing_follows_a_round_that_was_stopped_before_its_end_was_recorded(
    bench: Bench,
) -> None:
    async def begin_anew() -> None:
        async with bench.database.begin() as tx:
            await tx.rounds.cancel("chat", reason="enough")
        await bench.say("chat", "a new beginning")

    begun: list[asyncio.Task[None]] = []

    async def stop(_: LLMRequest) -> str:
        begun.append(asyncio.create_task(begin_anew()))
        await asyncio.shield(begun[0])  # the stop may be noticed before the round has ended
        return "1 / 0"

    await bench.say("chat", "hello")
    drain = bench.drain(Model(stop, SAY), slots=2)
    await drain.drain("chat")
    await begun[0]
    assert states(await bench.rounds("chat")) == ["cancelled", "requested"]
    assert states(await bench.play("chat", drain)) == ["cancelled", "done"]


async def test_a_next_round_whose_worker_dies_before_it_starts_is_started_by_another(bench: Bench) -> None:
    async with bench.database.begin() as tx:
        await tx.chats.ensure("chat")
    await bench.say("chat", "hello")
    async with bench.database.begin() as tx:
        fence = await tx.chats.acquire("chat", owner="w1", lease_seconds=60)
    assert fence is not None
    first = await bench.services.ledger.start_next("chat", fence=fence, worker="w1")
    assert first is not None
    await bench.say("chat", "and another thing")
    # The rows of a drain that continues; then its process dies.
    async with bench.database.begin() as tx:
        await tx.rounds.finish(first.round.id, fence=fence, report=RoundReport(stop_type=0))
        assert await tx.rounds.claim_next("chat", fence=fence, worker="w1") is not None
    assert states(await bench.rounds("chat")) == ["done", "running"]
    await bench.let_leases_run_out()
    async with bench.database.read() as tx:
        assert await tx.rounds.due_chats(limit=10) == ["chat"]
    model = Model(SAY)
    rounds = await bench.play("chat", bench.drain(model, owner="w2"))
    assert states(rounds) == ["done", "done"]
    assert (rounds[1].attempt, rounds[1].worker) == (2, "w2")
    assert len(model.prompts) == 1


@pytest.mark.extended
async def test_a_drain_cancelled_in_a_later_round_leaves_the_round_to_another(bench: Bench) -> None:
    asked = asyncio.Event()

    async def wait(request: LLMRequest) -> str:
        asked.set()
        return await hang(request)

    await bench.say("chat", "hello")
    draining = asyncio.create_task(bench.drain(Model(LOOK, wait), slots=2).drain("chat"))
    async with asyncio.timeout(WAIT_SECONDS):
        await asked.wait()
    draining.cancel()
    await asyncio.gather(draining, return_exceptions=True)
    rounds = await bench.play("chat", bench.drain(Model(SAY), owner="w2"))
    assert states(rounds) == ["done", "done"]
    assert [item.attempt for item in rounds] == [1, 2]


async def test_a_drain_rejected_by_another_of_the_same_process_runs_later(bench: Bench) -> None:
    announced: list[str] = []

    async def announce(chat_key: str, *, later: bool = False) -> None:
        announced.append(chat_key)

    async def meanwhile(_: LLMRequest) -> str:
        await bench.say("chat", "one more")
        await drain.drain("chat")  # as its event would do; the chat is leased here
        announced.clear()
        return SAY

    bench.services.publisher.round_requested = announce  # type: ignore[method-assign]
    drain = bench.drain(Model(meanwhile, SAY), slots=1)
    await bench.say("chat", "hello")
    await drain.drain("chat")
    assert states(await bench.rounds("chat")) == ["done", "requested"]
    assert announced == ["chat"]
