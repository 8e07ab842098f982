"""Foreign text in logs, terminals, pages and events is shown and never interpreted.

One hostile string passes through real commands, a real worker and real events. ``PLACES`` lists the commands
that show it; each runs at a pseudo-terminal and in a pipe.
"""

from __future__ import annotations

import asyncio
import json
import os
import pty
import re
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import pytest
import redis
from forked_process import ForkedProcess
from worker_fleet import Fleet, build_fleet

from broker_config.app import create_app
from broker_config.keys import Keys
from broker_config.settings import Settings
from broker_config.topology import AGENT_EVENTS, encode_chat_key
from broker_config.urls import redis_address
from nekro.app import use_cases
from nekro.broker.delivery.messages import CallMessage
from nekro.broker.delivery.transport import DELIVERIES_HEADER
from nekro.broker.publishing import encode_message
from nekro.cli.environment import environment_of
from nekro.wire.invocation import Invocation, Signer
from storage.engine import Database
from storage.repositories.events import NewEvent
from storage.repositories.jobs import NewJob

pytestmark = [pytest.mark.extended, pytest.mark.one_python, pytest.mark.timeout(240)]

CHAT = "hostile-chat"
SECONDS = 60
#: A line in the form of a log record of another chat's call.
FORGED = "2026-01-01 00:00:00.000 INFO     nekro call_ended outcome=ok chat_key=victim"
FORGED_JSON = '{"time": "2026-01-01", "level": "INFO", "event": "call_ended", "chat_key": "victim"}'
#: Title, clipboard, link (OSC 0, 52, 8), clearing, other screen (DECSET), 8-bit CSI, backspace.
STEERING = (
    "\x1b]0;title\x07\x1b]52;c;aGk=\x07\x1b]8;;http://evil.example\x1b\\x\x1b]8;;\x1b\\"
    "\x1b[2J\x1b[?1049h\x9b2J\b\x7f"
)
#: A name with reversed text, isolates, marks, zero-width spaces and tags.
HIDING = "\u202egnp.exe\u2066\u200e\u061c\u200b\u2060\ufeff\U000e0041\x85\u2028\u2029"
MARKUP = "[red]r[/red][link=http://evil.example]l[/link]<red>t</red>{0}{x.__class__}%s$(id)"
HOSTILE = f"A{STEERING}{HIDING}{MARKUP}\r{FORGED}\n{FORGED}\n{FORGED_JSON}\nerror: forged\n"
#: Characters that no terminal may receive, in any spelling between our own sequences.
OBEYED = (
    "\x1b]", "\x1b[2J", "\x1b[?1049h", "\x07", "\x08", "\x7f", "\x85", "\x9b", "\u2028", "\u2029", "\u202e",
    "\u2066", "\u200e", "\u061c", "\u200b", "\u2060", "\ufeff", "\U000e0041",
)  # fmt: skip
JOB, CALL = "1" * 32, "2" * 32

PLUGIN = f"""
import logging
import sys

from nekro_agent.api.plugin import CmdCtl, NekroPlugin, SandboxMethodType
from nekro_agent.core.logger import get_sub_logger, logger

HOSTILE = {HOSTILE!r}
FORGED_JSON = {FORGED_JSON!r}
plugin = NekroPlugin(name=HOSTILE, module_name="odd", description=HOSTILE, version="1", author="t", url="")


async def speak(_ctx, text: str) -> str:
    return text


async def fail(_ctx, text: str) -> None:
    raise ValueError(text)


async def write_logs(_ctx, text: str) -> None:
    logger.info(text)
    logger.opt(raw=True).info(text)
    logger.opt(colors=True).info("<red>{{}}</red>", text)
    logger.bind(chat_key=text, **{{text: 1}}).warning("call_ended")
    get_sub_logger(text).info("{{}}", text)
    print(text)
    print(FORGED_JSON, file=sys.stderr)
    logging.getLogger("a.library").warning("%s", text)
    logging.getLogger(text).error("bad arguments %d", text)
    try:
        raise ValueError(text) from KeyError(text)
    except ValueError:
        logger.exception(text)


async def say(context, *words: str):
    yield CmdCtl.message(HOSTILE)
    yield CmdCtl.failed(HOSTILE)


for method in (speak, fail, write_logs):
    method.__doc__ = HOSTILE
    plugin.mount_sandbox_method(SandboxMethodType.TOOL, method.__name__, HOSTILE)(method)
plugin.mount_command(name="say", description=HOSTILE, usage=HOSTILE)(say)
"""
BROKEN = f"raise ValueError({HOSTILE!r})"

