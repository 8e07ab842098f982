"""Calls: at most one effect, an answer for every delivery, and no call without an end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from nekro_agent.errors import FencedError, NotFoundError
from nekro_agent.methods import SandboxMethodType
from storage.engine import Database
from storage.repositories.calls import CALL_CLAIMS, Call, CallRequest, Claim, ClaimVerdict
from storage.states import CallState

RunOut = Callable[[], Awaitable[None]]


def _request(call_id: str = "c1", **values: Any) -> CallRequest:
    return CallRequest(
        id=call_id,
        method="author.module.method",
        type=values.pop("type", SandboxMethodType.BEHAVIOR),
        chat_key="chat",
        **values,
    )


async def _claim(database: Database, request: CallRequest, worker: str = "w1") -> Claim:
    async with database.autocommit() as tx:
        return await tx.calls.claim(request, worker=worker, lease_seconds=60)


async def _finish(database: Database, fence: int, call_id: str = "c1", **outcome: Any) -> Call:
    async with database.begin() as tx:
        return await tx.calls.finish(call_id, fence=fence, outcome=outcome or None)


async def _get(database: Database, call_id: str = "c1") -> Call:
    async with database.read() as tx:
        return await tx.calls.get(call_id)


async def test_one_of_many_deliveries_runs_and_the_others_are_dropped(database: Database) -> None:
    claims = await asyncio.gather(*(_claim(database, _request(), f"w{n}") for n in range(20)))
    verdicts = [claim.verdict for claim in claims]
    assert verdicts.count(ClaimVerdict.GRANTED) == 1
    assert verdicts.count(ClaimVerdict.BUSY) == 19


async def test_repeated_delivery_gets_the_stored_outcome(database: Database) -> None:
    claim = await _claim(database, _request(round_id="r1", lane="methods"))
    assert (claim.verdict, claim.fence, claim.call) == (ClaimVerdict.GRANTED, 1, None)
    await _finish(database, claim.fence, value="AA==", text="\0\ud800")
    again = await _claim(database, _request(), "w2")
    assert again.verdict is ClaimVerdict.ENDED and again.call is not None
    assert again.call.outcome == {"value": "AA==", "text": "\0\ud800"}
    assert (again.call.state, again.call.worker, again.call.lane) == (CallState.DONE, "w1", "methods")
    assert again.call.finished_at is not None and again.call.started_at is not None


async def test_repeated_delivery_of_a_failure_gets_the_error(database: Database) -> None:
    claim = await _claim(database, _request())
    async with database.begin() as tx:
        await tx.calls.fail("c1", fence=claim.fence, error_type="ValueError", error_message="bad")
    again = await _claim(database, _request())
    assert again.verdict is ClaimVerdict.ENDED and again.call is not None
    assert (again.call.state, again.call.error_type, again.call.error_message) == (
        CallState.FAILED, "ValueError", "bad",
    )  # fmt: skip


async def test_call_whose_worker_died_is_unknown_and_not_run_again(
    database: Database, let_leases_run_out: RunOut
) -> None:
    claim = await _claim(database, _request())
    await let_leases_run_out()
    for worker in ("w2", "w3"):
        again = await _claim(database, _request(), worker)
        assert again.verdict is ClaimVerdict.UNKNOWN and again.call is not None
        assert again.call.error_type == "OutcomeUnknownError"
    with pytest.raises(FencedError, match="claim 1"):
        await _finish(database, claim.fence)


async def test_a_failure_without_a_claim_does_not_end_the_claim_of_another_worker(
    database: Database, let_leases_run_out: RunOut
) -> None:
    """A worker that was frozen past its lease resumes, and records the end as if nothing ran the call."""
    request = _request(repeatable=True)

    async def end() -> Call | None:
        async with database.begin() as tx:
            return await tx.detached_calls.end(request, state=CallState.FAILED, error_type="FencedError")

    await _claim(database, request)
    await let_leases_run_out()
    taken = await _claim(database, request, "w2")
    assert (taken.verdict, taken.fence) == (ClaimVerdict.GRANTED, 2)
    assert await end() is None
    assert (await _get(database)).state is CallState.RUNNING
    assert (await _finish(database, taken.fence)).state is CallState.DONE
    assert await end() is None


async def test_the_end_of_a_call_that_no_worker_claimed_is_recorded(database: Database) -> None:
    for call_id, runs_seconds in (("queued", None), ("running", 60.0)):
        request = _request(call_id)
        async with database.begin() as tx:
            await tx.detached_calls.detach(request, runs_seconds=runs_seconds)
            ended = await tx.detached_calls.end(request, state=CallState.DONE)
        assert ended is not None and ended.state is CallState.DONE


async def test_repeatable_call_is_taken_over_and_the_first_worker_cannot_finish(
    database: Database, let_leases_run_out: RunOut
) -> None:
    request = _request(type=SandboxMethodType.TOOL, repeatable=True)
    first = await _claim(database, request)
    await let_leases_run_out()
    second = await _claim(database, request, "w2")
    assert (second.verdict, second.fence) == (ClaimVerdict.GRANTED, 2)
    with pytest.raises(FencedError):
        await _finish(database, first.fence, who="first")
    assert (await _finish(database, second.fence, who="second")).outcome == {"who": "second"}


async def test_frozen_worker_s_effects_are_rolled_back_with_its_claim(
    database: Database, let_leases_run_out: RunOut
) -> None:
    claim = await _claim(database, _request())
    await let_leases_run_out()
    await _claim(database, _request(), "w2")
    with pytest.raises(FencedError):
        async with database.begin() as tx:
            await tx.chats.ensure("written by the frozen worker")
            await tx.calls.finish("c1", fence=claim.fence, outcome=None)
    async with database.read() as tx:
        assert await tx.chat_listing.page(limit=9) == []


async def test_renewal_extends_claims_and_names_the_lost_ones(
    database: Database, let_leases_run_out: RunOut
) -> None:
    fences = {name: (await _claim(database, _request(name))).fence for name in ("a", "b", "c")}
    await _finish(database, fences["b"], "b")
    await let_leases_run_out()
    async with database.autocommit() as tx:
        held = [*{**fences, "c": 7, "x": 1}.items()]
        renewal = await tx.leases.renew(CALL_CLAIMS, held, lease_seconds=60)
    assert renewal.kept == {("a", fences["a"])}
    assert renewal.lost == {("b", fences["b"]), ("c", 7), ("x", 1)}
    assert (await _claim(database, _request("a"))).verdict is ClaimVerdict.BUSY
    assert (await _claim(database, _request("c"))).verdict is ClaimVerdict.UNKNOWN


async def test_a_late_renewal_does_not_keep_the_claims_of_a_dead_worker(database: Database) -> None:
    claim = await _claim(database, _request())
    async with database.autocommit() as tx:
        assert await tx.calls.end_claims("w1") == 1
        renewal = await tx.leases.renew(CALL_CLAIMS, [("c1", claim.fence)], lease_seconds=60)
    assert renewal.lost == {("c1", claim.fence)}
    async with database.begin() as tx:
        assert [call.id for call in await tx.calls.sweep_lost(limit=9)] == ["c1"]


async def test_enqueued_call_is_published_again_until_it_is_claimed(database: Database) -> None:
    soon = datetime.now(UTC) + timedelta(minutes=5)
    request = _request(invocation={"invocation": {}}, deadline=soon)
    async with database.begin() as tx:
        assert await tx.calls.enqueue(request)
        assert not await tx.calls.enqueue(request)
        await tx.calls.enqueue(_request("no body", deadline=soon))

    async def take(waiting_seconds: float) -> list[str]:
        async with database.begin() as tx:
            return [c.id for c in await tx.calls.take_unclaimed(waiting_seconds=waiting_seconds, limit=9)]

    assert await take(60) == []
    assert await take(-1) == ["c1"]
    claim = await _claim(database, request)
    assert (claim.verdict, claim.fence) == (ClaimVerdict.GRANTED, 1)
    assert await take(-1) == []
    assert (await _get(database)).invocation == {"invocation": {}}


async def test_repeatable_call_whose_worker_died_is_published_again(
    database: Database, let_leases_run_out: RunOut
) -> None:
    await _claim(database, _request(repeatable=True, invocation={"i": 1}))
    await _claim(database, _request("once", invocation={"i": 1}))
    await let_leases_run_out()
    async with database.begin() as tx:
        taken = await tx.calls.take_unclaimed(waiting_seconds=5, limit=9)
        assert [call.id for call in taken] == ["c1"]
        assert await tx.calls.take_unclaimed(waiting_seconds=5, limit=9) == []
        lost = await tx.calls.sweep_lost(limit=9)
    assert [(call.id, call.state) for call in lost] == [("once", CallState.UNKNOWN)]


async def test_repeatable_call_whose_worker_died_ends_when_it_cannot_run_again(
    database: Database, let_leases_run_out: RunOut
) -> None:
    past, soon = (datetime.now(UTC) + timedelta(seconds=seconds) for seconds in (-5, 300))
    tool = SandboxMethodType.TOOL
    await _claim(database, _request("late", repeatable=True, deadline=past, invocation={"i": 1}))
    await _claim(database, _request("in time", repeatable=True, deadline=soon, invocation={"i": 1}))
    # No sweep sends it again, but the broker delivers its message again.
    await _claim(database, _request("without message", repeatable=True, deadline=soon))
    async with database.begin() as tx:
        detached = _request("detached", type=tool, repeatable=True, deadline=past, invocation={"i": 1})
        await tx.detached_calls.detach(detached, runs_seconds=60)
    await let_leases_run_out()
    async with database.begin() as tx:
        assert [call.id for call in await tx.calls.take_unclaimed(waiting_seconds=5, limit=9)] == ["in time"]
        lost = await tx.calls.sweep_lost(limit=9)
    assert {(call.id, call.state) for call in lost} == {
        ("late", CallState.UNKNOWN), ("detached", CallState.UNKNOWN),
    }  # fmt: skip
    assert {call.error_type for call in lost} == {"OutcomeUnknownError"}


async def test_call_that_was_not_claimed_in_time_ends_and_does_not_start(database: Database) -> None:
    past = datetime.now(UTC) - timedelta(seconds=5)
    async with database.begin() as tx:
        await tx.calls.enqueue(_request(deadline=past, invocation={"i": 1}))
        assert await tx.calls.take_unclaimed(waiting_seconds=-1, limit=9) == []
        (expired,) = await tx.calls.sweep_expired(limit=9)
        assert await tx.calls.sweep_expired(limit=9) == []
    assert (expired.state, expired.error_type) == (CallState.FAILED, "CallTimeoutError")
    assert (await _claim(database, _request())).verdict is ClaimVerdict.ENDED


@pytest.mark.parametrize("detaches_first", [True, False])
async def test_result_goes_to_either_the_caller_or_the_chat(database: Database, detaches_first: bool) -> None:
    claim = await _claim(database, _request())

    async def detach() -> Call:
        async with database.autocommit() as tx:
            return await tx.detached_calls.detach(_request())

    if detaches_first:
        assert (await detach()).state is CallState.RUNNING
        assert (await _finish(database, claim.fence, v=1)).detached_at is not None
    else:
        assert (await _finish(database, claim.fence, v=1)).detached_at is None
        late = await detach()
        assert (late.state, late.outcome, late.detached_at) == (CallState.DONE, {"v": 1}, None)


async def test_cancelled_call_records_nothing_more(database: Database) -> None:
    claim = await _claim(database, _request(round_id="r"))
    await _claim(database, _request("c2", round_id="r"))
    async with database.begin() as tx:
        cancelled = await tx.calls.cancel("c1", reason="reset")
        assert cancelled is not None and cancelled.error_message == "reset"
        assert await tx.calls.cancel("c1", reason="again") is None
        assert [call.id for call in await tx.calls.cancel_round("r", reason="reset")] == ["c2"]
        assert [call.state for call in await tx.calls.of_round("r")] == [CallState.CANCELLED] * 2
    with pytest.raises(FencedError):
        await _finish(database, claim.fence)


async def test_call_without_a_row_is_an_error_for_get(database: Database) -> None:
    async with database.begin() as tx:
        assert await tx.calls.find("no") is None
        with pytest.raises(NotFoundError, match="call 'no'"):
            await tx.calls.get("no")
