"""Calls of methods through real workers."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime
from typing import Any

import pytest
from late_call import check_refusal
from waiting import WAIT_SECONDS

from nekro.app import use_cases
from nekro.app.services import Services
from nekro.sandbox.models import StopType
from nekro.wire.invocation import Envelope
from nekro.wire.values import decode_value
from nekro_agent.errors import (
    ArgumentError,
    MethodAbortedError,
    MethodFailedError,
    MethodNotFoundError,
    ResultError,
)
from storage.repositories.messages import MessageRepository
from storage.repositories.rounds import RoundRepository

CHAT = "platform:群/1"


@pytest.fixture(scope="module")
def fleet(make_fleet: Callable[..., Any]) -> Any:
    system = make_fleet()
    system.start("methods", "methods", "methods")
    return system


@contextlib.asynccontextmanager
async def opened(fleet: Any) -> AsyncIterator[Services]:
    services = fleet.services()
    await services.start()
    try:
        yield services
    finally:
        await services.close()


async def call(services: Services, method: str, *args: Any, **kwargs: Any) -> Envelope:
    return await use_cases.invoke(
        services, method, args, kwargs, chat_key=CHAT, user_id="u1", timeout_seconds=WAIT_SECONDS
    )


def value(envelope: Envelope) -> object:
    return decode_value(envelope.value_bytes(), max_bytes=1 << 20)


async def run(services: Services, code: str, **options: Any) -> Any:
    options = {"follow_up": False, "user_id": "u1", "chat_key": CHAT, **options}
    return await use_cases.run_code(services, code, file_name="test.py", **options)


@pytest.mark.extended
async def test_three_workers_share_a_thousand_calls_none_lost_none_twice(fleet: Any) -> None:
    async with opened(fleet) as services:
        gate = asyncio.Semaphore(100)

        async def one(number: int) -> object:
            async with gate:
                return value(await call(services, "journal", number))

        pids = await asyncio.gather(*(one(number) for number in range(1000)))
        journal = services.areas.plugin_dir("tests.probe") / "journal.txt"
        counts = Counter(line for line in journal.read_text().splitlines() if line.isdigit())
    assert counts == {str(number): 1 for number in range(1000)}
    assert len(set(pids)) == 3


async def test_the_context_is_set_by_the_host_and_not_by_the_caller(fleet: Any) -> None:
    async with opened(fleet) as services:
        returned = value(await call(services, "who"))
        chat = await services.chat(CHAT)
        assert returned == {"chat": CHAT, "user": "u1", "container": chat.container_key}
        with pytest.raises(ArgumentError):
            await call(services, "who", _ctx="mine")
        with pytest.raises(ArgumentError):
            await call(services, "who", chat_key="other")


async def test_an_invalid_call_is_answered_with_the_reason(fleet: Any) -> None:
    async with opened(fleet) as services:
        with pytest.raises(MethodNotFoundError, match=r"did you mean .*remember"):
            await call(services, "rememver", "x")
        with pytest.raises(ArgumentError, match=r"add\(a: int, b: int\) -> int: missing .*'b'"):
            await call(services, "add", 1)
        with pytest.raises(MethodFailedError, match=r"argument b is str, the signature says int"):
            await call(services, "add", 1, "2")
        with pytest.raises(ResultError, match="lock"):
            await call(services, "give_lock")
        with pytest.raises(MethodFailedError, match="ValueError: no such thing"):
            await call(services, "fail_with", "no such thing")
        with pytest.raises(MethodAbortedError, match="SystemExit"):
            await call(services, "leave")
        assert value(await call(services, "add", 1, 2)) == 3


async def test_arguments_beyond_the_limit_are_refused_with_both_sizes(fleet: Any) -> None:
    async with opened(fleet) as services:
        assert value(await call(services, "length", b"x" * 700_000)) == 700_000
        with pytest.raises(ArgumentError, match="the limit of a call's arguments"):
            await call(services, "length", b"x" * (2 << 20))


async def test_a_call_that_leaves_the_queue_too_late_is_answered_and_not_run(fleet: Any) -> None:
    async with opened(fleet) as services:
        await check_refusal(services, chat_key=CHAT, deadline=datetime.now(UTC))


async def test_a_secret_in_an_error_stays_on_the_host(fleet: Any) -> None:
    async with opened(fleet) as services:
        with pytest.raises(MethodFailedError) as raised:
            await call(services, "fail_with", "the key is test-signing-key, said the log")
    assert "test-signing-key" not in str(raised.value)
    assert "[secret]" in str(raised.value)


async def test_a_behavior_records_its_text_in_the_history(fleet: Any) -> None:
    async with opened(fleet) as services:
        envelope = await call(services, "remember", "milk")
        async with services.database.read() as transaction:
            newest = await MessageRepository(transaction.connection).newest(CHAT, limit=50)
    left = [message for message in newest if message.call_id == envelope.call_id]
    assert [(message.kind, message.text) for message in left] == [("system", "remembered milk")]
    assert value(envelope) == "remembered milk"


async def test_code_calls_methods_in_loops_and_threads(fleet: Any) -> None:
    code = """
