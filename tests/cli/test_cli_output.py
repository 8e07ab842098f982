"""Output of commands in every form: terminal, pipe, JSON."""

from __future__ import annotations

import io
import json
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path

import pytest

from broker_config.settings import Settings
from nekro.base.plain import to_plain
from nekro.cli.environment import environment_of
from nekro.cli.output import Output, cell_width, one_line
from nekro_agent.errors import SettingsError
from nekro_agent.methods import SandboxMethodType


class Terminal(io.StringIO):
    """A stdout that claims to be a terminal."""

    def isatty(self) -> bool:
        return True


def test_values_outside_of_json_are_written_as_text() -> None:
    value = {
        "when": datetime(2026, 1, 2, tzinfo=UTC),
        "kind": SandboxMethodType.TOOL,
        "raw": b"\x00\xff",
        "path": Path("/a"),
        "many": {3, 1},
        "pair": (1, "x"),
        "exact": Decimal("1.10"),
        4: None,
    }
    assert to_plain(value) == {
        "when": "2026-01-02T00:00:00+00:00",
        "kind": "tool",
        "raw": {"base64": "AP8="},
        "path": "/a",
        "many": [1, 3],
        "pair": [1, "x"],
        "exact": "1.10",
        "4": None,
    }


def test_json_keeps_chinese_and_japanese_readable() -> None:
    stream = io.StringIO()
    Output(stdout=stream).json({"text": "こんにちは 你好"})
    assert "こんにちは 你好" in stream.getvalue()


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_terminal_of_another_encoding_gets_escapes_and_valid_json(encoding: str) -> None:
    raw = io.BytesIO()
    output = Output(stdout=io.TextIOWrapper(raw, encoding=encoding), stderr=io.StringIO())
    output.json({"text": "猫😀"})
    assert json.loads(raw.getvalue().decode(encoding)) == {"text": "猫😀"}
    output.data("猫")
    assert raw.getvalue().endswith(b"\\u732b\n")


def test_columns_align_beside_wide_characters() -> None:
    stream = io.StringIO()
    Output(stdout=stream).table(("NAME", "X"), [("猫猫", 1), ("abc", 2)])
    assert stream.getvalue() == "NAME  X\n猫猫  1\nabc   2\n"
    assert [cell_width(text) for text in ("猫", "a", "e\u0301")] == [2, 1, 1]


def test_a_terminal_gets_a_drawn_table() -> None:
    stream = Terminal()
    Output(stdout=stream).table(("NAME",), [("[bold]not markup[/bold]",)])
    assert "[bold]not markup[/bold]" in stream.getvalue()


def test_foreign_text_cannot_control_the_terminal() -> None:
    stream = Terminal()
    output = Output(stdout=stream)
    output.data("a\x1b[2Jb\nc")
    output.table(("T",), [("x\x1b]0;title\x07y\nz",)])
    assert "\x1b[2J" not in stream.getvalue()
    assert "\x1b]0" not in stream.getvalue()
    assert one_line("a\n\tb\x00c\u202ed") == r"a\n\tb\x00c\u202ed"


def test_long_lines_are_cut_at_the_column_limit() -> None:
    assert one_line("猫猫猫猫", limit=5) == "猫猫…"
    assert one_line("abcde", limit=5) == "abcde"


def test_an_error_is_one_line() -> None:
    stream = io.StringIO()
    Output(stderr=stream).error(SettingsError("Unknown setting X. Did you mean Y?"))
    assert stream.getvalue() == "error: Unknown setting X. Did you mean Y?\n"


def test_a_child_process_reads_the_resolved_settings_of_its_parent(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("NEKRO_AGENT__PERSONA", "of the environment")
    settings = Settings.load(
        env_file=None,
        data_dir=tmp_path,
        broker={"url": "redis://h:1/0"},
        plugins={"dirs": [tmp_path / "a", tmp_path / "b"], "load_shipped": False},
        security={"signing_key": "s3cret"},
        agent={"persona": "猫 with a, comma"},
        llm={"parameters": '{"temperature": 0.5}'},
        budgets={"turn": "tokens=100000,cost=0.125"},
    )
    for name, value in environment_of(settings, base={"NEKRO_LLM__MODEL": "stale", "PATH": "/bin"}).items():
        monkeypatch.setenv(name, value)
    assert Settings.load(env_file=None) == settings
