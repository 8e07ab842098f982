"""Programs that wait for a job, a time or an answer: without a process, and go on at their line."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

import pytest
from round_bench import Bench, Model
from sqlalchemy import update
from test_rounds_approval import SAY, turn_ends
from waiting import eventually

from broker_config.settings import RetentionSettings
from nekro.app.calls import waits as program_waits
from nekro.app.jobs import cancel_job
from nekro.sandbox.models import StopType
from nekro.wire.invocation import new_id
from nekro_agent.errors import BrokerUnavailableError
from nekro_agent.ports import IncomingMessage, JobState
from nekro_agent.shared_clock import shared_time
from nekro_client.event_types import EventType
from storage.repositories.jobs import NewJob
from storage.repositories.parked_programs import Wait
from storage.repositories.rounds import Round
from storage.retention import delete_expired
from storage.states import CallState, WaitKind
from storage.tables import CALLS, PARKED_PROGRAMS, ROUNDS
from workers.ops.sweeps import WaitSweep

OpenBench = Callable[..., Awaitable[Bench]]
ASK = """
tick("before")
answer = ask_user("Which one?", ["red", "blue"])
send_msg_text(_ck, f"you said {answer}")
"""

ASK_TWO = """
try:
    ask_user("Two?")
except MethodError as exc:
    print(exc)
