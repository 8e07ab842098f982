"""Replays: programs of a turn run again with their recorded answers, without a worker."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from round_bench import Bench, Model
from sqlalchemy import update
from test_rounds_approval import approve_and_run, asked, open_till, paid
from test_rounds_waits import ASK, go_on, play, reply

from nekro.app.rounds.turn_replays import TurnReplay
from nekro.sandbox.models import StopType
from storage.tables import ROUNDS

OpenBench = Callable[..., Awaitable[Bench]]
FIRST = """
import random, time
begun = time.time_ns()
numbers = [tick(str(number)) for number in range(3)]
print(keep("a promise"), random.random(), sorted({"a", "b", "c"}), begun)
try:
    break_down("hard")
except MethodError as exc:
    print(exc)
send_msg_text(_ck, f"{numbers}")
total = 7
look("tea")
"""
SECOND = 'import time\nsend_msg_text(_ck, "done")\nprint(total, time.time())'


@pytest.fixture
async def bench(kind: str, open_bench: OpenBench) -> Bench:
    """A bench whose programs keep their variables."""
    return await open_bench(kind, sandbox={"keep_variables": True})


async def played(bench: Bench) -> str:
    """Play a turn of two programs; returns its id."""
    await bench.say("chat", "hello")
    rounds = await bench.play("chat", bench.drain(Model(FIRST, SECOND)))
    return rounds[0].turn_id


async def replay(bench: Bench, turn_id: str) -> TurnReplay:
    async with bench.services.replayer() as replayer:
        return await replayer.replay(turn_id)


async def test_a_turn_is_replayed_without_effects(bench: Bench) -> None:
    turn_id = await played(bench)
    journal, said = bench.journal(), len(await bench.messages("chat"))
    bench.caller.lose_everything()
    found = await replay(bench, turn_id)
    assert [(one.number, one.differences) for one in found.programs] == [(1, []), (2, [])]
    assert found.is_same and [one.answered for one in found.programs] == [7, 1]
    assert found.programs[1].output.startswith("7 ")
    assert bench.journal() == journal and len(await bench.messages("chat")) == said
    assert not list((bench.settings.data_dir / "replays").iterdir())


@pytest.mark.parametrize("kind", ["sqlite"])
async def test_methods_are_replayed_by_the_names_that_the_program_used(bench: Bench, tmp_path: Path) -> None:
    await bench.say("chat", "hello")
    code = 'print(mark("a"), tests.scene.keep("b"), mark("a"))\nlook("tea")'
    rounds = await bench.play("chat", bench.drain(Model(code, 'print(tick("c"), mark("d"))')))
    async with bench.services.replayer() as replayer:
        found = await replayer.replay(rounds[0].turn_id)
        assert found.is_same and [one.answered for one in found.programs] == [4, 2]
        await replayer.save(found, tmp_path / "names.yaml")
    assert (tmp_path / "names.yaml").read_text().count("called_as: mark") == 3


async def test_what_differs_is_named(bench: Bench) -> None:
    turn_id = await played(bench)
    changed = FIRST.replace('keep("a promise")', 'keep("another")').replace("range(3)", "range(2)")
    async with bench.database.begin() as tx:
        await tx.connection.execute(update(ROUNDS).where(ROUNDS.c.number == 1).values(code=changed))
    found = await replay(bench, turn_id)
    first = found.programs[0].differences
    assert [(one.kind, one.line) for one in first] == [
        ("call", 5),
        *[("missing", None)] * 5,
        ("end", None),
        ("output", None),
    ]
    assert "tests.scene.keep" in first[0].text and "another" in first[0].text
    assert "ended as ERROR, and before as AGENT" in first[-2].text
    assert "NotRecordedError" in first[-1].text
    assert not found.is_same


@pytest.mark.parametrize("kind", ["sqlite"])
async def test_an_answer_that_was_not_kept_is_a_difference(bench: Bench) -> None:
    await bench.say("chat", "hello")
    (round_,) = await bench.play("chat", bench.drain(Model("print(len(tick('x' * 5000)))")))
    found = await replay(bench, round_.turn_id)
    first = found.programs[0].differences[0]
    assert (first.kind, first.line) == ("answer", 1) and "4,000 bytes" in first.text


@pytest.mark.parametrize("kind", ["sqlite"])
async def test_a_program_that_waited_is_replayed_as_a_whole(kind: str, open_bench: OpenBench) -> None:
    bench = await open_till(open_bench, kind, resume="program")
    row = await asked(bench, 'tick("once")\nprint(pay("ada"))')
    await approve_and_run(bench, row)
    rounds = await bench.play("chat", bench.drain(Model("")))
    assert (await replay(bench, rounds[0].turn_id)).is_same
    found = await replay(bench, rounds[-1].turn_id)
    assert found.is_same and found.programs[0].output == "receipt ada 1\n"
    assert paid(bench) == ["paid ada 1"]


@pytest.mark.parametrize("kind", ["sqlite"])
async def test_a_program_is_replayed_to_its_wait_and_beyond(kind: str, open_bench: OpenBench) -> None:
    bench = await open_till(open_bench, kind, resume="program")
    first = await play(bench, ASK)
    assert (await replay(bench, first.turn_id)).is_same, "it still waits"
    await reply(bench, "red")
    _, last = await go_on(bench)
    found = await replay(bench, first.turn_id)
    assert found.is_same and [one.stop_type for one in found.programs] == [StopType.WAITING]
    found = await replay(bench, last.turn_id)
    assert found.is_same and [one.answered for one in found.programs] == [3]
