"""The record of a round, as `nekro history K --trace` shows it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from round_bench import Bench, Model

from nekro.cli.views.round_text import describe_round, round_lines
from nekro.operations.turns import read_rounds
from nekro.sandbox.models import StopType

CODE = """print("so far")
tick("a")
keep("b")
try:
    break_down("oh")
except Exception:
    pass
look("tea")"""


async def described(bench: Bench) -> list[dict[str, Any]]:
    """Return the rounds of the chat, the oldest first."""
    found = await read_rounds(bench.database, "chat", limit=50, before=None)
    return [describe_round(entry) for _, entry in reversed(found)]


@pytest.fixture
def kind() -> str:
    """One kind of database: a story is what the events say."""
    return "sqlite"


async def test_a_rounds_row_contains_its_whole_course(bench: Bench) -> None:
    await bench.say("chat", "hello")
    rounds = await bench.play("chat", bench.drain(Model(CODE, "")))
    shown = (await described(bench))[0]
    assert (shown["state"], shown["stop_type"], shown["worker"]) == ("done", "AGENT", "w1")
    assert (shown["model"], shown["prompt_tokens"], shown["completion_tokens"], shown["cost"]) == (
        "tests-1", 100, 7, 0.25,
    )  # fmt: skip
    assert shown["prompt_chars"] > 1000 and shown["code"] == CODE and shown["output"] == "so far\n"
    assert shown["requested_at"] <= shown["started_at"] <= shown["answered_at"] <= shown["finished_at"]
    assert [(call["method"], call["type"], call["lane"]) for call in shown["calls"]] == [
        ("tests.scene.tick", "tool", "methods"),
        ("tests.scene.keep", "behavior", "methods"),
        ("tests.scene.break_down", "tool", "methods"),
        ("tests.scene.look", "agent", "methods"),
    ]
    tick, _, failed, look = shown["calls"]
    assert tick["worker"] and tick["error"] is None and tick["duration_ms"] > 0
    assert failed["error"] == "ValueError: oh"
    assert look["follow_up"] == rounds[1].id
    for call in (tick, look):
        times = [datetime.fromisoformat(call[name]) for name in ("requested_at", "started_at", "finished_at")]
        assert times == sorted(times)


@pytest.mark.extended
async def test_the_course_of_a_round_is_readable(bench: Bench) -> None:
    await bench.say("chat", "hello")
    rounds = await bench.play("chat", bench.drain(Model(CODE, "")))
    text = "\n".join(round_lines((await described(bench))[0]))
    for part in (
        "round 1: done AGENT, caused by message", "on w1", "model ", "program ", "to tests-1",
        "100 + 7 tokens", "cost 0.25", '| look("tea")', "call tests.scene.tick (tool) in lane methods on ",
        f"triggered round {rounds[1].id[:8]}", "ValueError: oh", "| so far",
    ):  # fmt: skip
        assert part in text, f"{part!r} is missing in\n{text}"


async def test_merged_and_waiting_rounds_are_shown_as_well(bench: Bench) -> None:
    await bench.say("chat", "one")
    await bench.say("chat", "two")
    rounds = await bench.play("chat", bench.drain(Model("")))
    await bench.say("chat", "three")
    stories = ["\n".join(round_lines(shown)) for shown in await described(bench)]
    assert f"merged into round {rounds[0].id}" in stories[1]
    assert "waiting since" in stories[2]


async def test_a_method_named_like_a_part_of_the_sandbox_is_listed_and_called_by_its_full_name(
    kind: str, open_bench: Callable[..., Awaitable[Bench]]
) -> None:
    plugin = Path(__file__).parent.parent / "system" / "plugins" / "dynamic_importer.py"
    bench = await open_bench(kind, plugins={"dirs": (plugin,), "load_shipped": False})
    await bench.say("chat", "hello")
    code = "print(dynamic_importer('json').__name__, KroMiose.dynamic_importer.dynamic_importer('json'))"
    model = Model(code, "")
    rounds = await bench.play("chat", bench.drain(model))
    assert rounds[0].stop_type == StopType.NORMAL, rounds[0].output
    assert rounds[0].output == "json json from the plugin\n"
    assert "KroMiose.dynamic_importer.dynamic_importer(package_spec" in model.prompts[0]