"""


async def play(bench: Bench, code: str, *, chat_key: str = "chat", user_id: str = "u1") -> Round:
    """Let a person cause a turn whose model answers with a program; returns its round."""
    await bench.say(chat_key, "hello", user_id=user_id)
    return (await bench.play(chat_key, bench.drain(Model(code))))[-1]


async def go_on(bench: Bench, model: Model | None = None, *, chat_key: str = "chat") -> tuple[Model, Round]:
    """Run what was requested; returns the model, and the last round."""
    model = model or Model(SAY)
    rounds = await bench.play(chat_key, bench.drain(model, owner="w2"))
    return model, rounds[-1]


async def reply(
    bench: Bench, text: str, *, chat_key: str = "chat", user_id: str = "u1", **more: Any
) -> str | None:
    """Receive a message as an adapter does; returns the turn in which it is answered."""
    issuer = more.pop("issuer", "sse")
    message = IncomingMessage(chat_key=chat_key, text=text, user_id=user_id, user_name=user_id, **more)
    receipt = await bench.services.intake.accept(message, issuer=issuer)
    return None if receipt is None else receipt.turn_id


async def waits_of(bench: Bench, chat_key: str = "chat") -> list[Wait]:
    async with bench.database.read() as tx:
        return await tx.parked_programs.open_of_chat(chat_key)


async def let_time_pass(bench: Bench) -> None:
    """Let the waits be over, and sweep."""
    async with bench.database.begin() as tx:
        is_open = PARKED_PROGRAMS.c.until.is_not(None)
        statement = update(PARKED_PROGRAMS).where(is_open).values(until=shared_time() - timedelta(seconds=1))
        await tx.connection.execute(statement)
    await WaitSweep(bench.database, bench.services.waits).sweep()


async def texts(bench: Bench, chat_key: str = "chat") -> list[str]:
    return [message.text for message in await bench.messages(chat_key)]


def soon(**delta: float) -> str:
    return (shared_time() + timedelta(**delta)).isoformat()


async def new_job(bench: Bench, chat_key: str = "chat") -> str:
    """Record a background job of a chat that no worker runs."""
    async with bench.database.begin() as tx:
        await tx.chats.lock(chat_key, create=True)
        new = NewJob(type="brewing", task_id=new_id(), plugin_key="tests.scene", chat_key=chat_key, args={})
        return (await tx.jobs.add(new)).id


async def end_job(bench: Bench, job_id: str, *, data: Any = None, error: str | None = None) -> None:
    """End it as its worker does."""
    async with bench.database.begin() as tx:
        claim = await tx.jobs.claim(job_id, worker="w", lease_seconds=60)
        assert claim is not None
        state = JobState.SUCCEEDED if error is None else JobState.FAILED
        ended = await tx.jobs.finish(
            job_id, fence=claim.fence, state=state, message=error or "done", data=data
        )
        await program_waits.job_ended(tx, bench.services.publisher, ended)


async def test_the_answer_of_the_person_is_the_value_of_the_call(bench: Bench) -> None:
    first = await play(bench, ASK)
    assert first.stop_type == StopType.WAITING
    (wait,) = await waits_of(bench)
    assert (wait.kind, wait.subject, wait.program_id) == (WaitKind.ANSWER, "u1", first.id)
    ((turn_id, ended),) = await turn_ends(bench)
    assert (turn_id, ended["state"]) == (first.turn_id, "waiting")
    assert ended["waits"][0]["choices"] == ["red", "blue"] and "waits_for" not in ended
    asked = (await bench.messages("chat"))[-1]
    assert asked.text == "Which one?\n1. red\n2. blue" and (asked.data or {})["choices"] == ["red", "blue"]
    bench.caller.lose_everything()
    turn = await reply(bench, " Blue ")
    model, last = await go_on(bench)
    assert model.prompts == [] and last.stop_type == StopType.NORMAL
    assert (last.turn_id, last.program_id) == (turn, first.id)
    assert (await texts(bench))[-1] == "you said blue"
    assert [line for line in bench.journal() if line.startswith("tick")] == ["tick before"]
    async with bench.database.read() as tx:
        events = [event.type for event in await tx.events.after("chat", number=0, limit=200)]
    assert events.count(EventType.WAIT_STARTED) == events.count(EventType.WAIT_ENDED) == 1
    assert events.count(EventType.TURN_STARTED) == 2, "the answer begins no turn of its own"


@pytest.mark.parametrize("kind", ["sqlite"])
async def test_only_the_person_who_caused_the_turn_answers_and_only_in_its_chat(bench: Bench) -> None:
    await play(bench, ASK)
    await reply(bench, "blue", chat_key="other")
    await reply(bench, "blue", user_id="u2")
    await reply(bench, "blue", issuer=None)
    await reply(bench, "/blue")
    await reply(bench, "quietly: blue")
    assert len(await waits_of(bench)) == 1
    await go_on(bench)
    await go_on(bench, chat_key="other")
    assert "you said blue" not in await texts(bench)
    await reply(bench, "2", is_tome=False)
    await go_on(bench)
    assert (await texts(bench))[-1] == "you said blue"


@pytest.mark.parametrize("kind", ["sqlite"])
async def test_a_program_that_begins_to_wait_without_the_broker_goes_on_with_what_it_had(
    kind: str, open_bench: OpenBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: object) -> None:
        raise BrokerUnavailableError("it does not answer")

    bench = await open_bench(kind, sandbox={"keep_variables": True})
    waits = "tick('once')\nprint(number, ask_user('Which one?'))"
    with monkeypatch.context() as patch:
        patch.setattr(bench.caller, "results", fail)
        await bench.say("chat", "hello")
        await bench.play("chat", bench.drain(Model("number = 7\nlook('at it')", waits)))
    await reply(bench, "red")
    model, last = await go_on(bench)
    assert (model.prompts, last.stop_type, last.output) == ([], StopType.NORMAL, "7 red\n")
    assert bench.journal().count("tick once") == 1


@pytest.mark.parametrize("kind", ["sqlite"])
async def test_what_another_program_writes_meanwhile_is_not_undone(bench: Bench) -> None:
    await play(
        bench,
        """
with open("log.txt", "a") as log:
    print("first", file=log)
print(ask_user("Which one?"))
""",
    )
    await bench.say("chat", "and now?", user_id="u2")
    await bench.play(
        "chat", bench.drain(Model("with open('log.txt', 'a') as log:\n    print('other', file=log)"))
    )
    await reply(bench, "red")
    model, _ = await go_on(bench)
    (path,) = (bench.settings.data_dir / "sandboxes").glob("*/log.txt")
    assert len(model.prompts) == 1 and "another program of the chat" in model.prompts[0]
    assert path.read_text() == "first\nother\n"


@pytest.mark.parametrize("kind", ["sqlite"])
async def test_the_files_of_a_chat_stay_while_its_program_waits(bench: Bench) -> None:
    """They are emptied when they were idle for half an hour, and a program may wait for days."""
    cleaner = (await bench.services.sandboxes())._cleaner
    cleaner._idle_seconds = -1
    reads = "print(open('data.txt').read(), ask_user('Which one?'))"
    await bench.say("chat", "hello")
    await bench.play("chat", bench.drain(Model("open('data.txt', 'w').write('kept')\nlook('at it')", reads)))
    await cleaner.sweep()
    await reply(bench, "red")
    await cleaner.sweep()
    _, last = await go_on(bench)
    assert (last.stop_type, last.output) == (StopType.NORMAL, "kept red\n")
    areas = bench.settings.data_dir / "sandboxes"
    assert list(areas.glob("*/data.txt"))
    await cleaner.sweep()
    assert not list(areas.glob("*/data.txt"))


@pytest.mark.parametrize(("waits", "days"), [(True, 40), (False, 40), (False, 8)])
async def test_retention_keeps_what_a_program_needs_until_it_has_ended(
    bench: Bench, waits: bool, days: int
) -> None:
    code = """
