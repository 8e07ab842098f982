"""A dead Redis, a dead or unmigrated database, no bubblewrap: one line with the fix, and its exit code."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from nekro.cli import main
from nekro.cli.running import EXEC_CODES, ExitCode

#: Placeholder in the tables below for a port without a listener.
PORT = "{port}"
DEAD_REDIS = {"NEKRO_BROKER__URL": f"redis://:s3cret@127.0.0.1:{PORT}/0"}
DEAD_DATABASE = {"NEKRO_DATABASE__URL": f"postgresql://u:s3cret@127.0.0.1:{PORT}/x"}
UNMIGRATED = {"NEKRO_DATABASE__URL": "sqlite:///empty.db"}
MODEL = {"NEKRO_LLM__BASE_URL": "http://127.0.0.1:1/v1", "NEKRO_LLM__MODEL": "m"}


@pytest.fixture
def dead_port() -> Iterator[int]:
    """A port without a listener, reserved for the test."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


@pytest.fixture(autouse=True)
def own_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Commands read ``.env`` of the working directory: give them an empty one."""
    monkeypatch.chdir(tmp_path)
    Path("code.py").write_text("print(1)\n", "utf-8")
    monkeypatch.setenv("NEKRO_DATA_DIR", str(tmp_path / "data"))


def said(*arguments: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Run a command in this process; returns its exit code and its error.

    Left out are the warning of workers that root started, and lines about waiting, which slow starts bring.
    """
    try:
        code = main.main(list(arguments))
    except SystemExit as exc:
        code = int(exc.code or 0)
    lines = capsys.readouterr().err.splitlines()
    beside = ("warning: workers started by root", "waiting for ")
    return code, "\n".join(line for line in lines if not line.startswith(beside))


@pytest.mark.parametrize(
    ("arguments", "environment", "code", "words"),
    [
        (["call", "x"], DEAD_REDIS, ExitCode.BROKER, "correct NEKRO_BROKER__URL"),
        (["exec", "code.py"], DEAD_REDIS, ExitCode.BROKER, "correct NEKRO_BROKER__URL"),
        (["up"], DEAD_REDIS, ExitCode.BROKER, "correct NEKRO_BROKER__URL"),
        (["flower"], DEAD_REDIS, ExitCode.BROKER, "correct NEKRO_BROKER__URL"),
        (["send", "cli", "hi"], DEAD_REDIS | MODEL, ExitCode.BROKER, "correct NEKRO_BROKER__URL"),
        (["tail", "cli"], DEAD_REDIS, ExitCode.BROKER, "correct NEKRO_BROKER__URL"),
        (["reset", "cli"], DEAD_REDIS, ExitCode.BROKER, "correct NEKRO_BROKER__URL"),
        (["history", "cli"], DEAD_DATABASE, ExitCode.STORAGE, "correct NEKRO_DATABASE__URL"),
        (["jobs"], DEAD_DATABASE, ExitCode.STORAGE, "correct NEKRO_DATABASE__URL"),
        (["cancel", "cli"], DEAD_DATABASE, ExitCode.STORAGE, "correct NEKRO_DATABASE__URL"),
        (["db", "upgrade"], DEAD_DATABASE, ExitCode.STORAGE, "correct NEKRO_DATABASE__URL"),
        (["exec", "code.py"], DEAD_DATABASE, ExitCode.STORAGE, "correct NEKRO_DATABASE__URL"),
        (["history", "cli"], UNMIGRATED, ExitCode.STORAGE, "run `nekro db upgrade`"),
        (["jobs"], UNMIGRATED, ExitCode.STORAGE, "run `nekro db upgrade`"),
        (["cancel", "cli"], UNMIGRATED, ExitCode.STORAGE, "run `nekro db upgrade`"),
        (["send", "cli", "hi"], {}, ExitCode.LLM, "set NEKRO_LLM__BASE_URL"),
        (["exec", "code.py"], {"NEKRO_DATABASE__URL": "mysql://x/y"}, EXEC_CODES[ExitCode.USAGE], "mysql"),
        (["db", "upgrade"], {"NEKRO_BROKER__ULR": "x"}, ExitCode.USAGE, "Did you mean NEKRO_BROKER__URL?"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else "" if isinstance(value, dict) else None,
)
def test_each_missing_requirement_is_one_line_with_its_fix_and_exit_code(
    arguments: list[str],
    environment: dict[str, str],
    code: int,
    words: str,
    dead_port: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value.replace(PORT, str(dead_port)))
    got, line = said(*arguments, capsys=capsys)
    assert got == code, line
    assert line.startswith("error: ") and words in line and "\n" not in line
    assert "s3cret" not in line and "Traceback" not in line


@pytest.mark.slow  # it starts a system of its own first
def test_code_without_bubblewrap_is_refused_and_the_package_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("NEKRO_SANDBOX__DRIVER", "bwrap")
    code, line = said("exec", "code.py", capsys=capsys)
    assert code == ExitCode.SANDBOX
    assert line.startswith("error: ") and "apt install bubblewrap" in line and "\n" not in line


@pytest.mark.extended
def test_the_doctor_names_each_missing_requirement_with_its_fix(
    dead_port: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NEKRO_BROKER__URL", f"redis://127.0.0.1:{dead_port}/0")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("NEKRO_SANDBOX__DRIVER", "bwrap")
    assert main.main(["doctor"]) == ExitCode.BROKER, "the first failure's"
    out = capsys.readouterr().out
    assert "start Redis there, or correct NEKRO_BROKER__URL" in out
    assert "apt install bubblewrap" in out
    monkeypatch.delenv("NEKRO_BROKER__URL")
    assert main.main(["doctor"]) == ExitCode.SANDBOX