#: Commands that show foreign text; True where the data itself is requested, which stays exact in a pipe.
PLACES: dict[str, tuple[tuple[str, ...], bool]] = {
    "history": (("history", CHAT), False),
    "history of rounds": (("history", CHAT, "--trace"), False),
    "history of an unknown chat": (("history", f"B{HOSTILE}"), False),
    "jobs": (("jobs",), False),
    "a job": (("jobs", "show", JOB), False),
    "a job's bar": (("jobs", "watch", JOB), False),
    "dead": (("dead",), False),
    "a dead call": (("dead", "show", CALL), False),
    "an unknown dead call": (("dead", "show", HOSTILE), False),
    "a returned value": (("call", "speak", "--args", json.dumps([HOSTILE])), True),
    "a raised error": (("call", "fail", "--args", json.dumps([HOSTILE])), False),
    "an unknown method": (("call", HOSTILE), False),
    "a command": (("command", CHAT, "/say"), True),
    "commands": (("command",), False),
    "methods": (("methods",), False),
    "plugins": (("plugins",), False),
    "doctor": (("doctor",), False),
    "metrics": (("metrics",), False),
    "cancel": (("cancel", HOSTILE), False),
    "reset": (("reset", HOSTILE), False),
    "sandboxed output": (("exec", "hostile.py", "--no-follow-up"), True),
    "wrong usage": (("jobs", HOSTILE), False),
    "an unknown argument": (("jobs", f"--x{HOSTILE}"), False),
}