keep("once")
print(ask_user("Which one?"))
"""
    await play(bench, code)
    bench.caller.lose_everything()
    if not waits:
        await reply(bench, "red")  # and the round that goes on is late
    async with bench.database.begin() as tx:
        long_ago = shared_time() - timedelta(days=days)
        for table in (CALLS, ROUNDS):
            is_ended = table.c.finished_at.is_not(None)
            await tx.connection.execute(update(table).where(is_ended).values(finished_at=long_ago))
    await delete_expired(bench.database, RetentionSettings())
    if waits:
        await reply(bench, "red")
    _, last = await go_on(bench)
    assert (last.stop_type, last.output) == (StopType.NORMAL, "red\n")
    assert bench.journal().count("keep once") == 1
    deleted = await delete_expired(bench.database, RetentionSettings())
    assert deleted["calls"] >= 1 and deleted["rounds"] == (days > 30)


@pytest.mark.parametrize("kind", ["sqlite"])
async def test_a_banned_person_does_not_answer(bench: Bench) -> None:
    await play(bench, ASK)
    async with bench.database.begin() as tx:
        chat = await tx.chats.get("chat")
        until = shared_time() + timedelta(days=1)
        await tx.records.change_user(chat.adapter_key or "", "u1", {"ban_until": until})
    assert await reply(bench, "blue") is None
    assert len(await waits_of(bench)) == 1


@pytest.mark.parametrize("kind", ["sqlite"])
async def test_questions_are_answered_one_after_the_other(bench: Bench) -> None:
    code = 'print([ask_user(f"{name}?") for name in ("first", "second")])'
    await play(bench, code)
    for answer in ("one", "two"):
        assert len(await waits_of(bench)) == 1
        await reply(bench, answer)
        model, last = await go_on(bench)
        assert model.prompts == []
    assert last.output == "['one', 'two']\n"
    assert [text for text in await texts(bench) if text.endswith("?")] == ["first?", "second?"]


@pytest.mark.parametrize("kind", ["sqlite"])
async def test_a_question_without_an_answer_raises_in_the_program(bench: Bench) -> None:
    code = """
try:
    ask_user("You?", timeout=60)
except TimeoutError as exc:
    send_msg_text(_ck, str(exc))
"""
    await play(bench, code)
    (wait,) = await waits_of(bench)
    assert wait.until is not None and wait.until < shared_time() + timedelta(seconds=61)
    await let_time_pass(bench)
    await go_on(bench)
    assert "no answer has arrived in time" in (await texts(bench))[-1]
    assert await reply(bench, "late") is not None, "it begins a turn, as any message"


async def test_a_program_waits_for_a_time(bench: Bench) -> None:
    first = await play(bench, f'sleep_until("{soon(hours=1)}")\nsend_msg_text(_ck, "morning")')
    assert first.stop_type == StopType.WAITING
    sweep = WaitSweep(bench.database, bench.services.waits).sweep
    assert 3500 < (await sweep() or 0) <= 3600 and len(await waits_of(bench)) == 1
    await let_time_pass(bench)
    assert await sweep() is None
    model, last = await go_on(bench)
    assert model.prompts == [] and last.number == first.number
    assert (await texts(bench))[-1] == "morning"


@pytest.mark.parametrize("kind", ["sqlite"])
async def test_a_short_wait_for_a_time_keeps_the_sandbox(bench: Bench) -> None:
    code = f'import time\nsleep_until("{soon(seconds=1)}")\nsleep_until(time.time() - 5)\nprint("on")'
    only = await play(bench, code)
    assert (only.stop_type, only.output) == (StopType.NORMAL, "on\n")
    async with bench.database.read() as tx:
        rows = await tx.calls.of_round(only.id)
    assert [row.state for row in rows] == [CallState.DONE, CallState.DONE]


@pytest.mark.parametrize("kind", ["sqlite"])
async def test_a_time_without_a_zone_or_that_is_none_is_refused(bench: Bench) -> None:
    code = """
