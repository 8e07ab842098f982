"""Commands beside the workers and over a gateway: the same commands, the same output."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import redis
from forked_process import run_forked
from local_key import local_environment
from nekro_inside import run_inside
from waiting import WAIT_SECONDS, wait_until
from worker_fleet import Fleet

from broker_config.app import create_app
from broker_config.embedded import resolve_signing_key
from broker_config.keys import Keys
from nekro.broker.delivery.messages import CallMessage
from nekro.broker.publishing import encode_message
from nekro.cli import gateway_client
from nekro.cli.main import ANYWHERE, COMMANDS
from nekro.cli.running import ExitCode
from nekro.wire.invocation import Invocation, Signer, new_id
from nekro.wire.values import encode_arguments
from nekro_agent.shared_clock import shared_time
from nekro_client import AsyncClient, Client, ConflictError
from storage.engine import Database
from storage.repositories.chats import NewSummary

pytestmark = pytest.mark.extended

Command = Callable[..., tuple[int, str, str]]
ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def over_gateway(gateway_url: str, tmp_path: Path) -> Command:
    """Runs a command that knows nothing of the fleet but the gateway's URL."""

    def run(*arguments: str, given: str = "") -> tuple[int, str, str]:
        environ = local_environment(gateway_url, tmp_path)
        done = run_forked("nekro.cli.main", *arguments, environ=environ, cwd=tmp_path, given=given)
        assert "Traceback" not in done.stderr, done.stderr
        return done.returncode, done.stdout, done.stderr

    return run


@pytest.fixture
def beside(fleet: Fleet, tmp_path: Path) -> Command:
    """Runs a command with the settings of the workers."""

    def run(*arguments: str, given: str = "") -> tuple[int, str, str]:
        done = fleet.run(*arguments, cwd=tmp_path, given=given)
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
        (("history", "unknown", "--summary"), ExitCode.STORAGE, "NotFoundError"),
        (("trace", "none"), ExitCode.STORAGE, "NotFoundError"),
        (("trace", "0" * 32), ExitCode.STORAGE, "NotFoundError"),
        (("trace", ""), ExitCode.USAGE, "UsageError"),
        (("cancel", "unknown"), ExitCode.STORAGE, "NotFoundError"),
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


#: The beginning of no id, a whole id of nothing, and texts that no id has.
WRONG_IDS = ("none", "0" * 32, "f" * 300, "a/b", "..", "%2e", "Ä?#")


@pytest.mark.parametrize(
    "arguments",
    [
        ("jobs", "show"), ("jobs", "cancel"), ("timers", "delete"), ("keys", "revoke"), ("approvals", "show"),
        ("approvals", "deny"), ("approvals", "revoke"), ("dead", "show"), ("dead", "retry"), ("dead", "drop"),
        ("trace",),
    ],
)  # fmt: skip
def test_wrong_ids_are_the_same_errors(
    beside: Command, over_gateway: Command, arguments: tuple[str, ...]
) -> None:
    for wrong in WRONG_IDS:
        here = beside(*arguments, wrong, "--json")
        there = over_gateway(*arguments, wrong, "--json")
        assert here == there, wrong
        assert here[0] in (ExitCode.STORAGE, ExitCode.USAGE), wrong


@pytest.mark.parametrize(
    "arguments",
    [
        ("jobs", "--chat-key", "c" * 2000),
        ("jobs", "--chat-key", "none"),
        ("jobs", "--limit", "100000"),
        ("timers", "--chat-key", "c" * 2000),
        ("timers", "--limit", "100000"),
        ("approvals", "--all", "--chat-key", "c" * 2000),
        ("approvals", "--all", "--limit", "100000"),
        ("dead", "--limit", "100000"),
        ("dead", "retry", "none", "--timeout", "1e9"),
        ("costs", "--by", "chat", "--since", "7d"),
        ("costs", "--since", "0001-01-01", "--until", "9999-12-31"),
        ("costs", "--since", "2026-05-31", "--until", "2026-05-01"),
        ("keys", "create", "n" * 300, "--scope", "read"),
        ("keys", "create", "n", "--scope", "read", "--chats", "c" * 2000),
        ("keys", "create", "n", "--scope", "read", "--rate", "9" * 30),
        ("keys", "create", "n", "--scope", "read", "--tokens-per-day", "9" * 30),
        ("keys", "create", "n", "--scope", "read", "--stored-bytes-limit", "9" * 30),
        ("history", "c" * 2000),
        ("trace", "f" * 32, "--prompts"),
        ("cancel", "c" * 2000),
        ("reset", "c" * 2000),
    ],
)
def test_values_at_their_limits_have_the_same_outcome(
    beside: Command, over_gateway: Command, arguments: tuple[str, ...]
) -> None:
    assert beside(*arguments, "--json") == over_gateway(*arguments, "--json")


