"""What `nekro tail` prints of code and calls, and `nekro trace` of texts that are not Unicode."""

from __future__ import annotations

import io
import json
from datetime import UTC, datetime
from typing import Any

from broker_config.settings import Settings
from nekro.cli.command import Deps
from nekro.cli.commands import trace
from nekro.cli.commands.tail import Args, show, show_output
from nekro.cli.output import Output
from nekro.cli.views.turn_text import turn_lines
from nekro_client.models import Turn, TurnCause, TurnError, TurnState


def _shown(kind: str, data: dict[str, Any]) -> list[str]:
    stdout = io.StringIO()
    deps = Deps(output=Output(stdout=stdout), data_dir=None, load_settings=Settings.load)
    args = Args(chat_key="c", count=None, seconds=None, json=False)
    show({"type": kind, "at": datetime(2026, 1, 1, tzinfo=UTC), "data": data}, args, deps)
    return stdout.getvalue().splitlines()


def test_shows_the_code_of_a_round_below_its_event() -> None:
    lines = _shown("code.ready", {"model": "m", "code": "x = 1\nif x:\n    send()"})
    assert [line[10:] for line in lines[1:]] == ["x = 1", "if x:", "    send()"]


def test_says_how_many_lines_of_long_code_are_left_out() -> None:
    lines = _shown("code.ready", {"code": "\n".join(f"x{n} = 1" for n in range(50))})
    assert len(lines) == 42
    assert lines[-1].strip() == "(10 more lines)"


def test_shows_arguments_result_and_error_of_calls() -> None:
    assert _shown("call.started", {"method": "a.b", "arguments": {"city": "東京"}})[1].strip() == (
        'arguments: {"city": "東京"}'
    )
    assert _shown("call.ended", {"method": "a.b", "value": [1, None]})[1].strip() == "value: [1, null]"
    assert _shown("call.ended", {"value_bytes": 9000})[1].strip() == "value: 9000 bytes, not kept"
    assert _shown("call.ended", {"method": "a.b", "error": "ValueError: no"})[0].endswith("ValueError: no")


def test_escapes_control_sequences_in_code_and_values() -> None:
    shown = [
        *_shown("code.ready", {"code": "print('\x1b]0;title\x07\x1b[2J')"}),
        *_shown("call.ended", {"value": "\x9b31m", "error": "E: \x1b[31m"}),
    ]
    assert all(line.isprintable() for line in shown)


def test_shows_what_a_program_prints_while_it_runs() -> None:
    stdout = io.StringIO()
    deps = Deps(output=Output(stdout=stdout), data_dir=None, load_settings=Settings.load)
    args = Args(chat_key="c", count=None, seconds=None, json=False)
    for event in (
        {"type": "output.chunk", "data": {"offset": 0, "text": "one\n\x1b[2Jtwo\n"}},
        {"type": "model.delta", "data": {"text": "thought"}},
        {"type": "output.chunk", "data": "x"},
        {},
    ):
        show_output(event, args, deps)
    lines = stdout.getvalue().split("\n")
    assert [line[:12] for line in lines] == [" " * 10 + "| ", " " * 10 + "| ", ""]
    assert lines[0][12:] == "one" and lines[1].isprintable() and lines[1].endswith("two")


def test_the_end_of_a_turn_that_waits_for_a_person_names_the_approval() -> None:
    at = datetime(2026, 1, 1, tzinfo=UTC)
    turn = Turn(
        id="t",
        chat_key="c",
        state=TurnState.WAITING,
        waits_for=["a1"],
        cause=TurnCause(kind="message", id="m"),
        requested_at=at,
        finished_at=at,
    )
    assert trace.is_ended(turn), "--follow ends"
    assert [*turn_lines(turn)][-1].text.startswith("waiting after 0.000 s  for approval a1  0 rounds")


def test_a_turn_with_a_lone_surrogate_is_printed_as_json() -> None:
    stdout = io.StringIO()
    deps = Deps(output=Output(stdout=stdout), data_dir=None, load_settings=Settings.load)
    turn = Turn(
        id="t",
        chat_key="c",
        state=TurnState.FAILED,
        cause=TurnCause(kind="message", id="m"),
        requested_at=datetime(2026, 1, 1, tzinfo=UTC),
        error=TurnError(code="method_failed", text="half \ud83d"),
    )
    for follow in (False, True):
        printer = trace.TurnPrinter(trace.Args(turn_id="t", follow=follow, prompts=False, json=True), deps)
        printer.show(turn)
        printer.show(turn)  # nothing is new
    first, end = json.JSONDecoder().raw_decode(stdout.getvalue())
    assert first["error"]["text"] == "half \ud83d"
    assert json.loads(stdout.getvalue()[end:]) == first