@pytest.fixture(scope="module")
def fleet(redis_server: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    directory = tmp_path_factory.mktemp("hostile")
    plugins = directory / "plugins"
    plugins.mkdir()
    (plugins / "odd.py").write_text(PLUGIN, "utf-8")
    (plugins / "broken.py").write_text(BROKEN, "utf-8")
    (directory / "hostile.py").write_text(f"print({HOSTILE!r})\nraise ValueError({HOSTILE!r})", "utf-8")
    url = f"sqlite:///{directory / 'nekro.db'}"
    built = build_fleet(directory, redis_server.url, url, plugins={"dirs": (plugins,), "load_shipped": False})
    asyncio.run(seed(built.settings))
    finish_rows(directory / "nekro.db")
    built.start("methods")
    yield built
    built.stop()


async def seed(settings: Settings) -> None:
    services = Fleet(settings, Path()).services()
    await services.start()
    await use_cases.receive_message(services, CHAT, HOSTILE, user_id="u", user_name=HOSTILE)
    await services.close()
    database = Database(settings.database, settings.data_dir)
    async with database.begin() as transaction:
        await transaction.jobs.add(
            NewJob(id=JOB, type=HOSTILE, task_id=HOSTILE, plugin_key=HOSTILE, chat_key=CHAT)
        )
    await database.dispose()
    add_dead_letter(settings)


def add_dead_letter(settings: Settings) -> None:
    """Add a call to the dead letters, as a worker does with one that would kill it."""
    now = datetime.now(UTC)
    invocation = Invocation(
        call_id=CALL,
        method=HOSTILE,
        chat_key=HOSTILE,
        container_key="box",
        user_id=HOSTILE,
        issued_at=now,
        deadline=now + timedelta(hours=1),
        args=HOSTILE,
    )
    signer = Signer.from_text("test-signing-key")
    call = CallMessage.of(invocation, signer=signer, lane=HOSTILE, reply_to=HOSTILE)
    app = create_app(settings)
    message = json.loads(encode_message(call.build(app), queue="methods"))
    message["headers"] |= {DELIVERIES_HEADER: 3}
    with redis.Redis.from_url(redis_address(str(settings.broker.url)).server_url) as client:
        client.lpush(Keys(prefix=settings.broker.key_prefix).dead, json.dumps(message))
    app.close()


def finish_rows(path: Path) -> None:
    """Write the rows of a whole run, with foreign text in every column that a command shows."""
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(
            "UPDATE jobs SET message = ?, worker = ?, state = 'failed', finished_at = created_at",
            (HOSTILE,) * 2,
        )
        connection.execute(
            "UPDATE rounds SET state = 'failed', model = ?, worker = ?, code = ?, output = ?, error = ?,"
            " prompt_chars = 1, started_at = requested_at, finished_at = requested_at",
            (HOSTILE,) * 5,
        )
    connection.close()


def at_terminal(settings: Settings, directory: Path, *arguments: str) -> str:
    """Run a command whose three streams are a terminal; returns its output."""
    ours, theirs = pty.openpty()
    environ = environment_of(settings) | {"TERM": "xterm", "COLUMNS": "400"}
    process = ForkedProcess(
        "nekro.cli.main", arguments, environ=environ, cwd=directory, stdin=theirs, stdout=theirs
    )
    os.close(theirs)
    received = b""
    try:
        while wait([ours], SECONDS):
            chunk = os.read(ours, 65536)
            received += chunk
    except OSError:  # the last end of the terminal was closed
        pass
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    return received.decode("utf-8", "replace")


@pytest.mark.parametrize("place", PLACES)
def test_no_command_lets_foreign_text_control_the_terminal(fleet: Fleet, place: str) -> None:
    arguments, _ = PLACES[place]
    shown = at_terminal(fleet.settings, fleet.directory, *arguments)
    assert shown, "the command showed nothing"
    assert [spelling for spelling in OBEYED if spelling in shown] == []
    # Carriage returns only at line ends, and where rich redraws its bars.
    assert not re.search(r"\r+[^\r\n\x1b]", shown), shown


@pytest.mark.parametrize("place", [place for place, (_, exact) in PLACES.items() if not exact])
def test_a_report_to_a_pipe_contains_no_forged_line(fleet: Fleet, place: str) -> None:
    arguments, _ = PLACES[place]
    done = fleet.run(*arguments, cwd=fleet.directory)
    assert done.stdout or done.stderr
    for text in (done.stdout, done.stderr):
        assert [spelling for spelling in OBEYED if spelling in text] == []
        assert not [
            line for line in text.split("\n") if line.startswith(("2026-01-01", "{", "error: forged"))
        ]


def test_values_in_a_pipe_and_in_json_are_exact(fleet: Fleet) -> None:
    call = ("call", "speak", "--args", json.dumps([HOSTILE]))
    # As bytes: Python would convert the carriage return to a line end.
    nekro = [sys.executable, "-P", "-m", "nekro.cli.main", *call]
    piped = subprocess.run(nekro, env=environment_of(fleet.settings), capture_output=True, timeout=SECONDS)
    assert piped.stdout.decode() == f"{HOSTILE}\n"
    printed = fleet.run(*call, "--json").stdout
    assert json.loads(printed)["value"] == HOSTILE
    assert [spelling for spelling in OBEYED if spelling in printed] == []
    (message,) = json.loads(fleet.run("history", CHAT, "--json").stdout)
    assert (message["text"], message["sender"]) == (HOSTILE, HOSTILE)


RECORD = re.compile(
    r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} (?:[A-Z]+|\"Level \d+\") +(?:[^\s\"=\\]+|\"(?:[^\"\\]|\\.)*\") "
)
QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"')


def test_a_text_log_has_one_line_per_record_and_indented_tracebacks(fleet: Fleet) -> None:
    (worker,) = fleet.workers
    assert fleet.run("call", "write_logs", "--args", json.dumps([HOSTILE])).returncode == 0
    assert fleet.run("call", "fail", "--args", json.dumps([HOSTILE])).returncode != 0
    log = worker.log.read_text("utf-8")
    assert [spelling for spelling in (*OBEYED, "\r", "\x1b") if spelling in log] == []
    wrong = [
        line for line in log.split("\n")[:-1] if not RECORD.match(line) and not line.startswith("    | ")
    ]
    assert wrong == []
    records = [line for line in log.split("\n") if RECORD.match(line)]
    assert any(r"A\x1b]0;title\x07" in line for line in records)
    # Outside of quoted fields, nothing names the victim.
    assert [line for line in records if "chat_key=victim" in QUOTED.sub("", line)] == []
    assert not [line for line in records if line.startswith("2026-01-01")]


def test_a_json_log_has_one_object_per_line_and_no_forged_one(
    fleet: Fleet, redis_server: Any, tmp_path: Path
) -> None:
    url = f"sqlite:///{tmp_path / 'nekro.db'}"
    dirs = fleet.settings.plugins.dirs
    own = build_fleet(
        tmp_path,
        redis_server.url,
        url,
        plugins={"dirs": dirs, "load_shipped": False},
        log={"json_lines": True},
    )
    (worker,) = own.start("methods")
    try:
        assert own.run("call", "write_logs", "--args", json.dumps([HOSTILE])).returncode == 0
        log = worker.log.read_text("utf-8")
    finally:
        own.stop()
    assert [spelling for spelling in (*OBEYED, "\r", "\x1b") if spelling in log] == []
    # The command itself warns about root before logging starts.
    lines = [line for line in log.splitlines() if not line.startswith("warning: workers started by root")]
    records = [json.loads(line) for line in lines]
    assert [record for record in records if record.get("chat_key") == "victim"] == []
    assert HOSTILE in [record["event"] for record in records]
    assert FORGED_JSON in [record["event"] for record in records if record["logger"] == "stderr"]


def test_nekro_up_forwards_the_output_of_workers_line_by_line_and_escaped(tmp_path: Path) -> None:
    (tmp_path / "plugins").mkdir()
    # Not through Python's streams, like a program that a plugin starts.
    loud = PLUGIN + f"\nimport os\nos.write(2, {HOSTILE!r}.encode())\nos.write(1, b'\\xff\\x1b[2J\\n')\n"
    (tmp_path / "plugins" / "odd.py").write_text(loud, "utf-8")
    environment = {
        **os.environ,
        "NEKRO_DATA_DIR": str(tmp_path / "data"),
        "NEKRO_PLUGINS__DIRS": str(tmp_path / "plugins"),
        "NEKRO_PLUGINS__LOAD_SHIPPED": "false",
    }
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "nekro.cli.main", "up", "--methods", "1", "--long", "0",
         "--rounds", "0"],
        env=environment, cwd=tmp_path, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    assert process.stderr is not None
    lines: list[str] = []
    try:
        for line in process.stderr:
            lines.append(line)
            if line.startswith("ready:"):
                break
    finally:
        process.send_signal(signal.SIGINT)
        lines += process.communicate(timeout=SECONDS)[1].splitlines(keepends=True)
    text = "".join(lines)
    assert r"methods-1 | A\x1b]0;title\x07" in text
    assert [spelling for spelling in (*OBEYED, "\x1b", "\r") if spelling in text] == []
    assert not [line for line in lines if line.startswith(("2026-01-01", "{", "error"))]


