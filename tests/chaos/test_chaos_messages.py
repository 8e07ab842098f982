"""Duplicate, malformed and forged messages, and calls that kill, block or misbehave."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any

import pytest
from chaos_world import (
    Account,
    call,
    client_of,
    invoke,
    journal,
    key,
    opened,
    publish_methods,
    rows,
    started,
    times,
    until_quiet,
)
from waiting import eventually
from worker_fleet import Fleet
from worker_process import queued

from broker_config.keys import Keys
from nekro_agent.errors import (
    ArgumentError,
    CallCancelledError,
    CallTimeoutError,
    MethodAbortedError,
    MethodFailedError,
    MethodNotFoundError,
    OutcomeUnknownError,
    ResultError,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]

MakeChaos = Callable[..., Fleet]


async def test_18_repeated_call_has_one_effect_and_one_answer(
    make_chaos: MakeChaos, each_database: str
) -> None:
    fleet = make_chaos(each_database)
    fleet.start("methods", "methods")
    async with opened(fleet) as services, opened(fleet) as other:
        first = await invoke(services, "wake", "A1", call_id="a" * 32)
        second = await invoke(other, "wake", "A1", call_id="a" * 32)
        made = await rows(services, "SELECT id FROM rounds")
    assert first == second
    assert times(fleet, "start") == {"A1": 1}
    assert [row[0] for row in made] == [first.round_id]


async def test_19_message_delivered_twice_has_one_effect(make_chaos: MakeChaos, each_database: str) -> None:
    fleet = make_chaos(each_database)
    publish_methods(fleet)
    async with opened(fleet) as services:
        tasks = [
            asyncio.create_task(invoke(services, "wake", f"A{n}", call_id=f"{n:032x}")) for n in range(50)
        ]
        with client_of(fleet) as client:
            await eventually(lambda: queued(client, key(fleet, "methods")) == 50, what="the messages")
            client.lpush(key(fleet, "methods"), *client.lrange(key(fleet, "methods"), 0, -1))
        fleet.start("methods", "methods")
        envelopes = await asyncio.gather(*tasks)
        await until_quiet(fleet, what="the second copies")
        made = await rows(services, "SELECT id FROM rounds")
        written = await rows(services, "SELECT id FROM messages")
    assert set(times(fleet, "start").values()) == {1}
    assert {row[0] for row in made} == {envelope.round_id for envelope in envelopes}
    assert (len(made), len(written)) == (50, 50)


@pytest.mark.parametrize("how", ["kill", "segfault", "exit"])
async def test_25_call_that_kills_its_workers_becomes_a_dead_letter(make_chaos: MakeChaos, how: str) -> None:
    fleet = make_chaos(broker={"max_deliveries": 3})
    account = Account()
    async with opened(fleet) as services:
        fatal = asyncio.create_task(account.follow("T1", call(services, "die", "T1", how)))
        begin = time.monotonic()
        for turn in range(1, 4):
            fleet.start("methods")
            await eventually(lambda n=turn: times(fleet, "start")["T1"] == n, what=f"delivery {turn}")
            await eventually(lambda: fleet.workers[-1].process.poll() is not None, what="the worker to die")
        fleet.start("methods")
        await fatal
        assert await call(services, "work", "T2") == "T2"
    print(f"set aside after {time.monotonic() - begin:.1f} s: {account.unknown}")
    assert account.unknown == ["T1"], (account.ok, account.errors, account.wild)
    assert times(fleet, "start")["T1"] == 3
    with client_of(fleet) as client:
        (dead,) = client.lrange(Keys(prefix=fleet.settings.broker.key_prefix).dead, 0, -1)
    assert json.loads(dead)["headers"]["task"] == "tests.chaos.die"


async def test_26_aborting_methods_occupy_no_slot(make_chaos: MakeChaos) -> None:
    fleet = make_chaos()
    fleet.start("methods", concurrency=2)
    async with opened(fleet) as services:
        for kind in ("SystemExit", "KeyboardInterrupt", "CancelledError", "GeneratorExit", "MemoryError"):
            for _ in range(3):
                with pytest.raises(MethodAbortedError, match=kind):
                    await call(services, "abort", kind)
        assert await call(services, "work", "T1") == "T1"
    await until_quiet(fleet)


async def test_27_call_that_never_ends_is_answered_at_its_deadline(make_chaos: MakeChaos) -> None:
    fleet = make_chaos()
    fleet.start("methods", concurrency=3)
    async with opened(fleet) as services:
        stuck = [asyncio.create_task(call(services, "never", f"T{n}", seconds=2)) for n in range(3)]
        ended = await asyncio.gather(*stuck, return_exceptions=True)
        assert [type(error) for error in ended] == [CallTimeoutError] * 3
        # The slots become free at the hard limit, five seconds after the deadline.
        assert await call(services, "work", "T4", seconds=20) == "T4"


async def test_28_call_that_its_caller_abandons_is_cancelled_and_deleted(make_chaos: MakeChaos) -> None:
    fleet = make_chaos()
    fleet.start("methods")
    with client_of(fleet) as client:
        before = {name for name in client.pubsub_channels() if b"celery-task-meta" in name}
        async with opened(fleet) as services:
            left = asyncio.create_task(call(services, "effect", "E1", 30))
            await started(fleet, "E1")
            left.cancel()
            await asyncio.gather(left, return_exceptions=True)
            await until_quiet(fleet, what="the method to be stopped")
            states = await rows(services, "SELECT state FROM calls")
        after = {name for name in client.pubsub_channels() if b"celery-task-meta" in name}
        replies = client.keys(key(fleet, "reply:*"))
    assert [tuple(row) for row in states] == [("cancelled",)]
    assert (times(fleet, "end")["E1"], after, replies) == (0, before, [])


@pytest.mark.parametrize("method", ["work", "effect"])
async def test_29_cancelled_call_stays_cancelled_when_all_workers_restart(
    make_chaos: MakeChaos, method: str
) -> None:
    fleet = make_chaos()
    (worker,) = fleet.start("methods")
    worker.kill()
    async with opened(fleet) as services:
        waiting = asyncio.create_task(invoke(services, method, "T1", call_id="c" * 32))
        with client_of(fleet) as client:
            await eventually(lambda: client.llen(key(fleet, "methods")) == 1, what="the message")
        await services._caller.revoke("c" * 32)
        fleet.start("methods", "methods")
        with pytest.raises(CallCancelledError):
            await waiting
        assert await call(services, "work", "T2") == "T2"
    assert times(fleet, "start") == {"T2": 1}


async def test_30_invalid_calls_are_answered_at_once_and_delay_no_others(make_chaos: MakeChaos) -> None:
    fleet = make_chaos()
    fleet.start("methods", concurrency=2)
    async with opened(fleet) as services:
        wrong: list[tuple[type[Exception], tuple[Any, ...]]] = [
            (MethodNotFoundError, ("no_such_method",)),
            (ArgumentError, ("work",)),
            (ArgumentError, ("work", "x", 1, 2, 3)),
            (ArgumentError, ("size", b"x" * (50 << 20))),
            (ResultError, ("give", "lock")),
            (ResultError, ("give", "large")),
            (MethodFailedError, ("give", "empty")),
        ]
        for kind, (method, *args) in wrong:
            begin = time.monotonic()
            with pytest.raises(kind) as raised:
                await call(services, method, *args)
            print(f"{method} {str(args)[:20]}: {time.monotonic() - begin:.2f} s: {str(raised.value)[:100]}")
        assert await call(services, "work", "T1") == "T1"


GARBAGE = [b"", b"garbage", b"\xff\xfe", b"{}", b'{"body": "x", "headers": {}, "properties": {}}']


async def test_31_forged_and_broken_messages_run_nothing(make_chaos: MakeChaos) -> None:
    """Wrong signature, task, version, size and encoding, and a replay; none is logged with its content."""
    fleet = make_chaos()
    publish_methods(fleet)
    async with opened(fleet) as services:
        recorded = asyncio.create_task(invoke(services, "effect", "E1", call_id="e" * 32))
        with client_of(fleet) as client:
            await eventually(lambda: client.llen(key(fleet, "methods")) == 1, what="the message")
            (raw,) = client.lrange(key(fleet, "methods"), 0, -1)
            forged = list(forgeries(json.loads(raw)))
            client.lpush(key(fleet, "methods"), *GARBAGE, *map(json.dumps, forged))
            (worker,) = fleet.start("methods")
            await recorded
            client.lpush(key(fleet, "methods"), raw)  # a replay
            assert await call(services, "work", "T1") == "T1"
            await until_quiet(fleet, what="every message to be dealt with")
    assert times(fleet, "start") == {"E1": 1, "T1": 1}
    assert worker.process.poll() is None
    log = worker.log.read_text()
    assert "Unrecoverable" not in log and "SECRET-ARGUMENT" not in log
    print(f"{len(forged)} forged and {len(GARBAGE)} broken messages; journal {len(journal(fleet))} lines")


def forgeries(message: dict[str, Any]) -> Any:
    """Copies of a valid message with one fault each."""

    def altered(change: Callable[[dict[str, Any], dict[str, Any]], None], call_id: str) -> dict[str, Any]:
        copy = json.loads(json.dumps(message))
        body = json.loads(copy["body"])
        copy["headers"]["id"] = copy["properties"]["correlation_id"] = call_id
        change(copy, body[0][0])
        copy["body"] = json.dumps(body)
        return dict(copy)

    changes: list[Callable[[dict[str, Any], dict[str, Any]], object]] = [
        lambda m, b: b.update(signature="0" * 64),
        lambda m, b: b["invocation"].update(user_id="SECRET-ARGUMENT"),
        lambda m, b: b["invocation"].update(version=99),
        lambda m, b: b["invocation"].update(args="SECRET-ARGUMENT"),
        lambda m, b: b["invocation"].update(args="A" * (4 << 20)),
        lambda m, b: b.pop("signature"),
        lambda m, b: m["headers"].update(task="tests.chaos.wake"),
        lambda m, b: m["headers"].update(task="tests.chaos.nothing"),
        lambda m, b: m.update({"content-type": "application/x-python-serialize"}),
        lambda m, b: m.update({"content-encoding": "no-such-encoding"}),
    ]
    for number, change in enumerate(changes):
        yield altered(lambda m, b, change=change: change(m, b) and None, f"{number:032x}")


async def test_unknown_outcomes_are_distinguished_from_failures(make_chaos: MakeChaos) -> None:
    fleet = make_chaos()
    (worker,) = fleet.start("methods")
    async with opened(fleet) as services:
        running = asyncio.create_task(call(services, "effect", "E1", 30, seconds=60))
        await started(fleet, "E1")
        worker.kill()
        begin = time.monotonic()
        fleet.start("methods")
        with pytest.raises(OutcomeUnknownError):
            await running
        print(f"an error came {time.monotonic() - begin:.1f} s after the kill, not at its deadline")
