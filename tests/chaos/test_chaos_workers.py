"""Workers that are killed, frozen and stopped: nothing is lost, no effect happens twice.

Numbers are those of the scenarios in docs/reliability.md.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections import Counter
from collections.abc import Callable

import pytest
from chaos_world import (
    CHAT,
    HELD,
    LEASE_SECONDS,
    Account,
    call,
    client_of,
    invoke,
    key,
    opened,
    release,
    rows,
    started,
    times,
    until_quiet,
    worker_that_runs,
)
from waiting import eventually
from worker_fleet import Fleet
from worker_process import queued

from nekro_agent.errors import OutcomeUnknownError

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

MakeChaos = Callable[..., Fleet]
CALLS = int(os.environ.get("NEKRO_TEST_CHAOS_CALLS", "2000"))


async def test_01_call_of_a_killed_worker_is_redelivered_and_an_effect_is_not_repeated(
    make_chaos: MakeChaos, each_database: str
) -> None:
    fleet = make_chaos(each_database)
    fleet.start("methods", "methods")
    async with opened(fleet) as services:
        tool = asyncio.create_task(call(services, "work", "T1", HELD))
        await started(fleet, "T1")
        effect = asyncio.create_task(call(services, "effect", "E1", HELD))
        await started(fleet, "E1")
        victim = worker_that_runs(fleet, "T1")
        killed_at = time.monotonic()
        victim.kill()
        if worker_that_runs(fleet, "E1") is not victim:
            worker_that_runs(fleet, "E1").kill()
            fleet.start("methods")
        release(fleet)
        assert await tool == "T1"
        seconds = time.monotonic() - killed_at
        with pytest.raises(OutcomeUnknownError):
            await effect
    print(f"recovered after {seconds:.1f} s")
    assert times(fleet, "start") == {"T1": 2, "E1": 1}


async def test_03_message_that_meets_a_dying_idle_worker_is_not_lost(make_chaos: MakeChaos) -> None:
    """A queued message runs at once, one handed to the worker when its lease expires."""
    fleet = make_chaos()
    (worker,) = fleet.start("methods")
    async with opened(fleet) as services:
        await call(services, "work", "T0")
        await until_quiet(fleet)
        worker.freeze()
        calls = [asyncio.create_task(call(services, "effect", f"E{n}")) for n in range(8)]
        with client_of(fleet) as client:
            held = key(fleet, "unacked.methods")
            await eventually(
                lambda: queued(client, key(fleet, "methods")) + client.hlen(held) == 8, what="the messages"
            )
            assert client.hlen(held) <= 1
        worker.kill()
        fleet.start("methods")
        assert await asyncio.gather(*calls) == [f"effect E{n}" for n in range(8)]
    assert set(times(fleet, "start").values()) == {1}


async def test_04_rolling_kills_lose_nothing_and_double_no_effect(
    make_chaos: MakeChaos, each_database: str
) -> None:
    """40 SIGKILLs under load; a call may happen to be held by three killed workers."""
    fleet = make_chaos(each_database, broker={"max_deliveries": 100, "calls_per_chat": 60})
    workers = fleet.start("methods", "methods", concurrency=20)
    account = Account()
    async with opened(fleet) as services:
        names = [f"{'E' if n % 2 else 'T'}{n}" for n in range(CALLS)]
        tasks = [
            asyncio.create_task(
                account.follow(
                    name,
                    call(services, "effect" if name[0] == "E" else "work", name, 0.1, seconds=200),
                )
            )
            for name in names
        ]
        for turn in range(40):
            await eventually(lambda n=turn: account.count >= n * CALLS // 45, what="calls to end")
            await asyncio.to_thread(workers[turn % 2].kill)
            (workers[turn % 2],) = await asyncio.to_thread(fleet.start, "methods", concurrency=20)
        await asyncio.gather(*tasks)
        doubled, missing = await account.doubled_and_missing(services, fleet)
        await until_quiet(fleet)
    print(
        f"calls={CALLS} kills=40 ok={len(account.ok)} unknown={len(account.unknown)} "
        f"errors={len(account.errors)} doubled={len(doubled)} missing={len(missing)}"
    )
    assert (doubled, missing, account.wild, account.errors) == ([], [], {}, {})
    assert account.count == CALLS
    assert {name[0] for name in account.unknown} <= {"E"}, "TOOL calls run again"


async def test_05_rolling_deploys_lose_nothing_and_repeat_nothing(make_chaos: MakeChaos) -> None:
    fleet = make_chaos()
    workers = fleet.start("methods", "methods", concurrency=20)
    account, codes = Account(), []
    async with opened(fleet) as services:
        names = [f"{'E' if n % 2 else 'T'}{n}" for n in range(CALLS)]
        tasks = [
            asyncio.create_task(
                account.follow(
                    name, call(services, "effect" if name[0] == "E" else "work", name, 0.1, seconds=200)
                )
            )
            for name in names
        ]
        for turn in range(12):
            await eventually(lambda n=turn: account.count >= n * CALLS // 14, what="calls to end")
            codes.append(await asyncio.to_thread(workers[turn % 2].stop))
            (workers[turn % 2],) = await asyncio.to_thread(fleet.start, "methods", concurrency=20)
        await asyncio.gather(*tasks)
    assert codes == [0] * 12
    assert len(account.ok) == CALLS, (account.errors, account.wild)
    assert set(times(fleet, "start").values()) == {1}


async def test_06_stopping_worker_finishes_calls_longer_than_the_lease(make_chaos: MakeChaos) -> None:
    fleet = make_chaos(workers={"drain_seconds": 30})
    (worker,) = fleet.start("methods")
    async with opened(fleet) as services:
        calls = [asyncio.create_task(call(services, "effect", f"E{n}", 3 * LEASE_SECONDS)) for n in range(8)]
        await started(fleet, *(f"E{n}" for n in range(8)))
        fleet.start("methods")
        assert await asyncio.to_thread(worker.stop) == 0
        await asyncio.gather(*calls)
    assert set(times(fleet, "start").values()) == {1}


async def test_07_worker_killed_while_it_drains_releases_its_calls(make_chaos: MakeChaos) -> None:
    fleet = make_chaos(workers={"drain_seconds": 30})
    (worker,) = fleet.start("methods")
    async with opened(fleet) as services:
        tools = [asyncio.create_task(call(services, "work", f"T{n}", HELD)) for n in range(5)]
        await started(fleet, *(f"T{n}" for n in range(5)))
        fleet.start("methods")
        worker.process.terminate()
        await asyncio.sleep(2)  # the grace period of the platform ends
        worker.kill()
        release(fleet)
        assert await asyncio.gather(*tools) == [f"T{n}" for n in range(5)]
    assert set(times(fleet, "start").values()) == {2}


async def test_08_call_as_long_as_three_leases_runs_once(make_chaos: MakeChaos) -> None:
    fleet = make_chaos()
    fleet.start("methods", "methods")
    async with opened(fleet) as services:
        both = (
            call(services, "work", "T1", 3 * LEASE_SECONDS),
            call(services, "effect", "E1", 3 * LEASE_SECONDS),
        )
        await asyncio.gather(*both)
    assert times(fleet, "start") == {"T1": 1, "E1": 1}


async def test_10_thawed_worker_writes_nothing(make_chaos: MakeChaos, each_database: str) -> None:
    fleet = make_chaos(each_database)
    fleet.start("methods", "methods")
    async with opened(fleet) as services:
        tool = asyncio.create_task(call(services, "work", "T1", HELD))
        effect = asyncio.create_task(call(services, "wake", "A1", HELD, seconds=20))
        await started(fleet, "T1", "A1")
        frozen = {worker_that_runs(fleet, "T1"), worker_that_runs(fleet, "A1")}
        for worker in frozen:
            worker.freeze()
        if len(frozen) == 2:
            fleet.start("methods")
        release(fleet)
        assert await tool == "T1"
        for worker in frozen:
            worker.thaw()
        outcome = (await asyncio.gather(effect, return_exceptions=True))[0]
        await eventually(lambda: times(fleet, "end")["T1"] == 2, what="the thawed worker to end its call")
        await until_quiet(fleet)
        left = await rows(services, "SELECT id FROM messages WHERE text = 'wake A1'")
        states = await rows(services, "SELECT state FROM calls WHERE type = 'agent'")
    print(f"thawed: {outcome!r} {states}")
    assert times(fleet, "start")["A1"] == 1
    assert len(left) == (0 if isinstance(outcome, BaseException) else 1)


@pytest.mark.parametrize("point", ["claimed", "ran", "recorded"])
async def test_20_crash_between_claim_effect_record_and_answer(
    make_chaos: MakeChaos, each_database: str, point: str, failpoint: Callable[[str], None]
) -> None:
    failpoint(point)
    # The claim lasts until the deadline: with a short one the caller learns of the crash soon.
    fleet = make_chaos(each_database)
    fleet.start("methods", "methods")
    async with opened(fleet) as services:
        account = Account()
        await account.follow("E1", call(services, "effect", "E1", seconds=12))
        found = await rows(services, "SELECT text FROM messages WHERE text = 'effect E1'")
    print(point, account.ok, account.unknown, account.errors)
    assert times(fleet, "start")["E1"] == (0 if point == "claimed" else 1)
    if point == "recorded":
        assert (account.ok, len(found)) == (["E1"], 1)
    else:
        assert (account.ok, len(found)) == ([], 0)


async def test_20_crash_after_the_commit_of_a_message_does_not_send_it_twice(
    make_chaos: MakeChaos, each_database: str, failpoint: Callable[[str], None]
) -> None:
    failpoint("sent")
    fleet = make_chaos(each_database)
    fleet.start("methods", "methods")
    async with opened(fleet) as services:
        await call(services, "send_msg_text", CHAT, "hello")
        found = await rows(services, "SELECT text FROM messages WHERE kind = 'assistant'")
    dead = [worker for worker in fleet.workers if worker.process.poll() is not None]
    assert (len(dead), [row[0] for row in found]) == (1, ["hello"])


async def test_20_repeated_call_writes_what_people_see_once(
    make_chaos: MakeChaos, each_database: str
) -> None:
    """The method kills each worker that runs it after another one of its effects."""
    fleet = make_chaos(each_database, broker={"max_deliveries": 100})
    async with opened(fleet) as services:
        fleet.start("methods")
        telling = asyncio.create_task(call(services, "tell", "T1", seconds=400))
        while not telling.done():
            worker = fleet.workers[-1]
            await eventually(
                lambda worker=worker: telling.done() or worker.process.poll() is not None,
                what="the end of the call or of its worker",
            )
            if not telling.done():
                fleet.start("methods")
        assert await telling == "T1"
        fleet.start("long")
        await eventually(lambda: times(fleet, "job")["T1"] == 1, what="the job")
        found = await rows(services, "SELECT kind, text, data FROM messages ORDER BY sequence")
        rounds = await rows(services, "SELECT trigger_kind FROM rounds")
        events = await rows(services, "SELECT type FROM chat_events")
        timers = await rows(services, "SELECT description, state FROM timers ORDER BY description")
        recurring = await rows(services, "SELECT event_desc FROM cron_jobs")
        jobs = await rows(services, "SELECT task_id FROM jobs")
    assert times(fleet, "start")["T1"] == 10, "one for each point at which it dies, and the last one"
    told = ["told" if row[1].startswith("told at") else row[1] for row in found]
    assert told == [
        "equal",
        "equal",
        "told",
        "told",
        "",
        "",
        "for the model",
        "for the agent",
        "said elsewhere",
    ]
    assert len({row[2] for row in found if row[1] == ""}) == 2
    assert [row[0] for row in rounds] == ["message"]
    assert Counter(row[0] for row in events if row[0].endswith((".sent", ".noted"))) == {
        "message.sent": 5,
        "file.sent": 2,
        "message.noted": 2,
    }
    waiting = [row[0] for row in timers if row[1] == "waiting"]
    assert waiting == ["look again", "tea", "tea"]
    assert [row[0] for row in recurring] == ["every morning"]
    assert [row[0] for row in jobs] == ["T1"]


@pytest.mark.parametrize("method", ["effect", "wake"])
async def test_20_an_outcome_is_told_at_the_deadline_if_that_comes_before_the_redelivery(
    make_chaos: MakeChaos, each_database: str, method: str, failpoint: Callable[[str], None]
) -> None:
    failpoint("recorded")
    fleet = make_chaos(each_database, broker={"visibility_timeout_seconds": 60})
    fleet.start("methods")
    async with opened(fleet) as services:
        account = Account()
        await account.follow("E1", call(services, method, "E1", seconds=6))
        # Its delivery waits for the end of the lease, longer than this test.
        assert (account.ok, account.unknown, account.errors) == (["E1"], [], {})
        assert await rows(services, "SELECT state FROM calls") == [("done",)]
    assert times(fleet, "start")["E1"] == 1


async def test_21_crash_before_the_follow_up_is_announced_leaves_one_round(
    make_chaos: MakeChaos, each_database: str, failpoint: Callable[[str], None]
) -> None:
    failpoint("announcing")
    fleet = make_chaos(each_database)
    fleet.start("methods", "methods")
    async with opened(fleet) as services:
        envelope = await invoke(services, "wake", "A1", call_id="a" * 32)
        made = await rows(services, "SELECT id, trigger_id FROM rounds")
        with client_of(fleet) as client:
            await eventually(
                lambda: client.llen(key(fleet, "rounds")), what="the sweep to announce the round"
            )
    assert [tuple(row) for row in made] == [(envelope.round_id, "a" * 32)]
    assert times(fleet, "start")["A1"] == 1


async def test_23_random_freezes_and_kills_leave_every_effect_once(make_chaos: MakeChaos) -> None:
    rng = random.Random(23)
    fleet = make_chaos("postgres", broker={"max_deliveries": 100})
    workers = fleet.start("methods", "methods", "methods", concurrency=20)
    account = Account()
    async with opened(fleet) as services:
        tasks = [
            asyncio.create_task(account.follow(f"E{n}", call(services, "effect", f"E{n}", 0.5, seconds=120)))
            for n in range(300)
        ]
        for _ in range(6):
            index = rng.randrange(3)
            if rng.random() < 0.5:
                await asyncio.to_thread(workers[index].kill)
                (workers[index],) = await asyncio.to_thread(fleet.start, "methods", concurrency=20)
            else:
                workers[index].freeze()
                await asyncio.sleep(LEASE_SECONDS * 1.5)
                workers[index].thaw()
        await asyncio.gather(*tasks)
        doubled, missing = await account.doubled_and_missing(services, fleet)
    print(f"ok={len(account.ok)} unknown={len(account.unknown)} errors={dict(account.error_kinds)}")
    assert (doubled, missing, account.wild) == ([], [], {})
