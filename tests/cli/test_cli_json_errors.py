"""With ``--json`` every command reports its errors as one object on stdout and nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nekro.cli import main
from nekro.cli.command import declare
from nekro.cli.output import PartialError
from nekro.cli.running import EXEC_CODES, ExitCode, TerminatedError
from nekro_agent.errors import MethodFailedError, ServiceError

pytestmark = pytest.mark.usefixtures("no_settings_of_the_developer")

#: A command line of each command with ``--json`` that parses and fails, with its exit code and error type.
FAILING: dict[str, tuple[list[str], int, str]] = {
    "demo": (["--data-dir", "/dev/null/x", "demo", "--json"], ExitCode.USAGE, "SettingsError"),
    "worker": (["worker", "--json"], ExitCode.USAGE, "UsageError"),
    "exec": (["exec", "missing.py", "--json"], EXEC_CODES[ExitCode.USAGE], "UsageError"),
    "call": (["call", "x", "--args", "{", "--json"], ExitCode.USAGE, "UsageError"),
    "command": (["command", "group_1", "--json"], ExitCode.USAGE, "UsageError"),
    "send": (["send", "group_1", " ", "--json"], ExitCode.USAGE, "UsageError"),
    "history": (["history", "nobody", "--json"], ExitCode.STORAGE, "StorageUnavailableError"),
    "tail": (["tail", "group_1", "--json"], ExitCode.USAGE, "UsageError"),
    "trace": (["trace", "nobody", "--json"], ExitCode.STORAGE, "StorageUnavailableError"),
    "replay": (["replay", "nobody", "--json"], ExitCode.STORAGE, "StorageUnavailableError"),
    "eval": (["eval", "missing.yaml", "--json"], ExitCode.USAGE, "UsageError"),
    "cancel": (["cancel", "group_1", "--json"], ExitCode.STORAGE, "StorageUnavailableError"),
    "jobs": (["jobs", "show", "--json"], ExitCode.USAGE, "UsageError"),
    "files": (["files", "get", "group_1", "--json"], ExitCode.USAGE, "UsageError"),
    "timers": (["timers", "pause", "--json"], ExitCode.USAGE, "UsageError"),
    "methods": (["methods", "pin", "--json"], ExitCode.USAGE, "UsageError"),
    "plugins": (["plugins", "purge", "--json"], ExitCode.USAGE, "UsageError"),
    "mcp": (["mcp", "add", "--json"], ExitCode.USAGE, "UsageError"),
    "approvals": (["approvals", "show", "--json"], ExitCode.USAGE, "UsageError"),
    "sandbox": (["sandbox", "packages", "add", "--json"], ExitCode.USAGE, "UsageError"),
    "doctor": (["doctor", "--settings", "--json"], ExitCode.USAGE, "SettingsError"),
    "gateway": (["gateway", "--check", "--port", "1", "--json"], ExitCode.SERVICE, "ServiceError"),
    "models": (["models", "use", "--json"], ExitCode.USAGE, "UsageError"),
    "keys": (["keys", "create", "--json"], ExitCode.USAGE, "UsageError"),
    "costs": (["costs", "--json"], ExitCode.STORAGE, "StorageUnavailableError"),
    "dead": (["dead", "show", "--json"], ExitCode.USAGE, "UsageError"),
}


def commands_with_json() -> list[str]:
    """Names of the commands that declare ``--json``."""
    names = []
    for command in main.COMMANDS:
        parser = main.LazyParser()
        declare(command.module.Args, parser)
        if any("--json" in action.option_strings for action in parser._actions):
            names.append(command.name)
    return names


def run(*arguments: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = main.main(list(arguments))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def error_of(stdout: str) -> dict[str, Any]:
    """The error object, which must be the whole output."""
    document = json.loads(stdout)
    assert set(document["error"]) >= {"type", "message"}
    assert document["error"]["message"]
    return dict(document["error"])


def test_the_table_has_every_command_with_json() -> None:
    assert sorted(FAILING) == sorted(commands_with_json())


@pytest.mark.parametrize("name", FAILING)
def test_an_error_of_the_command_itself_is_an_object(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if name == "doctor":  # its other faults are entries of its list
        monkeypatch.setenv("NEKRO_BROKER__ULR", "x")
    arguments, code, kind = FAILING[name]
    got, out, err = run(*arguments, capsys=capsys)
    assert (got, error_of(out)["type"]) == (code, kind)
    assert error_of(out)["message"] in err


@pytest.mark.parametrize("name", FAILING)
def test_a_wrong_option_is_an_object(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, _, _ = FAILING[name]
    got, out, err = run(*arguments, "--frobnicate", capsys=capsys)
    assert got == (EXEC_CODES[ExitCode.USAGE] if name == "exec" else ExitCode.USAGE)
    assert error_of(out) == {"type": "UsageError", "message": "unrecognized arguments: --frobnicate"}
    assert "--frobnicate" in err


@pytest.mark.parametrize("name", [name for name in FAILING if name != "worker"])
def test_a_wrong_setting_is_an_object(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    complete = {
        "exec": ["code.py"],
        "call": ["x"],
        "command": ["group_1", "/x"],
        "send": ["group_1", "hello"],
        "jobs": ["list"],
        "timers": ["list"],
        "files": ["list", "group_1"],
        "methods": [],
        "plugins": [],
        "doctor": ["--settings"],
        "dead": [],
        "gateway": [],
        "keys": [],
        "costs": [],
        "models": [],
        "mcp": [],
        "approvals": [],
        "demo": [],
        "sandbox": ["packages"],
    }
    Path("code.py").write_text("pass", "utf-8")
    monkeypatch.setenv("NEKRO_BROKER__ULR", "x")
    got, out, _ = run(name, *complete.get(name, ["group_1"]), "--json", capsys=capsys)
    assert got == (EXEC_CODES[ExitCode.USAGE] if name == "exec" else ExitCode.USAGE)
    assert error_of(out)["type"] == "SettingsError"
    assert "NEKRO_BROKER__ULR" in error_of(out)["message"]


@pytest.mark.parametrize(
    ("error", "code", "described"),
    [
        (ValueError("odd"), 1, {"type": "ValueError", "message": "odd"}),
        (KeyError(), 1, {"type": "KeyError", "message": "KeyError"}),
        (MethodFailedError("OddError", "why"), 6, {"type": "OddError", "message": "why"}),
        (KeyboardInterrupt(), 130, {"type": "KeyboardInterrupt", "message": "interrupted"}),
        (TerminatedError(), 143, {"type": "TerminatedError", "message": "terminated"}),
    ],
)
@pytest.mark.parametrize("name", FAILING)
def test_every_other_error_is_an_object(
    name: str,
    error: BaseException,
    code: int,
    described: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(args: object, deps: object) -> int:
        raise error

    module = next(command for command in main.COMMANDS if command.name == name).module
    monkeypatch.setattr(module, "run", fail)
    got, out, _ = run(*FAILING[name][0], capsys=capsys)
    assert got == (EXEC_CODES.get(ExitCode(code), code) if name == "exec" else code)
    assert error_of(out) == described


def test_the_result_of_a_command_that_failed_is_in_the_same_object(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(args: object, deps: object) -> int:
        raise PartialError(ServiceError("round 1 still runs"), {"still_running": [1]})

    module = next(command for command in main.COMMANDS if command.name == "cancel").module
    monkeypatch.setattr(module, "run", fail)
    got, out, err = run("cancel", "group_1", "--json", capsys=capsys)
    assert (got, err) == (ExitCode.SERVICE, "error: round 1 still runs\n")
    error = {"type": "ServiceError", "message": "round 1 still runs"}
    assert json.loads(out) == {"still_running": [1], "error": error}


def test_a_command_whose_module_cannot_be_imported_reports_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "nekro.cli.commands.jobs", None)
    got, out, err = run("jobs", "--json", capsys=capsys)
    assert (got, error_of(out)["type"]) == (ExitCode.FAILED, "ModuleNotFoundError")
    assert err.startswith("error: internal error, ModuleNotFoundError")


@pytest.mark.extended
def test_without_json_stdout_stays_empty(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, _, _ in FAILING.values():
        plain = [word for word in arguments if word != "--json"]
        if "doctor" not in plain:
            assert run(*plain, capsys=capsys)[1] == ""


def test_a_message_that_reads_like_the_option_asks_for_no_object(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("send", "group_1", "--", "--json", "--frobnicate", capsys=capsys)[1] == ""


@pytest.mark.extended
def test_a_process_prints_the_object_and_ends_with_the_code(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "nekro.cli.main", "call", "x", "--args", "{", "--json"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert done.returncode == ExitCode.USAGE
    assert error_of(done.stdout)["type"] == "UsageError"
    assert "Traceback" not in done.stderr