import datetime
naive = datetime.datetime(2030, 1, 1)
for time in ("2030-01-31", "soon", None, True, float("nan"), 1e300, 10**400, naive, [1]):
    try:
        sleep_until(time)
    except TypeError as exc:
        print(exc)
"""
    last = await play(bench, code)
    assert (last.output or "").count("must be a datetime with a time zone") == 9


@pytest.mark.parametrize("kind", ["sqlite"])
async def test_what_is_later_than_programs_may_wait_is_refused(bench: Bench) -> None:
    last = await play(
        bench, f'try:\n    sleep_until("{soon(days=8)}")\nexcept MethodError as exc:\n    print(exc)'
    )
    assert "WaitRefusedError: sleep_until: this program may wait until" in (last.output or "")


async def test_a_program_waits_for_a_job_and_gets_its_value(bench: Bench) -> None:
    job_id = await new_job(bench)
    await play(bench, f'send_msg_text(_ck, str(wait_for_job("{job_id}")["cups"]))')
    (wait,) = await waits_of(bench)
    assert (wait.kind, wait.subject) == (WaitKind.JOB, job_id)
    await end_job(bench, job_id, data={"cups": 3})
    model, _ = await go_on(bench)
    assert model.prompts == [] and (await texts(bench))[-1] == "3"
    last = await play(bench, f'print(wait_for_job("{job_id}"))')
    assert (last.stop_type, last.output) == (StopType.NORMAL, "{'cups': 3}\n")


@pytest.mark.parametrize("kind", ["sqlite"])
@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_the_error_of_a_job_is_raised_in_the_program(bench: Bench, is_cancelled: bool) -> None:
    job_id = await new_job(bench)
    code = f'try:\n    wait_for_job("{job_id}")\nexcept MethodError as exc:\n    print(exc)'
    await play(bench, code)
    if is_cancelled:
        await cancel_job(bench.database, bench.services.publisher, job_id)
    else:
        await end_job(bench, job_id, error="no beans")
    _, last = await go_on(bench)
    kind = "JobCancelledError" if is_cancelled else "JobFailedError"
    assert f"{kind}: job {job_id} of brewing: " in (last.output or "")


@pytest.mark.parametrize("kind", ["sqlite"])
async def test_the_job_of_another_chat_does_not_exist(bench: Bench) -> None:
    job_id = await new_job(bench, "other")
    last = await play(bench, f'try:\n    wait_for_job("{job_id}")\nexcept TypeError as exc:\n    print(exc)')
    assert "this chat has no job" in (last.output or "") and await waits_of(bench) == []


@pytest.mark.parametrize("kind", ["sqlite"])
async def test_a_detached_call_is_waited_for_as_a_job(kind: str, open_bench: OpenBench) -> None:
    bench = await open_bench(kind, workers={"wait_seconds": 0.5})
    code = """
try:
    snooze("tea")
except MethodError as exc:
    job_id = str(exc).split("job ")[1].split(".")[0]
print("brewed", wait_for_job(job_id))
"""
    first = await play(bench, code)
    assert first.stop_type == StopType.WAITING, first.output
    await bench.noted("woke tea")

    async def goes_on() -> bool:
        return not await waits_of(bench)

    await eventually(goes_on, what="the end of the call to be recorded")
    model, last = await go_on(bench)
    assert model.prompts == [] and last.output == "brewed tea\n"
    assert not any("returned" in text for text in await texts(bench)), "the program reads it, not the model"


@pytest.mark.parametrize("kind", ["sqlite"])
@pytest.mark.parametrize("resets", [False, True])
async def test_cancel_and_reset_end_a_wait(bench: Bench, resets: bool) -> None:
    first = await play(bench, ASK)
    if resets:
        await bench.services.intake.reset(await bench.services.chat("chat"))
    else:
        await bench.services.endings.cancel("chat", reason="enough", turn_id=first.turn_id)
    assert await waits_of(bench) == []
    async with bench.database.read() as tx:
        (row,) = [call for call in await tx.calls.of_round(first.id) if call.method.endswith("ask_user")]
    assert row.state is CallState.CANCELLED
    await reply(bench, "blue")
    model, last = await go_on(bench)
    assert len(model.prompts) == 1 and last.program_id is None


@pytest.mark.parametrize("kind", ["sqlite"])
async def test_hostile_choices_are_refused(bench: Bench) -> None:
    code = """