def test_tail_shows_hostile_events_on_one_line_and_no_forged_ones(fleet: Fleet) -> None:
    events = (
        NewEvent(type="message.sent", data={"text": HOSTILE, "sender_name": HOSTILE}),
        NewEvent(
            type="round.ended",
            data={"number": HOSTILE, "state": HOSTILE, "worker": HOSTILE, "error": {"text": HOSTILE}},
        ),
    )
    for options in ((), ("--json",)):
        process = fleet.command("tail", CHAT, "--count", "2", "--seconds", "30", *options)
        assert process.stderr is not None
        assert "watching" in process.stderr.readline()
        publish(fleet.settings, "odd\x1b]0;t\x07\rname", {"text": HOSTILE, "chat_key": "victim"})
        publish(fleet.settings, "events.added", {"number": HOSTILE, "chat_key": "victim"})
        asyncio.run(add_events(fleet.settings, *events))
        out, err = process.communicate(timeout=SECONDS)
        assert [spelling for spelling in (*OBEYED, "\x1b", "\r") if spelling in out + err] == []
        assert len(out.splitlines()) == 2
        if options:
            first, second = map(json.loads, out.splitlines())
            assert (first["chat_key"], first["data"]["text"]) == (CHAT, HOSTILE)
            assert (second["type"], second["data"]["number"]) == ("round.ended", HOSTILE)


async def add_events(settings: Settings, *events: NewEvent) -> None:
    database = Database(settings.database, settings.data_dir)
    async with database.begin() as transaction:
        await transaction.chats.ensure(CHAT)
        transaction.events.add(CHAT, *events)
    await database.dispose()


def publish(settings: Settings, name: str, body: dict[str, Any]) -> None:
    from broker_config.app import create_app

    with create_app(settings).connection_for_write() as connection:
        connection.Producer(serializer="json").publish(
            body,
            exchange=AGENT_EVENTS,
            routing_key=f"{name}.{encode_chat_key(CHAT)}",
            declare=[AGENT_EVENTS],
        )


def test_task_events_carry_no_control_character(make_settings: Callable[..., Settings]) -> None:
    from broker_config.app import create_app

    app = create_app(make_settings())
    texts = dict.fromkeys(("uuid", "name", "kwargs", "exception", "traceback"), HOSTILE)
    with app.connection_for_write() as connection:
        dispatcher = app.events.Dispatcher(connection, buffer_group={"task"})
        dispatcher.send("task-failed", **texts)
        (event,) = dispatcher._group_buffer["task"]  # what the next flush publishes
    assert event["exception"].startswith(r"A\x1b]0;title\x07")
    for name in texts:
        assert [spelling for spelling in (*OBEYED, "\x1b", "\r") if spelling in event[name]] == []
