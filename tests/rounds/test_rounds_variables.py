"""Variables that programs of a turn leave for its next program."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
from round_bench import Bench, Model, states
from sqlalchemy import func, select

from storage.tables import TURN_VARIABLES

OpenBench = Callable[..., Awaitable[Bench]]
KEEPS = {"keep_variables": True}


@pytest.fixture
async def bench(kind: str, open_bench: OpenBench) -> Bench:
    return await open_bench(kind, sandbox=KEEPS)


async def stored(bench: Bench) -> int:
    async with bench.database.read() as tx:
        return int((await tx.connection.execute(select(func.count()).select_from(TURN_VARIABLES))).scalar())


def footer(prompt: str) -> list[str]:
    return [line for line in prompt.split("\n") if line.startswith("Variables for your next program")]


@pytest.mark.extended
async def test_the_next_program_begins_with_the_variables_and_its_prompt_names_them(bench: Bench) -> None:
    model = Model(
        "rows = [(1, 'a')]\nwhen = __import__('datetime').date(2026, 5, 4)\nit = iter(rows)\nexit(9)",
        "total = len(rows)\nprint(rows, when)\nexit(9)",
        "print(total, rows)",
    )
    await bench.say("chat", "go")
    rounds = await bench.play("chat", bench.drain(model, slots=2))
    assert states(rounds) == ["done"] * 3
    assert rounds[1].output == "[(1, 'a')] 2026-05-04\n"
    assert rounds[2].output == "1 [(1, 'a')]\n"
    assert footer(model.prompts[0]) == []
    assert footer(model.prompts[1]) == ["Variables for your next program: kept: rows, when; not kept: it."]
    assert footer(model.prompts[2]) == ["Variables for your next program: kept: rows, when, total."]
    assert "Top-level variables of plain values" in model.prompts[0]
    assert await stored(bench) == 0


async def test_variables_are_kept_at_a_call_that_ends_the_program(bench: Bench) -> None:
    model = Model("x = {'a': 1}\nhelp_of('help_of')", "print(x)")
    await bench.say("chat", "go")
    rounds = await bench.play("chat", bench.drain(model))
    assert [item.output for item in rounds] == ["", "{'a': 1}\n"]


@pytest.mark.extended
async def test_the_next_turn_begins_without_them(bench: Bench) -> None:
    model = Model("x = 1\nexit(9)", "print(x)", "print('x' in globals())")
    for _ in range(2):
        await bench.say("chat", "go")
        rounds = await bench.play("chat", bench.drain(model))
    assert [item.output for item in rounds] == ["", "1\n", "False\n"]


@pytest.mark.extended
async def test_a_program_that_is_killed_leaves_those_of_the_program_before(open_bench: OpenBench) -> None:
    bench = await open_bench("sqlite", sandbox={**KEEPS, "wall_seconds": 5})
    model = Model("x = 1\nexit(9)", "x = 2\nwhile True: pass", "print(x)")
    await bench.say("chat", "go")
    rounds = await bench.play("chat", bench.drain(model))
    assert rounds[2].output == "1\n"
    assert await stored(bench) == 0


async def test_a_turn_that_is_stopped_leaves_nothing(bench: Bench) -> None:
    async def stop(_: object) -> str:
        assert await stored(bench) == 1
        await bench.services.stopper.stop("chat", reason="no", wait_seconds=0)
        return "print(x)"

    model = Model("x = 1\nexit(9)", stop)
    await bench.say("chat", "go")
    assert states(await bench.play("chat", bench.drain(model))) == ["done", "cancelled"]
    assert await stored(bench) == 0


@pytest.mark.extended
async def test_a_round_that_starts_again_begins_with_the_same_variables(bench: Bench) -> None:
    async def lose(_: object) -> str:
        await bench.let_leases_run_out()
        again = Model("print('second', x)")
        await bench.drain(again, owner="w2").drain("chat")
        assert footer(again.prompts[0]) == ["Variables for your next program: kept: x."]
        return "print('first', x)"

    model = Model("x = 1\nexit(9)", lose)
    await bench.say("chat", "go")
    rounds = await bench.play("chat", bench.drain(model, owner="w1"))
    assert [item.output for item in rounds] == ["", "second 1\n"]


@pytest.mark.extended
async def test_without_the_setting_nothing_is_kept_or_said(open_bench: OpenBench) -> None:
    bench = await open_bench("sqlite")
    model = Model("x = 1\nexit(9)", "print('x' in globals())")
    await bench.say("chat", "go")
    rounds = await bench.play("chat", bench.drain(model))
    assert rounds[1].output == "False\n"
    assert footer(model.prompts[1]) == [] and "Top-level variables" not in model.prompts[0]