def test_exec_returns_the_stop_type(nekro: Command, tmp_path: Path) -> None:
    (tmp_path / "work.py").write_text("print(add(20, 1))")
    code, out, _ = nekro("exec", "work.py", "--json")
    report = json.loads(out)
    assert (code, report["stop_type"], report["exit_code"], report["output"]) == (0, "NORMAL", 0, "21\n")
    assert [call["method"] for call in report["calls"]] == ["tests.desk.add"]
    (tmp_path / "wrong.py").write_text("1 / 0")
    code, out, err = nekro("exec", "wrong.py")
    assert code == 1 and "ZeroDivisionError" in out and "ERROR after 0 calls" in err


def same(beside: Command, over_gateway: Command, *arguments: str) -> Any:
    """Run a command in both ways; returns what both print."""
    here, there = beside(*arguments, "--json"), over_gateway(*arguments, "--json")
    assert (here[0], there[0]) == (0, 0), (here[2], there[2])
    shown = json.loads(here[1])
    assert json.loads(there[1]) == shown
    return shown


def test_exec_over_a_gateway_prints_output_as_it_comes(gateway_url: str, tmp_path: Path) -> None:
    (tmp_path / "work.py").write_text(
        "import os, time\n"
        "print('begun\\n')\n"
        "while not os.path.exists('/app/uploads/go.txt'):\n"
        "    time.sleep(0.01)\n"
        "print('done', end='\\n\\n\\n')\n"
    )
    with Client(gateway_url) as client:
        client.chat("live").files.upload(b"", name="first.txt")  # makes the directory
        process = subprocess.Popen(
            [
                sys.executable,
                "-P",
                "-m",
                "nekro.cli.main",
                "exec",
                str(tmp_path / "work.py"),
                "--chat-key",
                "live",
            ],
            env=local_environment(gateway_url, tmp_path),
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        assert process.poll() is None
        client.chat("live").files.upload(b"", name="go.txt")
        out, err = process.communicate(timeout=WAIT_SECONDS)
    assert (process.returncode, out) == (0, "\ndone\n"), err
    assert err.endswith("NORMAL after 0 calls\n")


@pytest.mark.parametrize("arguments", [("timers",), ("dead",), ("keys",), ("costs",)])
def test_lists_over_a_gateway_equal_those_on_a_host(
    beside: Command, over_gateway: Command, arguments: tuple[str, ...]
) -> None:
    same(beside, over_gateway, *arguments)


def test_methods_are_the_same_with_the_reasons_of_their_lanes(beside: Command, over_gateway: Command) -> None:
    code, _, err = over_gateway("methods", "pin", "fail", "long")
    assert (code, err) == (0, "tests.desk.fail runs in lane long from now on\n")
    try:
        listed = {method["name"]: method for method in same(beside, over_gateway, "methods")}
        assert set(listed["fail"]) - set(listed["add"]) == {"lane_reason"}
        assert set(listed["add"]) == {"name", "task", "plugin", "type", "lane", "signature", "doc"}
        assert [method["name"] for method in same(beside, over_gateway, "methods", "desk.fa")] == ["fail"]
    finally:
        code, _, err = over_gateway("methods", "unpin", "tests.desk.fail")
        assert (code, err) == (0, "tests.desk.fail runs in the lane of its plugin again\n")
    assert (listed["fail"]["lane"], listed["add"]["lane"]) == ("long", "methods")
    assert "operator" in listed["fail"]["lane_reason"]
    for nekro in (beside, over_gateway):
        assert nekro("methods", "unpin", "fail")[2] == "tests.desk.fail has no lane override\n"
        for arguments, expected, words in (
            (("pin", "desk", "pinned"), ExitCode.USAGE, "'desk' is not a plugin; choose one of tests.desk"),
            (("pin", "add", "rounds"), ExitCode.USAGE, "there is no lane 'rounds' for methods"),
            (("pin", "nothing", "long"), ExitCode.METHOD, "no plugin has a method 'nothing'"),
            (("unpin", "nothing"), ExitCode.METHOD, "no plugin has a method 'nothing'"),
            (("pin", "add"), ExitCode.USAGE, "write `nekro methods"),
        ):
            code, _, err = nekro("methods", *arguments)
            assert code == expected and words in err, err


def test_plugins_are_the_same_with_their_paths(beside: Command, over_gateway: Command) -> None:
    listed = same(beside, over_gateway, "plugins")
    assert all(plugin["path"] for plugin in listed)
    for nekro in (beside, over_gateway):
        code, _, err = nekro("plugins", "disable", "tests.desks")
        assert (
            code == ExitCode.USAGE and "there is no plugin 'tests.desks'; did you mean tests.desk or" in err
        )
    code, _, err = over_gateway("plugins", "--load")
    assert code == ExitCode.USAGE and "`nekro plugins --load` works on this host only" in err


def test_a_plugin_is_disabled_and_enabled(nekro: Command) -> None:
    actions = ("enable", "disable", "disable", "enable")
    assert [nekro("plugins", action, "tests.idler")[2] for action in actions] == [
        "tests.idler is enabled already\n",
        "tests.idler: disabled on all workers within a second\n",
        "tests.idler is disabled already\n",
        "tests.idler: enabled on all workers within a second\n",
    ]


def test_a_plugin_is_woken_in_a_chat(beside: Command, over_gateway: Command) -> None:
    assert beside("send", "bed", "hello", "--overheard")[0] == 0
    assert same(beside, over_gateway, "plugins", "--chat", "bed") == [
        {"key": "tests.idler", "name": "Idler", "is_awake": False, "turns_left": None, "brief": "Idles."}
    ]
    for nekro in (beside, over_gateway):
        code, _, err = nekro("plugins", "wake", "tests.idler", "--chat", "bed", "--turns", "3")
        words = "tests.idler is awake in bed from the next turn on, for 3 turns\n"
        assert (code, err) == (0, words)
        (woken,) = same(beside, over_gateway, "plugins", "--chat", "bed")
        assert (woken["is_awake"], woken["turns_left"]) == (True, 3)
        assert nekro("plugins", "sleep", "tests.idler", "--chat", "bed")[2] == "tests.idler sleeps in bed\n"
        code, _, err = nekro("plugins", "sleep", "tests.idler", "--chat", "bed")
        assert (code, err) == (0, "tests.idler sleeps in bed already\n")
        for arguments, expected, words in (
            (("wake", "tests.desk", "--chat", "bed"), ExitCode.USAGE, "tests.desk is always awake"),
            (("wake", "tests.idle", "--chat", "bed"), ExitCode.USAGE, "did you mean tests.idler"),
            (("wake", "tests.idler", "--chat", "none"), ExitCode.STORAGE, "there is no chat 'none'"),
            (("wake", "tests.idler", "--chat", "bed", "--turns", "21"), ExitCode.USAGE, "from 1 to 20"),
        ):
            code, _, err = nekro("plugins", *arguments)
            assert code == expected and words in err, err


def test_jobs_are_the_same(beside: Command, over_gateway: Command) -> None:
    assert over_gateway("call", "measure", "--chat-key", "jobs")[0] == 0

    def ended() -> bool:
        listed = json.loads(beside("jobs", "--chat-key", "jobs", "--json")[1])
        return [job["state"] for job in listed] == ["succeeded"]

    wait_until(ended, what="the end of the call in the list of jobs")
    (job,) = same(beside, over_gateway, "jobs", "--chat-key", "jobs")
    shown = same(beside, over_gateway, "jobs", "show", job["id"])
    assert (shown["message"], shown["plugin"]) == ("half", "tests.desk") and shown["worker"]


def ask_for_approval(nekro: Command, directory: Path, chat_key: str) -> dict[str, Any]:
    """Run code that calls a method which requires approval; returns the request as lists show it."""
    (directory / "refund.py").write_text('refund("ada", 5)')
    assert nekro("exec", "refund.py", "--chat-key", chat_key)[0] == 14
    (asked,) = json.loads(nekro("approvals", "list", "--chat-key", chat_key, "--json")[1])
    return asked  # type: ignore[no-any-return]


def test_approvals_are_the_same_by_number_and_by_the_beginning_of_an_id(
    beside: Command, over_gateway: Command, tmp_path: Path
) -> None:
    asked = ask_for_approval(over_gateway, tmp_path, "pays")
    assert same(beside, over_gateway, "approvals", "--chat-key", "pays") == [asked]
    shown = same(beside, over_gateway, "approvals", "show", str(asked["number"]))
    assert (shown["id"], shown["call"]) == (asked["id"], "tests.desk.refund(\n    'ada',\n    5,\n)")
    assert same(beside, over_gateway, "approvals", "show", asked["id"][:10]) == shown
    assert same(beside, over_gateway, "approvals", "show", f"#{asked['number']}") == shown
    for nekro in (beside, over_gateway):
        code, _, err = nekro("approvals", "show", "none")
        assert code == ExitCode.STORAGE and "no approval has the id none; `nekro approvals list" in err
        code, _, err = nekro("approvals", "approve", asked["id"])
        assert code == ExitCode.USAGE and "    'ada'," in err and "add --yes" in err
        code, _, err = nekro("approvals", "deny", asked["id"], "--reason", "x" * 2001)
        assert code == ExitCode.USAGE and "reason: String should have at most 2000 characters" in err


def test_a_call_is_approved_with_other_arguments_which_are_shown(
    nekro: Command, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    asked = ask_for_approval(nekro, tmp_path, f"edits-{request.node.callspec.id}")
    arguments = ("approvals", "approve", str(asked["number"]), "--scope", "chat", "--yes")
    code, _, err = nekro(*arguments, "--args", '["bob", 7]')
    assert code == 0 and re.search(r"-    'ada',\s+-    5,\s+\+    'bob',\s+\+    7,\n", err), err
    assert f"approved: call {asked['call_id']} of tests.desk.refund runs as a job" in err
    code, _, err = nekro(*arguments)
    assert code == ExitCode.STORAGE and "is approved by" in err
    revoked = json.loads(nekro("approvals", "revoke", asked["id"], "--json")[1])
    assert (revoked["state"], revoked["is_edited"]) == ("approved", True) and revoked["revoked_at"]


def add_dead_call(fleet: Fleet) -> str:
    """Add a signed call to the dead letters; returns its id."""
    settings = fleet.settings
    now = datetime.now(UTC)
    call = Invocation(
        call_id=new_id(),
        method="tests.desk.add",
        chat_key="dead",
        container_key="dead",
        user_id="ada",
        issued_at=now,
        deadline=now + timedelta(seconds=60),
        args=encode_arguments((1,), {}),
    )
    signer = Signer.from_text(resolve_signing_key(settings).get_secret_value())
    message = CallMessage.of(call, signer=signer, lane="methods", reply_to=new_id())
    with create_app(settings) as app, redis.Redis.from_url(str(settings.broker.url)) as client:
        raw = encode_message(message.build(app), queue="methods")
        client.lpush(Keys(prefix=settings.broker.key_prefix).dead, raw)
    return call.call_id


def test_dead_letters_are_the_same_and_a_retry_says_what_runs(
    fleet: Fleet, beside: Command, over_gateway: Command
) -> None:
    letters = [add_dead_call(fleet) for _ in range(3)]
    listed = same(beside, over_gateway, "dead")
    assert [letter["id"] for letter in listed] == letters[::-1]
    assert len(same(beside, over_gateway, "dead", "--limit", "2")) == 2
    shown = same(beside, over_gateway, "dead", "show", letters[0][:12])
    assert set(shown) == {*listed[0], "signature", "chat_key", "deadline"}
    assert (shown["signature"], shown["chat_key"]) == ("valid", "dead")
    for nekro, letter, option, until in (
        (beside, letters[0], (), r"until \d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC"),
        (over_gateway, letters[1], ("--timeout", "30"), "for at most 30 s"),
    ):
        code, _, err = nekro("dead", "retry", letter[:12], *option)
        text = r"runs tests\.desk\.add on lane methods in chat dead as user ada, \d+ bytes of arguments, "
        assert code == 0 and re.fullmatch(f"{text}{until}\nsent {letter} to lane methods again\n", err), err
        code, _, err = nekro("dead", "drop", letter)
        assert code == ExitCode.STORAGE and f"no dead letter has the id {letter}" in err
    add_dead_call(fleet)
    assert over_gateway("dead", "drop", letters[2][:12])[2] == f"dropped {letters[2]}\n"
    assert beside("dead", "drop", "all")[2].startswith("dropped ")
    assert same(beside, over_gateway, "dead") == []


def test_the_history_is_the_same_with_its_rounds(beside: Command, over_gateway: Command) -> None:
    code, _, err = over_gateway("send", "story", "trace all", "--user-id", "ada", "--wait")
    assert code == 0, err
    assert over_gateway("send", "story", "say more", "--user-id", "ada", "--wait")[0] == 0
    told = same(beside, over_gateway, "history", "story", "--trace")
    assert "tests.desk" in {message["plugin"] for message in told["messages"]}
    first, second, *_ = told["rounds"]
    assert [call["method"].rpartition(".")[2] for call in first["calls"]] == ["say", "add", "fail", "ask"]
    assert (first["user"], first["stop_type"], first["turn"]) == ("ada", "AGENT", second["turn"])
    assert first["prompt_chars"] and first["answered_at"] and second["observation"] == "finish now"
    assert same(beside, over_gateway, "history", "story", "--summary") == []
    assert same(beside, over_gateway, "history", "story", "--all") == told["messages"]
    newest = same(beside, over_gateway, "history", "story", "--trace", "--limit", "1")
    assert newest["rounds"] == told["rounds"][-1:]


def test_summaries_are_the_same(beside: Command, over_gateway: Command, fleet: Fleet) -> None:
    assert beside("send", "summed", "hello", "--overheard")[0] == 0
    asyncio.run(_summarise(fleet, "summed"))
    newest, first = same(beside, over_gateway, "history", "summed", "--summary")
    assert (newest["version"], newest["group"], newest["cost"]) == (2, "small", 0.5)
    assert (first["version"], first["text"], first["prompt_tokens"]) == (1, "part 1", None)
    here, there = (nekro("history", "summed", "--summary") for nekro in (beside, over_gateway))
    assert here == there and here[1].startswith("version 2, ") and "part 2" in here[1]


async def _summarise(fleet: Fleet, chat_key: str) -> None:
    async with Database(fleet.settings.database, fleet.settings.data_dir) as database:
        for version in (1, 2):
            async with database.begin() as transaction:
                chat = await transaction.chats.get(chat_key)
                now = shared_time()
                new = NewSummary(
                    chat_key=chat_key,
                    version=version,
                    up_to=version,
                    oldest_at=now,
                    newest_at=now,
                    text=f"part {version}",
                    group_name="small",
                    model="m",
                    prompt_tokens=None,
                    answer_tokens=3,
                    tokens_estimated=False,
                    cost=0.5,
                )
                assert await transaction.summaries.add(
                    new, history_revision=chat.history_revision, reset_at=chat.reset_at
                )


def test_a_turn_is_traced(beside: Command, over_gateway: Command) -> None:
    assert over_gateway("send", "traced", "trace all", "--user-id", "ada", "--wait")[0] == 0
    turn_id = same(beside, over_gateway, "history", "traced", "--trace")["rounds"][0]["turn"]
    turn = same(beside, over_gateway, "trace", turn_id)
    assert same(beside, over_gateway, "trace", turn_id[:12], "--prompts") == turn
    assert (turn["id"], turn["state"]) == (turn_id, "done")
    assert [call["line"] for call in turn["rounds"][0]["calls"]] == sorted(
        call["line"] for call in turn["rounds"][0]["calls"]
    )
    for nekro in (beside, over_gateway):
        code, out, err = nekro("trace", turn_id[:12])
        assert code == 0, err
        assert nekro("trace", turn_id, "--follow")[1] == out
        lines = out.split("\n")
        assert lines[0].startswith(f"turn {turn_id}  chat traced  caused by message ")
        assert any(line.strip().startswith("1 | ") for line in lines), "code has line numbers"
        (failed,) = [line for line in lines if ".fail  line" in line]
        assert "failed  took " in failed
        assert any(".say  line" in line and "  waited " in line and "  ran " in line for line in lines)
        assert any(line.startswith("done after ") and "2 rounds" in line for line in lines), out


def test_the_client_lists_transient_chats_if_it_asks_for_them(
    gateway_url: str, over_gateway: Command
) -> None:
    key = "private_transient_0a1b"  # as one request of the OpenAI API names its own
    assert over_gateway("send", key, "hello", "--user-id", "ada")[0] == 0
    with Client(gateway_url) as client:
        assert client.chats(key).items == []
        assert [one.chat_key for one in client.chats(key, transient=True).items] == [key]

    async def same_with_asyncio() -> None:
        async with AsyncClient(gateway_url) as other:
            assert (await other.chats(key)).items == []
            assert len((await other.chats(key, transient=True)).items) == 1

    asyncio.run(same_with_asyncio())


def test_the_client_lists_chats_and_turns_and_replays_one(gateway_url: str, over_gateway: Command) -> None:
    assert over_gateway("send", "played", "trace all", "--user-id", "ada", "--wait")[0] == 0
    since = datetime(2020, 1, 1, tzinfo=UTC)
    with Client(gateway_url) as client:
        (chat,) = client.chats("PLAYED", failures_since=since).items
        assert (chat.chat_key, chat.failures) == ("played", 0)
        (turn,) = client.chat("played").turns().items
        call = client.turns.get(turn.id, with_values=False).rounds[0].calls[0]
        assert call.arguments is None and client.turns.call(turn.id, call.id).arguments is not None
        again = client.turns.replay(turn.id, chat_key="played again")
        assert again.chat_key == "played again" and again.turn_id is not None
        assert client.turns.wait(again.turn_id, timeout_seconds=60).state == "done"
        assert client.audit(action="nothing.").items == []

    async def same_with_asyncio() -> None:
        async with AsyncClient(gateway_url) as other:
            assert [one.chat_key for one in (await other.chats("played")).items] == ["played again", "played"]
            assert (await other.chat("played").turns(limit=1)).items == [turn]
            assert (await other.turns.call(turn.id, call.id)).id == call.id
            with pytest.raises(ConflictError):
                await other.turns.replay(turn.id, chat_key="played")
            assert (await other.audit(subject="nothing")).items == []

    asyncio.run(same_with_asyncio())


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
    assert sorted(report) == ["cancelled", "still_running", "stopped", "waits"]
    assert len(report["cancelled"]) + len(report["stopped"]) == 1
    code, out, _ = nekro("cancel", chat, "--json")
    assert (code, json.loads(out)) == (0, {"cancelled": [], "stopped": [], "still_running": [], "waits": []})
    code, out, err = nekro("reset", chat)
    assert (code, out) == (0, "") and err.endswith(f"chat {chat} was reset\n")
    assert nekro("history", chat, "--json")[:2] == (0, "[]\n")
    assert len(json.loads(nekro("history", chat, "--all", "--json")[1])) == 1


def test_files_go_both_ways(
    nekro: Command, beside: Command, over_gateway: Command, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    chat = f"files-{request.node.callspec.id}"
    assert nekro("send", chat, "hello", "--overheard")[0] == 0
    (tmp_path / "report.txt").write_text("figures")
    stored = {"path": "/app/uploads/report.txt", "size_bytes": 7}
    for target in ((), ("uploads/report.txt",), ("/app/uploads/",)):
        code, out, err = nekro("files", "put", chat, "report.txt", *target, "--json")
        assert (code, json.loads(out)) == (0, stored), err
    (tmp_path / "report.txt").write_text("new figures")
    assert nekro("files", "put", chat, "report.txt")[2] == "stored 11 bytes as /app/uploads/report.txt\n"
    for target in ("shared/in/", "in/data.txt"):
        assert nekro("files", "put", chat, "report.txt", target)[0] == 0
    listed = same(beside, over_gateway, "files", "list", chat)
    assert [(file["path"], file["size_bytes"]) for file in listed] == [
        ("/app/shared/in/data.txt", 11), ("/app/shared/in/report.txt", 11), ("/app/uploads/report.txt", 11),
    ]  # fmt: skip
    assert all(file["modified_at"] for file in listed)
    assert same(beside, over_gateway, "files", "list", chat, "in") == listed[:2]
    code, out, _ = nekro("files", "get", chat, "uploads/report.txt", "copy.txt", "--json")
    assert json.loads(out) == {"path": "uploads/report.txt", "size_bytes": 11, "file": "copy.txt"}
    assert (tmp_path / "copy.txt").read_text() == "new figures"
    assert nekro("files", "get", chat, "uploads/report.txt", "copy.txt")[0] == ExitCode.USAGE
    assert nekro("files", "get", chat, "in/data.txt", "-")[1] == "new figures"
    for arguments, expected, words in (
        (("put", chat, "report.txt", "uploads/in/x"), ExitCode.USAGE, "the uploads have no folders"),
        (("put", chat, "report.txt", "/etc/x"), ExitCode.USAGE, "neither /app/uploads nor /app/shared"),
        (("put", chat, "missing.txt"), ExitCode.USAGE, "missing.txt does not exist"),
        (("put", "nobody", "report.txt"), ExitCode.STORAGE, "there is no chat 'nobody'"),
        (("get", chat, "../secret"), ExitCode.USAGE, "'..'"),
        (("get", chat, "in"), ExitCode.USAGE, "ordinary file"),
        (("get", chat, "missing.txt"), ExitCode.STORAGE, "`nekro files list` lists its files"),
    ):
        code, _, err = nekro("files", *arguments)
        assert code == expected and words in err, (arguments, err)


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


def test_a_conversation_shows_answers(nekro: Command, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    chat = f"terminal-{request.node.callspec.id}"
    (tmp_path / "note.txt").write_text("milk")
    lines = (
        "/help\nsay one\n/file missing.txt\n/file note.txt say two\n/save nothing.txt\n"
        "/save /app/uploads/note.txt saved.txt\n/save uploads/note.txt saved.txt\n/quit\n"
    )
    code, out, err = nekro("chat", "--chat-key", chat, given=lines)
    assert (code, out) == (0, "you said one\nyou said two\n"), err
    assert "sends /app/uploads/note.txt" in err and "missing.txt does not exist" in err
    assert "the chat has no file nothing.txt" in err and "saved.txt exists" in err
    assert (tmp_path / "saved.txt").read_text() == "milk"


def test_commands_of_plugins_run_ask_and_fail(nekro: Command, beside: Command, over_gateway: Command) -> None:
    (listed,) = (one for one in same(beside, over_gateway, "command") if one["name"] == "order")
    assert (listed["full_name"], listed["usage"]) == ("tests.desk:order", "order [dish]")
    assert nekro("command", "kitchen", "/order soup", "--user-id", "ada")[:2] == (0, "soup for ada\n")
    code, out, err = nekro("command", "kitchen", "/order", "--user-id", "bob")
    assert (code, out) == (0, "which dish?\n") and "nekro command kitchen 'TEXT'" in err
    code, out, _ = nekro("command", "kitchen", "tea", "--user-id", "bob", "--json")
    described = json.loads(out)
    assert described == {
        "status": "success", "responses": [{"status": "success", "message": "tea for bob"}],
    }  # fmt: skip
    code, out, _ = nekro("command", "kitchen", "/close", "--json")
    assert (code, json.loads(out)["error"]["type"]) == (ExitCode.METHOD, "CommandFailed")
    refused = nekro("command", "kitchen", "/close", "--as", "user")
    assert refused[0] == ExitCode.METHOD and "nothing is open" not in refused[2]
    assert nekro("command", "kitchen", " ")[0] == ExitCode.USAGE


def test_doctor_checks_the_answers_of_a_gateway(over_gateway: Command, gateway_url: str) -> None:
    code, out, _ = over_gateway("doctor", "--json")
    checks = {check["name"]: check for check in json.loads(out)}
    assert code == 0
    assert {name: check["verdict"] for name, check in checks.items()} == dict.fromkeys(
        ("gateway", "plugins", "workers", "queues"), "ok"
    )
    assert checks["gateway"]["detail"] == f"{gateway_url} is ready"


def test_a_command_of_this_host_says_so(tmp_path: Path) -> None:
    environ = {"NEKRO_URL": "http://127.0.0.1:1", "HOME": str(tmp_path)}
    here = {command.name for command in COMMANDS if not command.works_over_api}
    assert here == {
        "bench", "completion", "db", "demo", "eval", "flower", "gateway", "metrics", "models", "replay",
        "sandbox", "up", "worker",
    }  # fmt: skip
    for name in here - ANYWHERE:
        needed = {
            "worker": ["--lane", "methods"], "db": ["upgrade"], "sandbox": ["packages"], "replay": ["4f1c2a"],
        }  # fmt: skip
        arguments = needed.get(name, [])
        code, _, err = run_inside(name, *arguments, directory=tmp_path, environment=environ)
        assert code == ExitCode.USAGE, (name, err)
        assert f"`nekro {name}` works on this host only" in err and "NEKRO_URL" in err
    assert run_inside("completion", "bash", directory=tmp_path, environment=environ)[0] == 0


def test_an_unreachable_gateway_is_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_client, "_RETRY_SECONDS", 0)
    environ = {"NEKRO_URL": "http://127.0.0.1:1", "HOME": str(tmp_path)}
    code, out, err = run_inside("methods", "--json", directory=tmp_path, environment=environ)
    assert (code, json.loads(out)["error"]["type"]) == (ExitCode.SERVICE, "ServiceError")
    assert err.startswith("error: http://127.0.0.1:1: no answer for /api/v1/methods")


def test_mcp_servers_are_added_tested_listed_and_removed(nekro: Command) -> None:
    odd = Path(__file__).parents[1] / "connectors" / "odd_server.py"
    command = ("--command", "/usr/bin/python3", "-u", str(odd))
    added, _, words = nekro(
        "mcp", "add", "shell-odd", "--env", "API_KEY=literal", "--file", str(odd), *command
    )
    assert added == 0 and "API_KEY of shell-odd looks like a secret" in words
    # Workers have it within a second; the test waits for that.
    code, out, words = nekro("mcp", "test", "shell-odd")
    assert code == 0, words
    assert "mcp.shell_odd.echo(text: str)" in out and "# may run again" in out
    assert "odd 1, protocol 2025-" in words and "no network" in words
    code, out, _ = nekro("mcp", "test", "shell-odd", "--json")
    tools = {tool["name"]: tool for tool in json.loads(out)["tools"]}
    assert (tools["add-note"]["runs_once"], tools["add-note"]["requires_approval"]) == (True, True)
    (listed,) = [one for one in json.loads(nekro("mcp", "--json")[1]) if one["name"] == "shell-odd"]
    assert (listed["status"], listed["transport"], len(listed["tools"])) == ("ok", "stdio", len(tools))
    assert "literal" not in json.dumps(listed["declaration"]["env"])
    wait_until(lambda: nekro("call", "mcp.shell_odd.echo", "--args", '["hi"]')[1] == "hi\n", what="the tool")
    assert nekro("mcp", "remove", "shell-odd")[0] == 0
    assert "shell-odd" not in nekro("mcp", "list")[1]
    for arguments, kind in (
        (("mcp", "test", "shell-odd", "--json"), "no MCP server"),
        (("mcp", "remove", "shell-odd", "--json"), "no MCP server"),
        (("mcp", "answer", "none-0", "x", "--json"), "no call waits"),
        (("mcp", "add", "--json"), "name the server"),
        (("mcp", "add", "x", "y", "--json"), "takes values"),
        (("mcp", "add", "x", "--json"), "--command"),
    ):
        code, out, words = nekro(*arguments)
        assert code != 0 and kind in out + words, (arguments, out, words)
