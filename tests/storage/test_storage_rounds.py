"""Rounds: one per trigger, in order, one at a time, after any failure."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from waiting import WAIT_SECONDS

from nekro_agent.errors import ConflictError, FencedError, NotFoundError
from storage.engine import Database
from storage.repositories.rounds import ClaimedRound, Round, RoundReport, RoundRequest
from storage.states import RoundState, TriggerKind

RunOut = Callable[[], Awaitable[None]]


def _request(trigger_id: str, *, chat_key: str = "chat", **values: Any) -> RoundRequest:
    values.setdefault("trigger_kind", TriggerKind.CALL)
    return RoundRequest(chat_key=chat_key, trigger_id=trigger_id, **values)


@pytest.fixture
async def fence(database: Database) -> int:
    """The lease of chat "chat"."""
    async with database.begin() as tx:
        await tx.chats.ensure("chat")
        await tx.chats.ensure("other")
    return await _lease(database)


async def _lease(database: Database) -> int:
    async with database.begin() as tx:
        fence = await tx.chats.acquire("chat", owner="worker", lease_seconds=60)
    assert fence is not None
    return fence


async def _ask(database: Database, *requests: RoundRequest) -> list[Round]:
    async with database.begin() as tx:
        return [(await tx.rounds.request(request))[0] for request in requests]


async def _claim(database: Database, fence: int) -> ClaimedRound | None:
    async with database.begin() as tx:
        return await tx.rounds.claim_next("chat", fence=fence, worker="w1")


async def _finish(database: Database, round_id: str, fence: int, **values: Any) -> Round:
    async with database.begin() as tx:
        return await tx.rounds.finish(round_id, fence=fence, report=RoundReport(**values))


async def test_trigger_causes_one_round_however_often_it_is_reported(database: Database, fence: int) -> None:
    async def request() -> bool:
        async with database.begin() as tx:
            return (await tx.rounds.request(_request("call1")))[1]

    assert sum(await asyncio.gather(*(request() for _ in range(10)))) == 1
    (same,) = await _ask(database, _request("call1"))
    (another,) = await _ask(database, _request("call1", trigger_kind=TriggerKind.MESSAGE))
    assert same.id != another.id
    assert same.turn_id == same.id and same.state is RoundState.REQUESTED


async def test_turns_that_cause_each_other_have_the_first_one_as_their_root(
    database: Database, fence: int
) -> None:
    (first,) = await _ask(database, _request("message"))
    (second,) = await _ask(database, _request("call", cause_turn_id=first.id))
    third, later = await _ask(
        database,
        _request("job", cause_turn_id=second.id),
        # A further round of the second turn, whatever caused it.
        _request("round", turn_id=second.id, cause_turn_id="another", number=2),
    )
    (orphan,) = await _ask(database, _request("old job", cause_turn_id="expired"))
    assert first.root_turn_id is None and first.turn_id == first.id
    assert [item.root_turn_id for item in (second, third, later)] == [first.id] * 3
    assert (second.turn_id, third.turn_id, later.turn_id) == (second.id, third.id, second.id)
    assert orphan.root_turn_id == "expired"


async def test_round_is_requested_with_its_effects_or_not_at_all(database: Database, fence: int) -> None:
    with pytest.raises(ZeroDivisionError):
        async with database.begin() as tx:
            await tx.rounds.request(_request("call1"))
            raise ZeroDivisionError
    assert await _claim(database, fence) is None


async def test_round_of_a_chat_without_a_row_is_refused(database: Database) -> None:
    with pytest.raises(NotFoundError, match="'nobody'"):
        await _ask(database, _request("x", chat_key="nobody"))


async def test_oldest_round_runs_and_the_others_are_merged_in_order(database: Database, fence: int) -> None:
    requests = [_request(str(n), user_id=f"u{n}") for n in range(4)]
    await _ask(database, *requests, _request("x", chat_key="other"))
    claimed = await _claim(database, fence)
    assert claimed is not None
    assert [item.trigger_id for item in claimed.triggers] == ["0", "1", "2", "3"]
    assert (claimed.round.state, claimed.round.attempt, claimed.round.worker) == (RoundState.RUNNING, 1, "w1")
    assert {item.state for item in claimed.merged} == {RoundState.MERGED}
    assert {item.merged_into for item in claimed.merged} == {claimed.round.id}
    await _finish(database, claimed.round.id, fence)
    assert await _claim(database, fence) is None


async def test_trigger_that_arrives_while_a_round_runs_waits_for_the_next(
    database: Database, fence: int
) -> None:
    await _ask(database, _request("1"))
    first = await _claim(database, fence)
    await _ask(database, _request("2"), _request("3"))
    assert first is not None and first.merged == ()
    await _finish(database, first.round.id, fence)
    second = await _claim(database, fence)
    assert second is not None
    assert [item.trigger_id for item in second.triggers] == ["2", "3"]


async def test_second_running_round_is_refused_by_the_database(database: Database, fence: int) -> None:
    await _ask(database, _request("1"))
    await _claim(database, fence)
    await _ask(database, _request("2"))
    with pytest.raises(ConflictError):
        await _claim(database, fence)


async def test_delayed_round_waits_and_is_merged_with_a_due_one(database: Database, fence: int) -> None:
    await _ask(database, _request("1", delay_seconds=60))
    assert await _claim(database, fence) is None
    async with database.read() as tx:
        seconds = await tx.rounds.seconds_until_due("chat")
        assert seconds is not None and 50 < seconds <= 60
        assert await tx.rounds.seconds_until_due("other") is None
        assert await tx.rounds.due_chats(limit=9) == []
    await _ask(database, _request("2", user_id="u2"), _request("3", delay_seconds=60))
    claimed = await _claim(database, fence)
    assert claimed is not None
    assert [item.trigger_id for item in claimed.triggers] == ["1", "2", "3"]
    assert claimed.user_id == "u2"


async def test_fields_are_recorded_as_they_become_known(database: Database, fence: int) -> None:
    await _ask(database, _request("1", observation="seen", segments=[{"type": "text", "text": "x"}]))
    claimed = await _claim(database, fence)
    assert claimed is not None
    round_id = claimed.round.id
    assert (claimed.round.observation, claimed.round.segments) == ("seen", [{"type": "text", "text": "x"}])
    async with database.begin() as tx:
        await tx.rounds.record(round_id, fence=fence, report=RoundReport(prompt_chars=9, model="m"))
        answered = await tx.rounds.record(round_id, fence=fence, report=RoundReport(answer="a", cost=0.5))
    assert answered.answered_at is not None and answered.prompt_chars == 9
    done = await _finish(database, round_id, fence, stop_type=8, exit_code=8, output="o\0", prompt_tokens=3)
    assert (done.state, done.answer, done.cost, done.stop_type, done.output, done.prompt_tokens) == (
        RoundState.DONE, "a", 0.5, 8, "o\0", 3,
    )  # fmt: skip
    assert done.finished_at is not None
    async with database.read() as tx:
        assert await tx.rounds.get(round_id) == done
        assert await tx.rounds.newest("chat", limit=5) == [done]
        assert await tx.rounds.rounds_of_turns(done.turn_id) == [done]
        assert await tx.rounds.find_running("chat") is None


async def test_worker_that_lost_the_chat_cannot_write(
    database: Database, fence: int, let_leases_run_out: RunOut
) -> None:
    await _ask(database, _request("1"))
    claimed = await _claim(database, fence)
    assert claimed is not None
    await let_leases_run_out()
    new = await _lease(database)
    for attempt in (
        _finish(database, claimed.round.id, fence, answer="late"),
        _claim(database, fence),
        _take_over(database, fence),
    ):
        with pytest.raises(FencedError):
            await attempt
    assert [item.state for item in await _take_over(database, new)] == [RoundState.REQUESTED]
    again = await _claim(database, new)
    assert again is not None and again.round.id == claimed.round.id
    assert (again.round.attempt, again.round.answer) == (2, None)
    assert (await _finish(database, again.round.id, new, answer="right")).answer == "right"
    with pytest.raises(FencedError):
        await _finish(database, again.round.id, new)


async def _take_over(database: Database, fence: int, max_attempts: int = 3) -> list[Round]:
    async with database.begin() as tx:
        return await tx.rounds.take_over("chat", fence=fence, max_attempts=max_attempts)


async def test_restarted_round_keeps_its_merged_rounds(
    database: Database, fence: int, let_leases_run_out: RunOut
) -> None:
    await _ask(database, _request("1"), _request("2"))
    await _claim(database, fence)
    await _ask(database, _request("3"))
    await let_leases_run_out()
    new = await _lease(database)
    await _take_over(database, new)
    again = await _claim(database, new)
    assert again is not None
    assert [item.trigger_id for item in again.triggers] == ["1", "2", "3"]


async def test_round_that_kills_its_workers_fails_after_its_last_attempt(
    database: Database, fence: int, let_leases_run_out: RunOut
) -> None:
    await _ask(database, _request("1"))
    for _ in range(2):
        assert await _claim(database, fence) is not None
        await let_leases_run_out()
        fence = await _lease(database)
        (orphan,) = await _take_over(database, fence, max_attempts=2)
    assert orphan.state is RoundState.FAILED
    assert "2 times" in (orphan.error or "") and orphan.finished_at is not None
    assert await _claim(database, fence) is None


async def test_answered_round_is_handed_over_instead_of_restarted(
    database: Database, fence: int, let_leases_run_out: RunOut
) -> None:
    await _ask(database, _request("1"))
    claimed = await _claim(database, fence)
    assert claimed is not None
    async with database.begin() as tx:
        await tx.rounds.record(claimed.round.id, fence=fence, report=RoundReport(answer="", code="x = 1"))
    await _ask(database, _request("2"))
    await let_leases_run_out()
    new = await _lease(database)
    (orphan,) = await _take_over(database, new, max_attempts=1)
    assert (orphan.state, orphan.attempt, orphan.fence) == (RoundState.RUNNING, 1, new)
    assert (orphan.worker, orphan.finished_at) == ("w1", None)
    with pytest.raises(FencedError):
        await _finish(database, orphan.id, fence)
    calls = [{"id": "c1", "lane": "methods"}]
    assert (await _finish(database, orphan.id, new, calls=calls)).calls == calls
    second = await _claim(database, new)
    assert second is not None and second.round.trigger_id == "2"


async def test_answered_round_is_run_again_alone_unless_that_is_not_possible(
    database: Database, fence: int, let_leases_run_out: RunOut
) -> None:
    await _ask(database, _request("1"))
    claimed = await _claim(database, fence)
    assert claimed is not None
    async with database.begin() as tx:
        report = RoundReport(answer="", code="x = 1", not_resumable="")
        await tx.rounds.record(claimed.round.id, fence=fence, report=report)
    await _ask(database, _request("2"))
    await let_leases_run_out()
    new = await _lease(database)
    (orphan,) = await _take_over(database, new)
    assert (orphan.state, orphan.answered_at is None) == (RoundState.REQUESTED, False)
    again = await _claim(database, new)
    assert again is not None
    assert (again.round.id, again.round.code, again.round.attempt) == (orphan.id, "x = 1", 2)
    assert again.merged == ()
    async with database.begin() as tx:
        await tx.rounds.record(orphan.id, fence=new, report=RoundReport(not_resumable="too long"))
    await let_leases_run_out()
    (orphan,) = await _take_over(database, await _lease(database))
    assert orphan.state is RoundState.RUNNING


async def test_orphan_that_was_asked_to_stop_is_cancelled(
    database: Database, fence: int, let_leases_run_out: RunOut
) -> None:
    await _ask(database, _request("1"))
    await _claim(database, fence)
    async with database.begin() as tx:
        await tx.rounds.cancel("chat", reason="enough")
    await let_leases_run_out()
    (orphan,) = await _take_over(database, await _lease(database))
    assert orphan.state is RoundState.CANCELLED
    assert orphan.finished_at is not None and "died" in (orphan.error or "")


async def test_own_running_round_is_no_orphan(database: Database, fence: int) -> None:
    await _ask(database, _request("1"))
    await _claim(database, fence)
    assert await _take_over(database, fence) == []


async def test_cancel_ends_waiting_rounds_and_requests_running_ones_to_stop(
    database: Database, fence: int
) -> None:
    await _ask(database, _request("1"))
    running = await _claim(database, fence)
    await _ask(database, _request("2"))
    assert running is not None
    async with database.begin() as tx:
        assert await tx.rounds.standing(running.round.id) == (True, False)
        assert await tx.rounds.cancel_requested([running.round.id, "another"]) == set()
        cancelled = await tx.rounds.cancel("chat", reason="a person said so")
    assert [item.state for item in cancelled] == [RoundState.RUNNING, RoundState.CANCELLED]
    assert cancelled[1].error == "a person said so"
    async with database.begin() as tx:
        assert await tx.rounds.standing(running.round.id) == (True, True)
        assert await tx.rounds.cancel_requested([running.round.id, "another"]) == {running.round.id}
        done = await tx.rounds.finish(
            running.round.id, fence=fence, state=RoundState.CANCELLED, report=RoundReport(error="stopped")
        )
    assert done.state is RoundState.CANCELLED
    assert await _claim(database, fence) is None


async def test_a_round_is_requested_during_another_only_while_that_runs_unstopped(
    database: Database, fence: int
) -> None:
    async def during(trigger_id: str, round_id: str) -> Round | None:
        async with database.begin() as tx:
            request = _request(
                trigger_id, turn_id=round_id, number=2, observation="seen", segments=[{"n": 1}]
            )
            return await tx.rounds.request_during(request, round_id)

    (asked,) = await _ask(database, _request("1"))
    assert await during("call", asked.id) is None
    running = await _claim(database, fence)
    assert running is not None
    new = await during("call", asked.id)
    assert new is not None
    assert (new.state, new.turn_id, new.number, new.attempt) == (RoundState.REQUESTED, asked.id, 2, 0)
    assert (new.observation, new.segments, new.root_turn_id) == ("seen", [{"n": 1}], asked.id)
    assert await during("call", asked.id) is None
    async with database.begin() as tx:
        await tx.rounds.cancel("chat", reason="enough")
    assert await during("call2", asked.id) is None
    async with database.begin() as tx:
        assert [item.id for item in await tx.rounds.newest("chat", limit=9)] == [asked.id, new.id]


async def test_the_expected_round_starts_unless_others_wait_or_it_is_not_due(
    database: Database, fence: int
) -> None:
    async def claim(expected: str) -> ClaimedRound | None:
        async with database.begin() as tx:
            return await tx.rounds.claim_next("chat", fence=fence, worker="w1", expected=expected)

    later, foreign = await _ask(
        database, _request("later", delay_seconds=60), _request("x", chat_key="other")
    )
    assert await claim(later.id) is None
    assert await claim(foreign.id) is None
    (due,) = await _ask(database, _request("due"))
    both = await claim(due.id)
    assert both is not None
    assert [item.id for item in both.triggers] == [later.id, due.id]
    await _finish(database, later.id, fence)
    (alone,) = await _ask(database, _request("alone"))
    only = await claim(alone.id)
    assert only is not None
    assert (only.round.id, only.round.state, only.round.worker) == (alone.id, RoundState.RUNNING, "w1")
    assert only.merged == ()
    await _finish(database, alone.id, fence)
    assert await claim(alone.id) is None


async def test_round_cannot_finish_as_open_or_merged(database: Database, fence: int) -> None:
    for state in (RoundState.RUNNING, RoundState.MERGED):
        with pytest.raises(ValueError, match=state.value):
            async with database.begin() as tx:
                await tx.rounds.finish("r", fence=fence, state=state, report=RoundReport())


async def test_sweep_finds_chats_without_a_worker_longest_waiting_first(
    database: Database, fence: int, let_leases_run_out: RunOut
) -> None:
    await _ask(database, _request("1", chat_key="other"), _request("2"))

    async def due(**values: float) -> list[str]:
        async with database.read() as tx:
            return await tx.rounds.due_chats(limit=5, **values)

    assert await due() == ["other"]  # the other one has a live lease
    assert await due(waiting_seconds=60) == []
    await _claim(database, fence)
    await let_leases_run_out()
    assert await due() == ["other", "chat"]
    assert await due(waiting_seconds=60) == ["chat"]  # its worker is dead: no reason to wait
    async with database.read() as tx:
        assert await tx.rounds.due_chats(limit=1) == ["other"]


async def _drain(database: Database, chat: str, worker: str, log: list[str]) -> None:
    """Run a chat's waiting rounds, unless another worker does; concurrent runs would garble the log."""
    async with database.begin() as tx:
        fence = await tx.chats.acquire(chat, owner=worker, lease_seconds=60)
        if fence is None:
            return
        claimed = await tx.rounds.claim_next(chat, fence=fence, worker=worker)
    if claimed is not None:
        for item in claimed.triggers:
            log.append(item.trigger_id)
            await asyncio.sleep(0)
    async with database.begin() as tx:
        if claimed is not None:
            await tx.rounds.finish(claimed.round.id, fence=fence, report=RoundReport())
        await tx.chats.release(chat, fence=fence)


async def test_many_workers_run_every_chat_in_order_without_overlap(database: Database) -> None:
    chats, triggers = [f"c{number}" for number in range(4)], 6
    log: dict[str, list[str]] = {chat: [] for chat in chats}
    async with database.begin() as tx:
        for chat in chats:
            await tx.chats.ensure(chat)

    async def work(worker: str) -> None:
        while sum(map(len, log.values())) < len(chats) * triggers:
            async with database.read() as tx:
                due = await tx.rounds.due_chats(limit=9)
            for chat in due:
                await _drain(database, chat, worker, log[chat])
            await asyncio.sleep(0)

    async def request(chat: str) -> None:
        for number in range(triggers):
            await _ask(database, _request(f"{chat}:{number}", chat_key=chat))

    async with asyncio.timeout(WAIT_SECONDS), asyncio.TaskGroup() as group:
        for chat in chats:
            group.create_task(request(chat))
        for number in range(4):
            group.create_task(work(f"w{number}"))
    assert log == {chat: [f"{chat}:{number}" for number in range(triggers)] for chat in chats}
