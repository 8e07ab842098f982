"""Rounds of a chat with hundreds of methods, and with plugins that sleep."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from round_bench import Bench, Model

from nekro.agent.llm import LLMRequest
from nekro.app import use_cases
from nekro.app.rounds.sleeping_plugins import awake_plugins, sleep, wake
from storage.states import TriggerKind

OpenBench = Callable[..., Awaitable[Bench]]
PLUGINS = {"dirs": (Path(__file__).parent / "catalogue_plugins",)}
CHAT = "onebot_v11-group_9"
SAY = 'send_msg_text(_ck, "done")'
SLEEPY = "tests.sleepy"


@pytest.fixture(params=["sqlite"])
def kind(request: pytest.FixtureRequest) -> str:
    """One database: what depends on it is tested on both below."""
    return str(request.param)


async def turn(bench: Bench, model: Model, text: str = "go on") -> list[str]:
    """Let the model answer one message; returns the prompts."""
    before = len(model.prompts)
    drain = bench.drain(model)
    await bench.say(CHAT, text)
    await bench.play(CHAT, drain)
    await drain.close()
    return model.prompts[before:]


def catalogue(prompt: str) -> str:
    return prompt[prompt.index("# Your plugins") : prompt.index("</plugins>")]


@pytest.mark.extended
async def test_a_model_finds_reads_and_calls_one_method_of_hundreds(kind: str, open_bench: OpenBench) -> None:
    bench = await open_bench(kind, plugins=PLUGINS)
    found = 'found = search_tools("elephant weight")\nprint(found[0]["name"], len(found))\nexit(9)'
    call = "send_msg_text(_ck, measure_217(3))"
    model = Model(found, 'help_of("measure_217", "measure_21x")', call, SAY, SAY)
    first, second, third = await turn(bench, model, "how heavy is an elephant?")
    assert "* measure_217 - Measure the weight of an elephant." in first
    assert "measure_217(" not in first and "amount (int)" not in catalogue(first)
    assert "measure_217 1\n" in second
    assert '<agent_result method="help_of">' in third and "amount (int): How many." in third
    assert "* measure_217(amount: int, unit: str = 'kg') -> str" in third
    assert "no method or plugin named measure_21x; similar names: measure_21" in third
    assert catalogue(first) == catalogue(second) == catalogue(third)
    assert [m.text for m in await bench.messages(CHAT)][-1] == "217: 3 kg"
    # What the chat used is in full in the next turn, and only in that list.
    (later,) = await turn(bench, model)
    assert "* measure_217(amount: int" in catalogue(later) and "* measure_216 - " in catalogue(later)
    (same,) = await turn(bench, model)
    assert catalogue(same) == catalogue(later)


@pytest.mark.extended
async def test_a_replayed_round_has_the_same_list(kind: str, open_bench: OpenBench) -> None:
    bench = await open_bench(kind, plugins=PLUGINS)
    await turn(bench, Model("measure_5(1)\nmeasure_6(1)"))
    await bench.say(CHAT, "again")
    async with bench.database.read() as tx:
        (waiting,) = [item for item in await tx.rounds.newest(CHAT, limit=9) if item.finished_at is None]
        recent = await tx.activations.recent_calls(CHAT, before=waiting.sequence, limit=20)
    assert [[call["method"] for call in calls] for calls in recent] == [
        ["tests.crowd.measure_5", "tests.crowd.measure_6"]
    ]

    asked = asyncio.Event()

    async def hang(_: LLMRequest) -> str:
        asked.set()
        await asyncio.Event().wait()
        raise AssertionError

    model = Model(hang, SAY)
    dying = asyncio.create_task(bench.drain(model).drain(CHAT))
    await asked.wait()
    dying.cancel()
    await asyncio.gather(dying, return_exceptions=True)
    rounds = await bench.play(CHAT, bench.drain(model, owner="w2"))
    assert rounds[-1].attempt == 2
    first, second = model.prompts
    assert catalogue(first) == catalogue(second) and "* measure_5(amount" in catalogue(second)


@pytest.mark.extended
async def test_a_plugin_sleeps_until_it_is_woken_for_some_turns(kind: str, open_bench: OpenBench) -> None:
    bench = await open_bench(kind, plugins=PLUGINS)
    asleep = '<plugin name="Sleepy" module="sleepy" state="asleep">\nPaints pictures.\n</plugin>'
    model = Model('activate_plugin("sleepy", 2)', 'send_msg_text(_ck, paint("a hat"))', SAY)
    first, second = await turn(bench, model)
    assert asleep in first and "The easel" not in first and "activate_plugin(" in first
    assert asleep in second and "* paint(what: str) -> str\nPaint a picture" in second
    assert "Plugin sleepy is awake for 2 turns." in second and "The easel is ready." in second
    assert [m.text for m in await bench.messages(CHAT)][-1] == "a picture of a hat"
    for left in (2, 1):
        (prompt,) = await turn(bench, model)
        assert f'module="sleepy" turns_left="{left}">' in prompt and "The easel is ready." in prompt
    (prompt,) = await turn(bench, model)
    assert asleep in prompt


@pytest.mark.extended
async def test_a_plugin_is_kept_awake_for_more_turns(kind: str, open_bench: OpenBench) -> None:
    bench = await open_bench(kind, plugins=PLUGINS)
    extend = 'print(extend_plugin_activation("sleepy", 3))\nexit(9)'
    model = Model('activate_plugin("sleepy", 1)', SAY, extend, SAY)
    await turn(bench, model)
    first, second = await turn(bench, model)
    assert 'turns_left="1"' in first and 'turns_left="4"' in second
    assert "Plugin sleepy stays awake for 4 turns." in second
    (prompt,) = await turn(bench, model)
    assert 'turns_left="3"' in prompt


@pytest.mark.extended
async def test_operators_keep_plugins_awake(kind: str, open_bench: OpenBench) -> None:
    bench = await open_bench(kind, plugins={**PLUGINS, "keep_awake": ("tests.*",)})
    model = Model('activate_plugin("sleepy")', 'activate_plugin("sleapy")', SAY)
    first, second, third = await turn(bench, model)
    assert 'state="asleep"' not in first and "The easel is ready." in first
    assert "Plugin sleepy is always awake." in second
    assert "similar names: sleepy" in third


@pytest.mark.extended
async def test_only_what_the_chat_may_use_is_found_and_explained(kind: str, open_bench: OpenBench) -> None:
    bench = await open_bench(kind, plugins=PLUGINS)
    model = Model(
        'print([one["name"] for one in search_tools("vault")])\nexit(9)',
        'help_of("closed_vault", "tests.closed.closed_vault", "closed")',
        "help_of()",
        'search_tools("x", limit=51)',
        SAY,
    )
    prompts = await turn(bench, model)
    assert "['opened_vault']" in prompts[1]
    helped = prompts[2][prompts[2].index("<agent_result") :]
    assert helped.count("no method or plugin named") == 2 and "vault that is closed" not in helped
    assert "Methods of plugin closed:\n* opened_vault" in helped
    assert "TypeError: help_of takes 1 to 20 names" in prompts[3]
    assert "limit=51 must be a number from 1 to 50" in prompts[4]
    assert "vault that is closed" not in "".join(prompts)


@pytest.mark.extended
async def test_a_plugins_method_of_a_built_in_name_has_its_full_name(
    kind: str, open_bench: OpenBench
) -> None:
    bench = await open_bench(kind, plugins=PLUGINS)
    model = Model(
        'print(tests.sleepy.help_of())\nprint(own_help())\nhelp_of("tests.sleepy.help_of", "own_help")', SAY
    )
    _, second = await turn(bench, model)
    assert second.count("* tests.sleepy.help_of() -> str") == 2
    assert any(
        "tests.sleepy.help_of is callable by this full name" in w for w in bench.services.registry.warnings
    )


async def test_code_outside_of_rounds_gets_texts_as_values(kind: str, open_bench: OpenBench) -> None:
    bench = await open_bench(kind, plugins=PLUGINS)
    report = await use_cases.run_code(
        bench.services,
        'print(search_tools("elephant")[0]["name"])\nprint(help_of("paint"))\n'
        'print(activate_plugin("sleepy"))',
        chat_key=CHAT, user_id=None, follow_up=True, file_name="x",
    )  # fmt: skip
    assert report.error is None and report.follow_ups == []
    assert report.output.startswith("measure_217\n* paint(what: str) -> str\nPaint a picture of something.\n")
    assert "Plugin sleepy is awake for 5 turns." in report.output
    assert await bench.rounds(CHAT) == []


@pytest.mark.extended
@pytest.mark.parametrize("kind", ["sqlite", "postgres"], indirect=True)
async def test_activations_count_turns_and_not_rounds(kind: str, open_bench: OpenBench) -> None:
    bench = await open_bench(kind, plugins=PLUGINS)
    await bench.services.chat(CHAT)

    async def awake(first_round: int) -> dict[str, int | None]:
        async with bench.database.read() as tx:
            return await awake_plugins(tx, CHAT, first_round=first_round)

    async def newest() -> int:
        async with bench.database.read() as tx:
            return await tx.activations.newest_round(CHAT)

    assert await awake(1) == {} and await newest() == 0
    async with bench.database.begin() as tx:
        assert await wake(tx, CHAT, SLEEPY, turns=2) == 2
        assert await wake(tx, CHAT, "a.forever", turns=None) is None
        assert await wake(tx, CHAT, "a.forever", turns=3) is None
    model = Model("exit(9)", SAY)
    await turn(bench, model)  # two rounds
    rounds = await bench.rounds(CHAT)
    assert len(rounds) == 2 and rounds[1].trigger_kind is TriggerKind.ROUND
    assert await awake(rounds[0].sequence) == {SLEEPY: 2, "a.forever": None}
    assert await awake(rounds[1].sequence + 1) == {SLEEPY: 1, "a.forever": None}
    await turn(bench, model)
    assert await awake(await newest() + 1) == {"a.forever": None}
    async with bench.database.begin() as tx:
        assert await sleep(tx, CHAT, "a.forever") and not await sleep(tx, CHAT, "a.other")
    assert await awake(await newest() + 1) == {}
