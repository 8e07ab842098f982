"""Continuations: a turn goes on in a new chat from one of its calls, with the recorded answers before it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from round_bench import Bench, Model
from sqlalchemy import update
from test_rounds_approval import approve_and_run, asked, open_till, paid
from test_rounds_crash import GO_ON, begun, die, let_go

from nekro.operations.actor import LOCAL, Actor
from nekro.operations.posting import replay_turn
from nekro.sandbox.models import StopType
from nekro_agent.errors import ConflictError, NotFoundError
from nekro_agent.ports import MessageKind
from nekro_client.models import ReplayTurnBody
from storage.repositories.rounds import Round
from storage.states import RoundState
from storage.tables import CALLS, ROUNDS

OpenBench = Callable[..., Awaitable[Bench]]
FIRST = """
import random, time
begun = time.time_ns()
lucky = random.random()
tick(f"one {lucky}")
try:
    break_down(f"two {begun}")
except MethodError as exc:
    print(exc)
keep("three")
open("/app/shared/four.txt", "a").write("four")
tick("five")
later = time.time_ns()
tick(f"six {open('/app/shared/four.txt').read()}")
keep("seven")
print(lucky, begun, later)
total = 7
look("tea")
"""
SECOND = """
tick(f"eight {total}")
send_msg_text(_ck, "nine")
keep("ten")
send_msg_text(_ck, f"eleven {lucky}")
"""
SAY = 'send_msg_text(_ck, "seen")'


@pytest.fixture
async def bench(kind: str, open_bench: OpenBench) -> Bench:
    """A bench whose programs keep their variables."""
    return await open_bench(kind, sandbox={"keep_variables": True})


async def played(bench: Bench, *code: str) -> list[Round]:
    await bench.say("chat", "hello")
    return await bench.play("chat", bench.drain(Model(*code)))


def call_of(item: Round, number: int) -> str:
    """Return the id of a call of a round by its position."""
    return str((item.calls or [])[number]["id"])


async def go_on(bench: Bench, turn_id: str, call_id: str, *code: str) -> tuple[list[Round], Model]:
    """Continue from a call; returns the rounds of the new chat, and the model that they asked."""
    new = await continued(bench, turn_id, call_id)
    model = Model(*code)
    return await bench.play(new, bench.drain(model, owner="w2")), model


async def continued(bench: Bench, turn_id: str, call_id: str) -> str:
    """Continue from a call; returns the new chat."""
    body = ReplayTurnBody(call_id=call_id)
    return (await replay_turn(Actor(services=bench.services, identity=LOCAL), turn_id, body)).chat_key


async def texts(bench: Bench, chat_key: str) -> list[str]:
    """The messages of people and of the agent."""
    found = [MessageKind.USER, MessageKind.ASSISTANT]
    return [message.text for message in await bench.messages(chat_key) if message.kind in found]


async def test_calls_before_the_chosen_one_are_answered_and_the_others_are_made(bench: Bench) -> None:
    first, _ = await played(bench, FIRST, SAY)
    before, said = bench.journal(), await texts(bench, "chat")
    bench.caller.lose_everything()
    rounds, model = await go_on(bench, first.turn_id, call_of(first, 3), SAY)
    made = bench.journal()[len(before) :]
    assert [line.split(" ")[:2] for line in made if not line.startswith("heard")] == [
        ["tick", "five"],
        ["tick", "six"],
        ["keep", "seven"],
        ["look", "tea"],
    ]
    assert "tick six four" in made, "a file has what the program wrote, once"
    now, then = rounds[0], first
    assert (now.stop_type, now.code, now.answer) == (StopType.AGENT, then.code, then.answer)
    lucky, begun, later = (now.output or "").split("\n")[-2].split(" ")
    assert [lucky, begun] == (then.output or "").split("\n")[-2].split(" ")[:2]
    assert later != (then.output or "").split("\n")[-2].split(" ")[2]
    assert len(model.prompts) == 1, "the model is asked for what follows"
    assert [one["id"] for one in now.calls or ()] != [one["id"] for one in then.calls or ()]
    assert await texts(bench, "chat") == said
    assert (await texts(bench, now.chat_key))[-1] == "seen"


async def test_the_programs_before_run_first_with_their_answers(bench: Bench) -> None:
    first, second, *_ = await played(bench, FIRST, SECOND)
    before = bench.journal()
    rounds, model = await go_on(bench, first.turn_id, call_of(second, 2))
    made = [line for line in bench.journal()[len(before) :] if not line.startswith("heard")]
    assert made == ["keep ten"]
    assert model.prompts == [] and [item.number for item in rounds] == [1, 2]
    lucky = (first.output or "").split("\n")[-2].split(" ")[0]
    assert await texts(bench, rounds[0].chat_key) == ["hello", "nine", f"eleven {lucky}"]
    assert [len(item.calls or ()) for item in rounds] == [7, 4]
    async with bench.services.replayer() as replayer:
        assert (await replayer.replay(rounds[0].turn_id)).is_same


async def test_a_continuation_goes_on_again_elsewhere(bench: Bench) -> None:
    first, *_ = await played(bench, FIRST, SAY)
    (second, *_), _ = await go_on(bench, first.turn_id, call_of(first, 3), SAY)
    before = bench.journal()
    (third, *_), _ = await go_on(bench, second.turn_id, call_of(second, 5), SAY)
    made = [line for line in bench.journal()[len(before) :] if not line.startswith("heard")]
    assert made == ["keep seven", "look tea"] and third.output == second.output


@pytest.mark.parametrize("kind", ["sqlite"])
async def test_a_continuation_goes_on_although_its_worker_died(bench: Bench) -> None:
    await bench.say("chat", "hello")
    first = await begun(bench, "chat", Model(GO_ON))
    await bench.noted("tick 2")
    await let_go(bench, "chat")
    await first
    (old,) = await bench.rounds("chat")
    new = await continued(bench, old.turn_id, call_of(old, 3))
    before = len(bench.journal())
    dying = await begun(bench, new, Model(SAY))
    while bench.journal()[before:] != ["tick 2"]:
        await asyncio.sleep(0.05)
    await die(dying)
    await let_go(bench, new)
    model = Model(SAY)
    (item,) = await bench.play(new, bench.drain(model, owner="w2"))
    assert bench.journal()[before:] == ["tick 2", "tick late"] and model.prompts == []
    assert (item.attempt, item.stop_type, item.output) == (2, StopType.NORMAL, old.output)
    async with bench.database.read() as tx:
        found = [event.type for event in await tx.events.of_turn(item.turn_id)]
    assert found.count("call.started") == found.count("call.ended") == 6


@pytest.mark.parametrize("kind", ["sqlite"])
async def test_a_program_that_takes_another_course_repeats_no_effect(bench: Bench) -> None:
    (old,) = await played(
        bench, 'import os\nname = "b" if os.path.exists("shared/x") else "a"\nkeep(name)\ntick("c")'
    )
    new = await continued(bench, old.turn_id, call_of(old, 1))
    async with bench.database.read() as tx:
        chat = await tx.chats.get(new)
    shared = bench.services.areas.shared_dir(chat.container_key)
    shared.mkdir(parents=True, exist_ok=True)
    (shared / "x").touch()
    model = Model(SAY)
    rounds = await bench.play(new, bench.drain(model))
    assert rounds[0].stop_type == StopType.DIVERGED and "keep b" not in bench.journal()
    assert "`keep`: done before, in another chat" in model.prompts[0]


@pytest.mark.parametrize("change", ["another course", "another end"])
async def test_programs_after_one_with_another_end_do_not_run(bench: Bench, change: str) -> None:
    last = "keep('b')\nprint(1 / 0)" if change == "another course" else "keep('a')"
    first, second, *_ = await played(bench, "keep('a')\nprint(1 / 0)", "keep('second')\nkeep('third')", SAY)
    assert first.stop_type == StopType.ERROR
    new = await continued(bench, first.turn_id, call_of(second, 1))
    async with bench.database.begin() as tx:
        changed = update(ROUNDS).where(ROUNDS.c.chat_key == new, ROUNDS.c.number == 1).values(code=last)
        await tx.connection.execute(changed)
    before, model = bench.journal(), Model(SAY)
    rounds = await bench.play(new, bench.drain(model))
    assert not [line for line in bench.journal()[len(before) :] if not line.startswith("heard")]
    stops = [item.stop_type for item in rounds if item.state is not RoundState.MERGED]
    if change == "another end":
        assert (stops, model.prompts) == ([StopType.NORMAL], [])
        (merged,) = [item for item in rounds if item.state is RoundState.MERGED]
        assert merged.merged_into == rounds[0].id
    else:
        assert (stops, len(model.prompts)) == ([StopType.DIVERGED, StopType.NORMAL], 1)


@pytest.mark.parametrize("kind", ["sqlite"])
async def test_a_program_that_waited_goes_on_from_a_call_after_the_wait(
    kind: str, open_bench: OpenBench
) -> None:
    till = await open_till(open_bench, kind, resume="program")
    said = [f'send_msg_text(_ck, "{text}")' for text in ("first", "second")]
    code = f'{said[0]}\npay("ada", amount=3)\n{said[1]}\npay("bob", amount=4)'
    request = await asked(till, code)
    await approve_and_run(till, request)
    rounds = await till.play("chat", till.drain(Model(SAY)))
    last = next(item for item in reversed(rounds) if item.program_id)
    before = len(paid(till))
    new, model = await go_on(till, last.turn_id, call_of(last, 2))
    assert model.prompts == [] and new[-1].stop_type == StopType.APPROVAL
    assert len(paid(till)) == before, "the recorded payment is not repeated, the next one asks"
    said = [text for text in await texts(till, new[0].chat_key) if "waits for approval" not in text]
    assert said == ["hello", "first", "second"]


@pytest.mark.parametrize("kind", ["sqlite"])
async def test_answers_of_all_programs_count_for_the_limit(kind: str, open_bench: OpenBench) -> None:
    bench = await open_bench(kind, agent={"journal_bytes": 3000})
    tick = "tick('{}' * 2000)\n"
    first, second, *_ = await played(bench, f"{tick.format('a')}look('tea')", f"{tick.format('b')}keep('c')")
    await continued(bench, first.turn_id, call_of(second, 0))
    with pytest.raises(ConflictError, match=r"more than 3000 bytes \(NEKRO_AGENT__JOURNAL_BYTES\)"):
        await continued(bench, first.turn_id, call_of(second, 1))


@pytest.mark.parametrize("kind", ["sqlite"])
async def test_what_cannot_go_on_says_why(bench: Bench) -> None:
    first, *_ = await played(bench, FIRST, SAY)
    await bench.say("other", "hi")
    (other,) = await bench.play("other", bench.drain(Model(SAY)))
    actor = Actor(services=bench.services, identity=LOCAL)

    async def refused(kind: type[Exception], **body: Any) -> str:
        with pytest.raises(kind) as caught:
            await replay_turn(actor, first.turn_id, ReplayTurnBody(**body))
        return str(caught.value)

    call_id = call_of(first, 3)
    assert "has no call" in await refused(NotFoundError, call_id="none")
    assert "has no call" in await refused(NotFoundError, call_id=call_of(other, 0))
    async with bench.database.begin() as tx:
        unresumable = update(ROUNDS).where(ROUNDS.c.id == first.id).values(not_resumable="it read too much")
        await tx.connection.execute(unresumable)
    assert "cannot be run again: it read too much" in await refused(ConflictError, call_id=call_id)
    async with bench.database.begin() as tx:
        await tx.connection.execute(update(ROUNDS).where(ROUNDS.c.id == first.id).values(not_resumable=""))
        await tx.connection.exec_driver_sql("DELETE FROM chat_events")
        await tx.connection.execute(CALLS.delete())
    bench.caller.lose_everything()
    assert "was not kept" in await refused(ConflictError, call_id=call_id)