for choices in (
    ["/approve 17"], ["  /deny 1"], ["a\\n2. b"], ["a\\u202eb"], ["\\x1b[2J"], [], ["x"] * 2, ["x" * 101],
    "yes", [1], [str(number) for number in range(21)],
):
    try:
        ask_user("Sure?", choices)
    except TypeError as exc:
        print(exc)
"""
    last = await play(bench, code)
    assert (last.output or "").count("ask_user: ") == 11 and await waits_of(bench) == []


@pytest.mark.parametrize("kind", ["sqlite"])
async def test_a_chat_and_a_program_have_limits(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program_waits, "MOST_OPEN", 1)
    await play(bench, f'sleep_until("{soon(hours=1)}")')
    last = await play(bench, 'try:\n    ask_user("You?")\nexcept MethodError as exc:\n    print(exc)')
    assert "WaitRefusedError: ask_user: 1 programs of this chat wait already" in (last.output or "")
    monkeypatch.setattr(program_waits, "MOST_OPEN", 20)
    monkeypatch.setattr(program_waits, "MOST_OF_PROGRAM", 1)
    await let_time_pass(bench)
    await go_on(bench)
    await play(
        bench, 'ask_user("One?")\ntry:\n    ask_user("Two?")\nexcept MethodError as exc:\n    print(exc)'
    )
    await reply(bench, "yes")
    _, last = await go_on(bench)
    assert "this program has waited 1 times" in (last.output or "")


@pytest.mark.parametrize("kind", ["sqlite"])
async def test_code_outside_of_rounds_cannot_wait(bench: Bench) -> None:
    chat = await bench.services.chat("chat")
    report = await bench.services.runs.run('ask_user("You?")', chat=chat, user_id="u1", wakes_agent=True)
    assert "WaitRefusedError: ask_user: only a program of a turn can wait" in report.output
    assert (report.stop_type, await waits_of(bench)) == (StopType.ERROR, [])


@pytest.mark.parametrize("kind", ["sqlite"])
async def test_a_program_that_cannot_be_run_again_cannot_wait(kind: str, open_bench: OpenBench) -> None:
    bench = await open_bench(kind, agent={"lease_seconds": 30, "journal_bytes": 0})
    last = await play(bench, 'try:\n    ask_user("You?")\nexcept MethodError as exc:\n    print(exc)')
    assert "this program cannot wait, because it cannot be run again" in (last.output or "")


@pytest.mark.parametrize("kind", ["sqlite"])
async def test_one_thread_waits_and_the_others_ask_after_it(bench: Bench) -> None:
    code = """
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(3) as pool:
    print(sorted(pool.map(ask_user, ["a?", "b?", "c?"])))
"""
    await play(bench, code)
    for answer in ("1", "2", "3"):
        assert len(await waits_of(bench)) == 1
        await reply(bench, answer)
        _, last = await go_on(bench)
    assert last.output == "['1', '2', '3']\n"


async def test_a_wait_that_ends_before_its_round_is_recorded_continues_the_program_once(bench: Bench) -> None:
    code = 'answer = ask_user("You?")\nopen("log.txt", "a").write(answer)\nsend_msg_text(_ck, answer)'
    first = await play(bench, code)
    async with bench.database.begin() as tx:  # as if its worker had died before the end was recorded
        running = update(ROUNDS).where(ROUNDS.c.id == first.id).values(state="running", finished_at=None)
        await tx.connection.execute(running)
    await reply(bench, "yes")
    model, _ = await go_on(bench)
    rounds = await bench.rounds("chat")
    assert [one.state.value for one in rounds] == ["done", "merged"] and model.prompts == []
    assert (await texts(bench)).count("yes") == 2, "the answer, and what the program sent"
    async with bench.database.read() as tx:
        chat = await tx.chats.get("chat")
    assert (bench.services.areas.shared_dir(chat.container_key) / "log.txt").read_text() == "yes"
    ends = [turn_id for turn_id, _ in await turn_ends(bench)]
    assert rounds[1].turn_id in ends