from concurrent.futures import ThreadPoolExecutor
total = 0
for number in range(5):
    total = add(total, number)
with ThreadPoolExecutor(4) as pool:
    sums = list(pool.map(lambda n: add(n, n), range(12)))
print(total, sums, tests.probe.add(20, 1), _ck)
"""
    async with opened(fleet) as services:
        report = await run(services, code)
    assert report.stop_type is StopType.NORMAL, report.output
    assert report.output.split("\n")[0] == f"10 {[n * 2 for n in range(12)]} 21 {CHAT}"
    assert len(report.calls) == 18


async def test_methods_named_like_parts_of_the_sandbox_do_not_replace_them(fleet: Any) -> None:
    code = """
print(dynamic_importer('json').dumps([add(1, 2)]))
print(KroMiose.dynamic_importer.dynamic_importer('json'), KroMiose.dynamic_importer.MethodError(), method_0())
try:
    fail_with('too bad')
except MethodError as exc:
    print(exc)
"""
    async with opened(fleet) as services:
        report = await run(services, code)
        assert value(await call(services, "dynamic_importer", "json")) == "json from the plugin"
    assert report.stop_type is StopType.NORMAL, report.output
    assert report.output.splitlines() == [
        "[3]",
        "json from the plugin no error no error",
        "ValueError: too bad",
    ]


async def test_an_error_of_a_method_names_the_callers_line(fleet: Any) -> None:
    async with opened(fleet) as services:
        report = await run(services, "x = 1\nfail_with('too bad')\nprint('not reached')\n")
        wrong = await run(services, "add(1)\n")
        syntax = await run(services, "def broken(:\n    pass\n")
    assert report.stop_type is StopType.ERROR
    assert "line 2" in report.output and "MethodError: ValueError: too bad" in report.output
    assert "not reached" not in report.output
    assert "TypeError" in wrong.output and "'b'" in wrong.output
    assert syntax.stop_type is StopType.ERROR and "SyntaxError" in syntax.output


async def test_an_agent_call_ends_the_code_and_requests_one_round(fleet: Any) -> None:
    chat_key = "agent-call"
    async with opened(fleet) as services:
        report = await run(services, "look_up('tea')\nremember('never')\n", follow_up=True, chat_key=chat_key)
        async with services.database.read() as transaction:
            rounds = await RoundRepository(transaction.connection).newest(chat_key, limit=10)
            messages = await MessageRepository(transaction.connection).newest(chat_key, limit=10)
    assert report.stop_type is StopType.AGENT
    assert [call["method"] for call in report.calls] == ["tests.probe.look_up"]
    assert report.follow_ups == [{"round_id": rounds[0].id, "method": "tests.probe.look_up"}]
    assert [(item.trigger_kind, item.observation) for item in rounds] == [("call", "all about tea")]
    assert [message.text for message in messages] == ["all about tea"]


async def test_files_are_exchanged_with_the_sandbox_in_both_directions(fleet: Any) -> None:
    code = """
open('shared/made.txt', 'w').write('made in the sandbox')
print(read_text('/app/shared/made.txt'))
print(open(write_text('given.txt', 'made by the plugin')).read())
print(open('uploads/sent.txt').read())
"""
    async with opened(fleet) as services:
        (services.areas.uploads_dir(CHAT) / "sent.txt").write_text("sent by a person")
        report = await run(services, code)
    expected = ["made in the sandbox", "made by the plugin", "sent by a person"]
    assert report.output.splitlines() == expected, report.output
