"""The command line's shared parts: parsing, errors, exit codes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from nekro.cli import command, main
from nekro.cli.command import declare
from nekro.cli.commands import bench, call, plugins, worker
from nekro.cli.running import EXEC_CODES, ExitCode, exit_code_of
from nekro.sandbox.models import StopType
from nekro_agent import errors

pytestmark = pytest.mark.usefixtures("no_settings_of_the_developer")


def run(*arguments: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """Run a command in this process; returns exit code, stdout, stderr."""
    try:
        code = main.main(list(arguments))
    except SystemExit as exc:
        code = int(exc.code or 0)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_help_imports_no_command() -> None:
    script = (
        "import sys; from nekro.cli.main import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "heavy = ('nekro.cli.commands.', 'nekro.cli.output', 'asyncio', 'celery', 'sqlalchemy', 'pydantic')\n"
        "print([m for m in sys.modules if m.startswith(heavy)])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip().splitlines()[-1] == "[]"
    for known in main.COMMANDS:
        assert known.name in done.stdout


@pytest.mark.parametrize("known", main.COMMANDS, ids=lambda known: known.name)
def test_each_command_has_help_debug_and_frozen_arguments(
    known: main.CliCommand, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = run(known.name, "--help", capsys=capsys)
    assert code == 0
    assert f"usage: nekro {known.name}" in out
    assert "--debug" in out
    assert known.module.Args.__dataclass_params__.frozen  # type: ignore[attr-defined]


def test_global_options_are_accepted_before_and_after_the_command() -> None:
    parser = main.build_parser()
    before = parser.parse_args(["--data-dir", "/a", "--debug", "plugins"])
    after = main.build_parser().parse_args(["plugins", "--data-dir", "/a", "--debug"])
    assert (before.data_dir, before.debug) == (after.data_dir, after.debug) == (Path("/a"), True)


def test_without_a_command_the_help_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys=capsys)
    assert (code, out) == (ExitCode.USAGE, "")
    assert "COMMAND" in err


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["frobnicate"], 2, "invalid choice: 'frobnicate'"),
        (["plugins", "--frobnicate"], 2, "unrecognized arguments: --frobnicate"),
        (["call"], 2, "METHOD"),
        (["call", "x", "--timeout", "0"], 2, "positive"),
        (["worker", "--lane", "fast"], 2, "invalid choice: 'fast'"),
        (["worker", "--lane", "long", "--concurrency", "0"], 2, "0 is less than 1"),
        (["up", "--rounds", "-1"], 2, "-1 is less than 0"),
        (["exec"], 64, "FILE"),
        (["exec", "x.py", "--frobnicate"], 64, "--frobnicate"),
        (["exec", "missing.py"], 64, "cannot read missing.py: No such file or directory"),
        (["call", "x", "--args", "{"], 2, "--args is not JSON"),
        (["call", "x", "--args", "3"], 2, "--args is a JSON int"),
        (["call", "x", "--args", "@missing.json"], 2, "cannot read missing.json"),
        (["call", "x", "--chat-key", " "], 2, "a chat key is not empty"),
        (["up", "--methods", "0", "--long", "0", "--rounds", "0"], 2, "nothing to run"),
        (["worker", "--lane", "methods"], 2, "no system runs on"),
        (["flower", "--port", "0"], 2, "0 is not a port"),
        (["flower", "--address", "0.0.0.0"], 2, "FLOWER_BASIC_AUTH"),
        (["bench", "nonsense"], 2, "no benchmark nonsense"),
        (["plugins", "new", "no-name"], 2, "'no-name' is not a module name"),
        (["plugins", "new", "json"], 2, "'json' is a standard library module"),
        (["plugins", "new", "class"], 2, "'class' is not a module name"),
        (["plugins", "new", "test_x"], 2, "'test_x' is a reserved name"),
        (["plugins", "purge"], 2, "name the plugin"),
        (["plugins", "purge", "../x"], 2, "'../x' is not a plugin key"),
        (["command", "group_1"], 2, "the command line is missing"),
        (["command", "group_1", "/x", "--as", "root"], 2, "invalid choice: 'root'"),
        # A shell variable that is unset must not choose the only approval, timer or dead letter.
        *((["approvals", action, "", "--yes"], 2, "must not be blank") for action in ("approve", "deny")),
        (["timers", "delete", ""], 2, "must not be blank"),
        (["dead", "drop", " "], 2, "must not be blank"),
        (["jobs", "cancel", ""], 2, "must not be blank"),
        (["trace", ""], 2, "must not be blank"),
        (["keys", "create", "site", "--scope", "read", "--chats", ""], 2, "must not be blank"),
        (["keys", "create", "site", "--scope", "read", "--days", "1e99"], 2, "after the year 9999"),
        (
            ["keys", "create", "site", "--scope", "read", "--cost-per-day", "abc"],
            2,
            "'abc' is not a positive",
        ),
        (["jobs", "--limit", "abc"], 2, "'abc' is not a whole number"),
        (["gateway", "--port", "abc"], 2, "'abc' is not a whole number"),
        (["jobs", "--frobnicate"], 2, "`nekro jobs --help` shows the usage"),
    ],
)
def test_wrong_usage_is_one_line_and_a_documented_code(
    arguments: list[str],
    code: int,
    words: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # `nekro flower` leaves it in the environment of its process, which other tests share.
    monkeypatch.delenv("FLOWER_BASIC_AUTH", raising=False)
    got, out, err = run(*arguments, capsys=capsys)
    assert (got, out) == (code, "")
    assert words in err
    assert err.startswith("error: ")
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("NEKRO_BROKER__ULR", "x", "Unknown setting NEKRO_BROKER__ULR. Did you mean NEKRO_BROKER__URL?"),
        ("NEKRO_ZZZZZZZZ", "x", "`nekro doctor --settings` lists every name"),
        ("NEKRO_WORKERS__CALL_TIMEOUT_SECONDS", "-1", "NEKRO_WORKERS__CALL_TIMEOUT_SECONDS"),
        ("NEKRO_WORKERS__METHODS_CONCURRENCY", "many", "it is 'many'"),
        ("NEKRO_LOG__LEVEL", "LOUD", "it is 'LOUD'"),
        ("NEKRO_BUDGETS__DAY", "50", "NEKRO_BUDGETS__DAY: '50' is not a measure"),
        ("NEKRO_BROKER__URL", "redis.example.org", "NEKRO_BROKER__URL: it has no scheme; write redis://"),
        ("NEKRO_BROKER__URL", "http://ada:secret@queue", "NEKRO_BROKER__URL: http:// is not supported"),
    ],
)
def test_a_wrong_setting_is_named(
    variable: str, value: str, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(variable, value)
    code, out, err = run("plugins", capsys=capsys)
    assert (code, out) == (ExitCode.USAGE, "")
    assert words in err
    assert "secret" not in err


@pytest.mark.parametrize("place", ["", "below"])
def test_a_data_directory_that_cannot_be_made_is_named_with_its_setting(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "file" / place
    (tmp_path / "file").write_text("not a directory", "utf-8")
    monkeypatch.setenv("NEKRO_DATA_DIR", str(directory))
    code, out, err = run("call", "x", capsys=capsys)
    assert (code, out) == (ExitCode.USAGE, "")
    assert err == f"error: data directory {directory}: Not a directory; set NEKRO_DATA_DIR\n"
    Path("code.py").write_text("pass", "utf-8")
    assert run("exec", "code.py", capsys=capsys)[0] == EXEC_CODES[ExitCode.USAGE]


def test_debug_adds_the_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run("--debug", "call", "x", "--args", "{", capsys=capsys)
    assert code == ExitCode.USAGE
    assert "Traceback (most recent call last)" in err
    assert err.splitlines()[-1].startswith("error: --args is not JSON")


@pytest.mark.parametrize(
    ("error", "code", "last_line"),
    [
        (errors.BrokerUnavailableError("redis is unavailable"), 3, "error: redis is unavailable"),
        (errors.StorageUnavailableError("no schema"), 4, "error: no schema"),
        (ValueError("odd"), 1, "error: internal error, ValueError: odd (`--debug` shows where)"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (BrokenPipeError(), 141, ""),
    ],
)
def test_an_error_of_a_command_becomes_its_code(
    error: BaseException,
    code: int,
    last_line: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(args: plugins.Args, deps: command.Deps) -> int:
        raise error

    monkeypatch.setattr(plugins, "run", fail)
    monkeypatch.setattr("nekro.cli.output.Output.abandon_stdout", lambda self: None)
    got, _, err = run("plugins", capsys=capsys)
    assert got == code
    assert err.strip().splitlines()[-1:] == ([last_line] if last_line else [])


def test_every_error_of_the_tree_has_an_exit_code() -> None:
    for name in errors.__all__:
        kind = getattr(errors, name)
        code = exit_code_of(kind.__new__(kind))
        assert code not in (ExitCode.OK, ExitCode.INTERRUPTED)
        if kind not in (errors.NekroError, errors.RuntimeNotBoundError):
            assert code is not ExitCode.FAILED, f"{name} ends a command like an internal error"


def test_exit_codes_of_exec_do_not_overlap_stop_types() -> None:
    codes = {EXEC_CODES.get(code, code) for code in ExitCode} - {ExitCode.OK}
    assert not codes & {int(stop) for stop in StopType}


def test_arguments_of_call_are_parsed() -> None:
    assert call.parse_arguments('["a", 1]') == (("a", 1), {})
    assert call.parse_arguments('{"title": "猫"}') == ((), {"title": "猫"})
    Path("arguments.json").write_text('[{"deep": [1]}]', "utf-8")
    assert call.parse_arguments("@arguments.json") == (({"deep": [1]},), {})


@pytest.mark.extended
def test_a_new_plugin_loads_and_is_listed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert run("plugins", "new", "weather", "--dir", "mine", capsys=capsys)[0] == 0
    assert run("plugins", "new", "weather", "--dir", "mine", capsys=capsys)[0] == ExitCode.USAGE
    Path("mine/broken.py").write_text("import nothing_like_this\nplugin = None\n", "utf-8")
    monkeypatch.setenv("NEKRO_PLUGINS__DIRS", str(tmp_path / "mine"))
    monkeypatch.setenv("NEKRO_PLUGINS__LOAD_SHIPPED", "false")
    code, out, _ = run("plugins", capsys=capsys)
    assert code == ExitCode.PLUGIN
    assert "you.weather" in out
    assert "No module named 'nothing_like_this'" in out
    code, out, _ = run("methods", capsys=capsys)
    assert code == 0
    assert "greet_weather" in out
    assert "(name: str) -> str" in out


def test_worker_accepts_every_lane() -> None:
    parser = main.LazyParser()
    declare(worker.Args, parser)
    for lane in ("methods", "long", "rounds"):
        assert parser.parse_args(["--lane", lane]).lane == lane


def test_bench_lists_the_existing_benchmarks(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.Args(name="rpc", rest=[]).name == "rpc"
    assert "rpc" in run("bench", "nonsense", capsys=capsys)[2]
