"""Commands beside the workers and over a gateway: the same commands, the same output."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from forked_process import run_forked
from nekro_inside import run_inside
from worker_fleet import Fleet

from cli.exit_codes import ExitCode
from cli.main import ANYWHERE, COMMANDS, OVER_GATEWAY
from cli.remote import target

Command = Callable[..., tuple[int, str, str]]
ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def over_gateway(gateway_url: str, tmp_path: Path) -> Command:
    """Runs a command that knows nothing of the fleet but the gateway's URL."""

    def run(*arguments: str, given: str = "") -> tuple[int, str, str]:
        environ = {"NEKRO_URL": gateway_url, "HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
        done = run_forked("cli.main", *arguments, environ=environ, cwd=tmp_path, given=given)
        assert "Traceback" not in done.stderr, done.stderr
        return done.returncode, done.stdout, done.stderr

    return run


@pytest.fixture
def beside(fleet: Fleet, tmp_path: Path) -> Command:
    """Runs a command with the settings of the workers."""

    def run(*arguments: str) -> tuple[int, str, str]:
        done = fleet.run(*arguments, cwd=tmp_path)
        return done.returncode, done.stdout, done.stderr

    return run


@pytest.fixture(params=["beside", "over_gateway"])
def nekro(request: pytest.FixtureRequest) -> Command:
    """A command in both ways."""
    return request.getfixturevalue(request.param)  # type: ignore[no-any-return]


def test_call_prints_the_value(nekro: Command) -> None:
    code, out, _ = nekro("call", "add", "--args", '{"first": 40, "second": 2}', "--json")
    assert code == 0
    answer = json.loads(out)
    assert sorted(answer) == ["duration_ms", "id", "type", "value", "worker"]
    assert (answer["value"], answer["type"]) == (42, "tool")
    assert nekro("call", "add", "--args", "[2]")[1] == "3\n"


@pytest.mark.parametrize(
    ("arguments", "code", "kind"),
    [
        (("call", "fail"), ExitCode.METHOD, "ValueError"),
        (("call", "nothing"), ExitCode.METHOD, "MethodNotFoundError"),
        (("call", "add"), ExitCode.METHOD, "ArgumentError"),
        (("history", "unknown"), ExitCode.STORAGE, "NotFoundError"),
        (("jobs", "show", "none"), ExitCode.STORAGE, "NotFoundError"),
        (("timers", "pause", "none"), ExitCode.STORAGE, "NotFoundError"),
        (("dead", "show", "none"), ExitCode.STORAGE, "NotFoundError"),
        (("files", "get", "unknown", "/app/shared/x"), ExitCode.STORAGE, "NotFoundError"),
    ],
)
def test_errors_have_the_same_type_and_exit_code(
    nekro: Command, arguments: tuple[str, ...], code: int, kind: str
) -> None:
    ended, out, err = nekro(*arguments, "--json")
    assert (ended, json.loads(out)["error"]["type"]) == (code, kind), err


def test_exec_returns_the_stop_type(nekro: Command, tmp_path: Path) -> None:
    (tmp_path / "work.py").write_text("print(add(20, 1))")
    code, out, _ = nekro("exec", "work.py", "--json")
    report = json.loads(out)
    assert (code, report["stop_type"], report["exit_code"], report["output"]) == (0, "NORMAL", 0, "21\n")
    assert [call["method"] for call in report["calls"]] == ["tests.desk.add"]
    (tmp_path / "wrong.py").write_text("1 / 0")
    code, out, err = nekro("exec", "wrong.py")
    assert code == 1 and "ZeroDivisionError" in out and "ERROR after 0 calls" in err


@pytest.mark.parametrize(
    "arguments", [("methods",), ("plugins",), ("jobs",), ("timers",), ("dead",), ("keys",)]
)
def test_lists_have_the_same_form(beside: Command, over_gateway: Command, arguments: tuple[str, ...]) -> None:
    here, there = beside(*arguments, "--json"), over_gateway(*arguments, "--json")
    assert (here[0], there[0]) == (0, 0), there[2]
    listed = json.loads(there[1])
    if arguments == ("plugins",):
        # Where a plugin is on the workers' host is not told.
        listed = [
            plugin | {"path": own["path"]} for plugin, own in zip(listed, json.loads(here[1]), strict=True)
        ]
    assert listed == json.loads(here[1])


def test_a_message_is_sent_and_answered(nekro: Command, request: pytest.FixtureRequest) -> None:
    chat = f"talk-{request.node.callspec.id}"
    code, out, err = nekro("send", chat, "say hello", "--user-id", "ada", "--wait", "--json")
    assert code == 0, err
    sent = json.loads(out)
    assert [answer["text"] for answer in sent["answers"]] == ["you said hello"]
    code, out, _ = nekro("history", chat, "--json", "--trace")
    told = json.loads(out)
    texts = [(message["kind"], message["text"]) for message in told["messages"]]
    assert texts[0] == ("user", "say hello") and ("assistant", "you said hello") in texts
    assert told["messages"][0]["id"] == sent["id"]
    assert [call["method"] for call in told["rounds"][0]["calls"]] == ["tests.desk.say", "tests.desk.add"]
    assert "ada: say hello" in nekro("history", chat)[1]


def test_history_has_the_same_keys(beside: Command, over_gateway: Command) -> None:
    assert over_gateway("send", "keys", "say this", "--wait")[0] == 0
    here = json.loads(beside("history", "keys", "--json", "--trace")[1])
    there = json.loads(over_gateway("history", "keys", "--json", "--trace")[1])
    assert [sorted(message) for message in there["messages"]] == [sorted(m) for m in here["messages"]]
    missing = set(here["rounds"][0]) - set(there["rounds"][0])
    assert missing == set()
    assert [sorted(call) for call in there["rounds"][0]["calls"]] == [
        sorted(call) for call in here["rounds"][0]["calls"]
    ]


def test_a_failed_turn_ends_send_with_its_reason(nekro: Command, request: pytest.FixtureRequest) -> None:
    chat = f"fail-{request.node.callspec.id}"
    code, out, _ = nekro("send", chat, "no entry", "--wait", "--json")
    answer = json.loads(out)
    assert (code, answer["error"]["type"], answer["answers"]) == (ExitCode.LLM, "LLMError", [])
    assert answer["error"]["message"].startswith("the turn failed in round 1: ")


def test_a_running_turn_is_cancelled(nekro: Command, request: pytest.FixtureRequest) -> None:
    chat = f"cancel-{request.node.callspec.id}"
    assert nekro("send", chat, "wait long")[0] == 0
    code, out, err = nekro("cancel", chat, "--seconds", "30", "--json")
    assert code == 0, err
    report = json.loads(out)
    assert sorted(report) == ["cancelled", "still_running", "stopped"]
    assert len(report["cancelled"]) + len(report["stopped"]) == 1
    assert nekro("reset", chat)[0] == 0


def test_files_go_both_ways(nekro: Command, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    chat = f"files-{request.node.callspec.id}"
    assert nekro("send", chat, "hello", "--overheard")[0] == 0
    (tmp_path / "report.txt").write_text("figures")
    code, out, err = nekro("files", "put", chat, "report.txt", "--json")
    assert (code, json.loads(out)) == (0, {"path": "/app/uploads/report.txt", "size_bytes": 7}), err
    listed = json.loads(nekro("files", "list", chat, "--json")[1])
    assert [(file["path"], file["size_bytes"]) for file in listed] == [("/app/uploads/report.txt", 7)]
    assert listed[0]["modified_at"]
    code, out, _ = nekro("files", "get", chat, "uploads/report.txt", "copy.txt", "--json")
    assert json.loads(out) == {"path": "uploads/report.txt", "size_bytes": 7, "file": "copy.txt"}
    assert (tmp_path / "copy.txt").read_text() == "figures"
    assert nekro("files", "get", chat, "uploads/report.txt", "copy.txt")[0] == ExitCode.USAGE
    assert nekro("files", "get", chat, "uploads/report.txt", "-")[1] == "figures"


def test_tail_prints_events_as_they_happen(
    nekro: Command, beside: Command, request: pytest.FixtureRequest
) -> None:
    import threading

    chat = f"tail-{request.node.callspec.id}"
    assert beside("send", chat, "hello", "--overheard")[0] == 0
    results: list[tuple[int, str, str]] = []
    tail = threading.Thread(
        target=lambda: results.append(nekro("tail", chat, "--json", "--count", "1", "--seconds", "80"))
    )
    tail.start()
    while tail.is_alive():
        assert beside("send", chat, "more", "--overheard")[0] == 0
        tail.join(0.2)
    ((code, out, err),) = results
    event = json.loads(out)
    assert (code, event["type"], event["data"]["text"]) == (0, "message.received", "more"), err
    ids = {"turn_id", "round_id", "call_id", "message_id"}
    assert set(event) == {"number", "type", "at", "chat_key", "data"} | ids


def test_a_conversation_shows_answers(over_gateway: Command, tmp_path: Path) -> None:
    (tmp_path / "note.txt").write_text("milk")
    lines = "/help\nsay one\n/file note.txt say two\n/save /app/uploads/note.txt saved.txt\n/quit\n"
    code, out, err = over_gateway("chat", "--chat-key", "terminal", given=lines)
    assert (code, out) == (0, "you said one\nyou said two\n"), err
    assert "sends /app/uploads/note.txt" in err
    assert (tmp_path / "saved.txt").read_text() == "milk"


def test_doctor_checks_what_a_gateway_tells(over_gateway: Command, gateway_url: str) -> None:
    code, out, _ = over_gateway("doctor", "--json")
    checks = {check["name"]: check for check in json.loads(out)}
    assert code == 0
    assert {name: check["verdict"] for name, check in checks.items()} == dict.fromkeys(
        ("gateway", "plugins", "workers", "queues"), "ok"
    )
    assert checks["gateway"]["detail"] == f"{gateway_url} is ready"


def test_a_command_of_this_host_says_so(tmp_path: Path) -> None:
    environ = {"NEKRO_URL": "http://127.0.0.1:1", "HOME": str(tmp_path)}
    for command in COMMANDS:
        if command.name in OVER_GATEWAY | ANYWHERE:
            continue
        arguments = {"worker": ["--lane", "methods"], "db": ["upgrade"]}.get(command.name, [])
        code, _, err = run_inside(command.name, *arguments, directory=tmp_path, environment=environ)
        assert code == ExitCode.USAGE, (command.name, err)
        assert f"`nekro {command.name}` works on this host only" in err and "NEKRO_URL" in err
    assert run_inside("completion", "bash", directory=tmp_path, environment=environ)[0] == 0


def test_an_unreachable_gateway_is_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target, "_RETRY_SECONDS", 0)
    environ = {"NEKRO_URL": "http://127.0.0.1:1", "HOME": str(tmp_path)}
    code, out, err = run_inside("methods", "--json", directory=tmp_path, environment=environ)
    assert (code, json.loads(out)["error"]["type"]) == (ExitCode.SERVICE, "ServiceError")
    assert err.startswith("error: http://127.0.0.1:1: no answer for /api/v1/methods")


def test_every_command_over_a_gateway_has_a_module() -> None:
    modules = {path.stem for path in (ROOT / "cli" / "remote").glob("*.py")}
    assert modules - {"__init__", "target", "messages"} == OVER_GATEWAY
