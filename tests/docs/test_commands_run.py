"""Every `nekro …` command line of ``docs/`` runs as a process on a small real system.

The table below lists what each command must print and how it must end. A command on the pages that is
missing in the table fails a test, and so does an entry whose command is no longer on the pages.

Placeholders of the examples (ids, ports, names of other hosts) are replaced by real values.
"""

from __future__ import annotations

import ast
import asyncio
import base64
import contextlib
import json
import os
import pty
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import redis
from chat_server import ChatServer, stream
from nekro_inside import run_inside
from redis_process import RedisServer, free_port
from waiting import WAIT_SECONDS, wait_until

from benchmarks import (
    catalogue,
    code_or_tools,
    console_load,
    downloads,
    fleets,
    floods,
    follow_up,
    goals,
    heavy_arguments,
    kv_costs,
    many_files,
    partitions,
    pooled_calls,
    profiles,
    redis_exchanges,
    rpc,
    sandbox,
    scale,
    turns,
    waiting_calls,
    walks,
)
from benchmarks.evaluation.__main__ import parse as parse_evaluation
from broker_config.embedded import socket_path
from broker_config.secret_files import monitoring_key
from broker_config.settings import BrokerSettings
from nekro.broker.delivery.transport import DELIVERIES_HEADER
from nekro.cli.main import WrongUsage, build_parser
from nekro.sandbox.models import StopType

pytestmark = pytest.mark.extended

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
#: Languages of blocks that contain commands.
TYPED = ("", "bash", "sh", "text")
#: Not inline code inside of links, as in the reference's headings.
SPAN = re.compile(r"(?<!\[)`(nekro [^`\n]+)`")
INVOCATION = re.compile(r"(?:[A-Z_]+=\S+ )*nekro |[^`]*\| nekro ")
PREFIX = BrokerSettings().key_prefix


def lines_of_blocks(page: Path) -> list[str]:
    """Lines of a page's command blocks, without shell comments."""
    blocks = [block for language, block in BLOCK.findall(page.read_text("utf-8")) if language in TYPED]
    return [line.partition("  #")[0].strip() for block in blocks for line in block.splitlines()]


def is_whole(command: str) -> bool:
    """Whether a command in a sentence can be run; one without its required arguments is only mentioned."""
    try:
        build_parser().parse_args(shlex.split(command)[1:])
    except WrongUsage as exc:
        return "arguments are required" not in str(exc)
    except SystemExit:  # a help option
        return False
    return True


@cache
def documented() -> frozenset[str]:
    """Every command line of `nekro` on the pages."""
    found = set()
    for page in PAGES:
        lines = lines_of_blocks(page)
        found |= {line for line in lines if INVOCATION.match(line)}
        sentences = BLOCK.sub("", page.read_text("utf-8")) + "\n".join(lines)
        found |= {span for span in SPAN.findall(sentences) if "…" not in span and is_whole(span)}
    return frozenset(found)


PLUGIN = '''
import asyncio
import time
from typing import Annotated

from nekro_agent.api import timer
from nekro_agent.api.plugin import (
    Arg, AsyncTaskHandle, CmdCtl, CommandExecutionContext, NekroPlugin, SandboxMethodType, TaskCtl, task
)
from nekro_agent.api.schemas import AgentCtx

plugin = NekroPlugin(
    name="Weather", module_name="weather", description="Rain.", version="1", author="Ada", url="",
    allow_sleep=True, sleep_brief="Tells the weather.",
)


def path(name: str):
    return plugin.get_plugin_data_dir() / name


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "forecast")
async def forecast(_ctx: AgentCtx, place: str) -> str:
    """Say what the sky will do."""
    return f"rain in {place}"


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "mail", requires_approval=True)
async def mail(_ctx: AgentCtx, to: str, text: str) -> str:
    """Write to somebody."""
    return f"wrote {text} to {to}"


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "describe")
async def describe(_ctx: AgentCtx, thing: str) -> str:
    """Describe a thing, and leave a sign of it."""
    path(f"described {thing}").touch()
    return f"{thing}: wet"


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "hold")
async def hold(_ctx: AgentCtx) -> None:
    """Last until somebody stops it."""
    path("held").touch()
    await asyncio.Event().wait()


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "remind")
async def remind(_ctx: AgentCtx, about: str) -> None:
    """Set a timer for tomorrow."""
    assert await timer.set_timer(_ctx.chat_key, int(time.time()) + 86400, about)


@plugin.mount_async_task("haul")
async def haul(handle: AsyncTaskHandle, name: str):
    """Last until the file `name` is there."""
    yield TaskCtl.report_progress("half way", 50)
    while not path(name).exists():
        await asyncio.sleep(0.05)
    yield TaskCtl.success("arrived")


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "begin_haul")
async def begin_haul(_ctx: AgentCtx, name: str) -> None:
    """Begin a job."""
    await task.start("haul", name, _ctx.chat_key, plugin, name)


@plugin.mount_command(name="weather", description="Weather", usage="weather <place> [days]")
async def weather_command(
    context: CommandExecutionContext, place: Annotated[str, Arg("place", positional=True)], days: int = 1
):
    """Say the weather of some days."""
    yield CmdCtl.success(f"{days} days of rain in {place}")


@plugin.mount_command(name="forecast", description="Forecast")
async def forecast_command(
    context: CommandExecutionContext, place: Annotated[str, Arg("place", positional=True)]
):
    """Say it to somebody."""
    yield CmdCtl.success(f"rain in {place}, {context.username}")


@plugin.mount_command(name="umbrella", description="Umbrella")
async def umbrella_command(
    context: CommandExecutionContext, answer: Annotated[str, Arg("answer", positional=True)] = "?"
):
    """Ask, and take the answer."""
    if answer == "?":
        yield CmdCtl.wait("an umbrella?", callback_cmd="umbrella", timeout=60)
    else:
        yield CmdCtl.success(f"umbrella: {answer}")
'''

#: Earlier lines of a chat may be in the same prompt: the last one decides.
SCRIPT = r"""
- when: 'hold on(?!.*(on today|Hello))'
  answer: "```python\nhold()\n```"
- when: 'on today(?!.*(hold on|Hello))'
  answer: "```python\nsend_msg_text(_ck, 'Today: ' + forecast('Tokyo'))\n```"
- when: 'Hello(?!.*(hold on|on today))'
  answer: "```python\nsend_msg_text(_ck, 'Good day to you')\n```"
"""


class Running:
    """A started command; its output goes to files, so that no pipe fills."""

    def __init__(
        self, line: str, directory: Path, environment: Mapping[str, str], expected: Expected
    ) -> None:
        self.line = line
        self._files = {name: directory / f".{name}" for name in ("out", "err")}
        self._terminal, theirs = pty.openpty() if expected.terminal else (None, None)
        self._shown = ""
        with self._files["out"].open("wb") as out, self._files["err"].open("wb") as err:
            self.process = subprocess.Popen(
                ["bash", "-euo", "pipefail", "-c", line],
                cwd=directory,
                env=dict(environment),
                stdin=subprocess.PIPE if theirs is None else theirs,
                stdout=out,
                stderr=err if theirs is None else theirs,
                start_new_session=True,
            )
        if theirs is not None:
            os.close(theirs)
        if self.process.stdin is not None:
            self.process.stdin.write(expected.given.encode())
            self.process.stdin.close()

    def said(self, stream: str) -> str:
        """Its output so far: "out", or "err"."""
        shown = self._shown if stream == "err" else ""
        return self._files[stream].read_text("utf-8") + shown

    def until(self, **patterns: str) -> None:
        """Wait until its output matches; fail when it ends without a match."""
        for stream_name, pattern in patterns.items():
            wait_until(
                lambda s=stream_name, p=pattern: (
                    re.search(p, self.said(s)) or self.process.poll() is not None
                ),
                seconds=WAIT_SECONDS,
                what=f"{pattern!r} of {self.line}",
            )
            assert re.search(pattern, self.said(stream_name)), f"{self.line}\n{self.all_of_it()}"

    def answer(self, text: str) -> None:
        """Type at its terminal once it prompts."""
        assert self._terminal is not None
        self._shown += os.read(self._terminal, 4096).decode()
        os.write(self._terminal, text.encode())

    def stop(self, number: signal.Signals) -> None:
        """Stop it: by SIGINT to the process group as Ctrl-C does, or by SIGTERM as a service manager does."""
        if number is signal.SIGINT:
            os.killpg(self.process.pid, number)
        else:
            self.process.send_signal(number)

    def ended(self) -> int:
        """Wait for its end; returns the exit code."""
        code = self.process.wait(WAIT_SECONDS)
        if self._terminal is not None:
            with contextlib.suppress(OSError):  # the read error of a terminal whose other end is closed
                while more := os.read(self._terminal, 4096):
                    self._shown += more.decode()
            os.close(self._terminal)
            self._terminal = None
        return code

    def all_of_it(self) -> str:
        return "\n".join(self.said(name) for name in self._files)

    def kill(self) -> None:
        """Kill it if it still runs."""
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGTERM)
            self.process.wait(WAIT_SECONDS)


@dataclass(frozen=True, kw_only=True)
class Scene:
    """Environment of a command: a running system, and its own empty directory."""

    world: World
    directory: Path
    environment: Mapping[str, str]
    port: int

    @property
    def data_dir(self) -> Path:
        """The data directory of the command: the system's, or its own without `NEKRO_DATA_DIR`."""
        return Path(self.environment.get("NEKRO_DATA_DIR", self.directory / "data"))

    def nekro(self, *arguments: str) -> str:
        """Run `nekro` in this process, for preparation and concurrent steps; returns its data."""
        code, out, err = run_inside(*arguments, directory=self.directory, environment=self.environment)
        assert code == 0, f"nekro {shlex.join(arguments)}: {err}"
        return out

    def ask(self, path: str, *, password: str | None = None, token: str | None = None) -> str:
        """Request a page of the command's own server."""
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}")
        if password:
            request.add_header("Authorization", f"Basic {base64.b64encode(password.encode()).decode()}")
        if token:
            request.add_header("Authorization", f"Bearer {token}")
        with urllib.request.urlopen(request, timeout=WAIT_SECONDS) as answer:
            return str(answer.read().decode())

    def plugin_file(self, name: str) -> Path:
        """A file of the plugin above."""
        folder = self.world.data_dir / "plugins" / "Ada.weather"
        folder.mkdir(parents=True, exist_ok=True)
        return folder / name


@dataclass(frozen=True, kw_only=True)
class World:
    """A `nekro up` with the plugin above and a scripted model, and services of other hosts."""

    directory: Path
    data_dir: Path
    environment: Mapping[str, str]
    broker_url: str
    model_url: str

    def scene(self, expected: Expected) -> Scene:
        """An empty directory with the files that the examples name."""
        directory = Path(tempfile.mkdtemp(dir=self.directory))
        (directory / "arguments.json").write_text('{"thing": "the sea"}')
        (made,) = re.findall(r"^printf .* > shopping\.py$", (ROOT / "README.md").read_text(), re.MULTILINE)
        subprocess.run(["bash", "-c", made], cwd=directory, check=True)
        kept = {name: value for name, value in self.environment.items() if name not in expected.without}
        environment = {**kept, "TMPDIR": str(directory)}
        return Scene(world=self, directory=directory, environment=environment, port=free_port())

    def redis(self) -> redis.Redis:
        """A client of the system's own Redis."""
        return redis.Redis(unix_socket_path=str(socket_path(self.data_dir)))


Changes = Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Expected:
    """Expected behaviour of a command."""

    #: Regular expressions that stdout and stderr must match.
    out: str = ""
    err: str = ""
    code: int = 0
    #: Prepares the system; returns replacements in the command line.
    before: Callable[[Scene], Changes] | None = None
    #: For a command that keeps running: called once ``err`` has matched, before ``out`` is waited for.
    beside: Callable[[Scene, Running], None] | None = None
    #: Ends the command; None: it ends by itself.
    stop: signal.Signals | None = None
    #: Checks the effects of the command.
    after: Callable[[Scene, Running], None] | None = None
    #: Its standard input.
    given: str = ""
    #: Whether its standard input and error are a terminal; ``beside`` types there.
    terminal: bool = False
    #: Variables of the shell that are removed.
    without: tuple[str, ...] = ()


#: For ``without``: gives the command a data directory of its own, below its working directory.
ALONE = ("NEKRO_DATA_DIR",)


@pytest.fixture(scope="module")
def model_url() -> Iterator[str]:
    """An endpoint with the OpenAI chat protocol."""
    loop, urls = asyncio.new_event_loop(), []
    ready, done = threading.Event(), asyncio.Event()

    async def serve() -> None:
        async with ChatServer([stream('```python\nsend_msg_text(_ck, "Qwen greets")\n```')]) as server:
            urls.append(server.base_url)
            ready.set()
            await done.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    assert ready.wait(WAIT_SECONDS)
    yield urls[0]
    loop.call_soon_threadsafe(done.set)
    thread.join(WAIT_SECONDS)
    loop.close()


@pytest.fixture(scope="module")
def world(redis_server: RedisServer, model_url: str) -> Iterator[World]:
    """Started by the documented `nekro up`, stopped by Ctrl-C."""
    # Not pytest's directory: the path of a Unix socket must be short.
    with tempfile.TemporaryDirectory(prefix="nkdoc") as name:
        directory = Path(name)
        for folder in ("bin", "plugins", "runtime"):
            (directory / folder).mkdir(mode=0o700)
        command = directory / "bin" / "nekro"
        command.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -P -m nekro.cli.main "$@"\n')
        command.chmod(0o755)
        (directory / "plugins" / "weather.py").write_text(PLUGIN, "utf-8")
        (directory / "script.yaml").write_text(SCRIPT, "utf-8")
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("NEKRO_", "FLOWER_"))}
        world = World(
            directory=directory,
            data_dir=directory / "data",
            environment={
                **kept,
                "PATH": f"{directory / 'bin'}:{kept['PATH']}",
                # `nekro worker --check` queries all workers of the user, those of other tests included.
                "XDG_RUNTIME_DIR": str(directory / "runtime"),
                "NEKRO_DATA_DIR": str(directory / "data"),
                "NEKRO_PLUGINS__DIRS": str(directory / "plugins"),
                "NEKRO_LLM__SCRIPT": str(directory / "script.yaml"),
            },
            broker_url=redis_server.url,
            model_url=model_url,
        )
        up = Running("exec nekro up", directory, world.environment, Expected())
        try:
            up.until(err="ready: ")
            ask_what_is_on(world.scene(Expected()))
            yield world
            up.stop(signal.SIGINT)
            assert up.ended() == 0, up.all_of_it()
        finally:
            up.kill()


JOB = "6f1c9a0e5d0b4b6f9a7c2f4f7f3b8a11"
DEAD = "5f0c…"
TIMER = "7f3a"
APPROVAL = "17"
#: The key of an example.
KEY = "4be1c5f0a2d9e781"
HEX = r"[0-9a-f]{32}"


def add_dead_garbage(scene: Scene) -> Changes:
    """Send a message that workers cannot decode."""
    with scene.world.redis() as client:
        client.lpush(f"{PREFIX}methods", b"garbage")
        wait_until(lambda: client.exists(f"{PREFIX}dead"), what="the message to be set aside")
    return {}


def add_dead_call(scene: Scene) -> Changes:
    """Send a call with the delivery count of three crashes, to a queue without workers."""
    thing, prefix = scene.directory.name, f"t{uuid.uuid4().hex}:"
    apart = {"NEKRO_BROKER__URL": scene.world.broker_url, "NEKRO_BROKER__KEY_PREFIX": prefix}
    line = shlex.join(["exec", "nekro", "call", "describe", "--args", json.dumps([thing])])
    call = Running(line, scene.directory, {**scene.environment, **apart}, Expected())
    try:
        with redis.Redis.from_url(scene.world.broker_url) as client:
            raw = wait_until(lambda: client.rpop(f"{prefix}methods"), seconds=WAIT_SECONDS, what="the call")
    finally:
        call.kill()
    message = json.loads(raw)
    message["headers"][DELIVERIES_HEADER] = 3
    with scene.world.redis() as client:
        client.delete(f"{PREFIX}dead")
        client.lpush(f"{PREFIX}methods", json.dumps(message))
        wait_until(lambda: client.exists(f"{PREFIX}dead"), what="the call to be set aside")
    return {DEAD: message["headers"]["id"][:8]}


def nothing_is_dead(scene: Scene, _: Running) -> None:
    with scene.world.redis() as client:
        assert not client.exists(f"{PREFIX}dead")


def the_call_runs(scene: Scene, _: Running) -> None:
    wait_until(scene.plugin_file(f"described {scene.directory.name}").exists, what="the call to run")


def open_jobs(scene: Scene) -> dict[str, str]:
    """Ids and last log lines of open jobs."""
    found = json.loads(scene.nekro("jobs", "--open", "--json"))
    return {job["id"]: job["message"] for job in found}


def begin_job(scene: Scene) -> Changes:
    """Start a job in chat group_1 that lasts until this scene ends."""
    before = set(open_jobs(scene))
    scene.nekro("call", "begin_haul", "--args", json.dumps([scene.directory.name]), "--chat-key", "group_1")
    (job,) = wait_until(
        lambda: [i for i, said in open_jobs(scene).items() if said == "half way" and i not in before],
        what="the job to begin",
    )
    return {JOB: job}


def ask_for_approval(scene: Scene, *, chat_key: str = "") -> Changes:
    """Run code that calls a method which requires approval, in a chat of this scene or the one named."""
    (scene.directory / "mail.py").write_text("mail('ada@example.org', 'Hi')")
    words = ("exec", "mail.py", "--chat-key", chat_key or f"mail-{scene.directory.name}")
    code, _, err = run_inside(*words, directory=scene.directory, environment=scene.environment)
    assert code == StopType.APPROVAL, err
    return {APPROVAL: str(json.loads(scene.nekro("approvals", "list", "--json"))[0]["number"])}


def approve_for_the_chat(scene: Scene) -> Changes:
    """Approve such a call for the chat."""
    changes = ask_for_approval(scene)
    scene.nekro("approvals", "approve", changes[APPROVAL], "--scope", "chat", "--yes")
    return changes


def own_database(scene: Scene) -> Changes:
    """Make a database for a command that is alone."""
    scene.nekro("db", "upgrade")
    return {}


def use_a_store(scene: Scene) -> Changes:
    """Import a file into a store of a command that is alone."""
    own_database(scene)
    scene.environment["NEKRO_FILES__URL"] = f"file://{scene.directory}/objects"
    uploads = scene.directory / "data" / "uploads" / "chat"
    uploads.mkdir(parents=True)
    (uploads / "a.txt").write_text("figures")
    scene.nekro("files", "import")
    return {}


def declare_time(scene: Scene) -> Changes:
    """Declare an MCP server that nothing starts."""
    own_database(scene)
    scene.nekro("mcp", "add", "time", "--command", "uvx", "mcp-server-time")
    return {}


def declare_working_time(scene: Scene) -> Changes:
    """Declare an MCP server that the workers of the system start."""
    script = str(ROOT / "tests" / "connectors" / "odd_server.py")
    scene.nekro("mcp", "add", "time", "--file", script, "--command", "/usr/bin/python3", "-u", script)
    return {}


def describe_other(scene: Scene) -> Changes:
    """Write the declaration of a server."""
    own_database(scene)
    (scene.directory / "other.json").write_text('{"url": "https://mcp.example.org/mcp"}')
    return {}


def remove_time(scene: Scene, _: Running) -> None:
    scene.nekro("mcp", "remove", "time")


def let_jobs_end(scene: Scene, *_: Running) -> None:
    scene.plugin_file(scene.directory.name).touch()


def watch_them_end(scene: Scene, command: Running) -> None:
    command.until(out=" running +50% +half way")
    let_jobs_end(scene)


def hold_a_round(scene: Scene) -> Changes:
    """Start a round in chat group_1 that lasts until it is cancelled."""
    held = scene.plugin_file("held")
    held.unlink(missing_ok=True)
    scene.nekro("send", "group_1", "hold on")
    wait_until(held.exists, seconds=WAIT_SECONDS, what="the round to hold")
    return {}


def save_a_note(scene: Scene) -> Changes:
    arguments = ["shop", "Shopping", "milk"]
    scene.nekro("call", "save_note", "--args", json.dumps(arguments), "--user-id", "ada")
    return {}


def ask_what_is_on(scene: Scene) -> Changes:
    scene.nekro("send", "cli", "What is on today?", "--wait")
    return {}


def a_turn(scene: Scene) -> Changes:
    """Name the turn of a question that was answered."""
    ask_what_is_on(scene)
    rounds = json.loads(scene.nekro("history", "cli", "--trace", "--json"))["rounds"]
    return {"4f1c2a": rounds[-1]["turn"]}


def a_case(scene: Scene) -> Changes:
    """Save the case of such a turn, below the directory of the command."""
    turn = a_turn(scene)["4f1c2a"]
    for name in ("rain", "train"):
        scene.nekro("replay", turn, "--save", f"cases/{name}.yaml")
    return {}


def ask_for_an_umbrella(scene: Scene) -> Changes:
    scene.nekro("command", "group_1", "/umbrella")
    return {}


def migrate(scene: Scene) -> Changes:
    scene.nekro("db", "upgrade")
    return {}


def store_for_weather(scene: Scene) -> Changes:
    (scene.world.data_dir / "plugins" / "you.weather").mkdir()
    return {"author.module": "you.weather"}


def nothing_is_stored(scene: Scene, _: Running) -> None:
    assert not (scene.world.data_dir / "plugins" / "you.weather").exists()


def say_hello(scene: Scene, _: Running) -> None:
    scene.nekro("send", "group_1", "Hello")


def three_lines(_: Scene, command: Running) -> None:
    assert len(command.said("out").splitlines()) == 3


def nothing_is_left(scene: Scene, _: Running) -> None:
    assert list(scene.directory.glob("rpc-bench-*")) == []


def flower_answers(scene: Scene, _: Running) -> None:
    def answers() -> bool:
        with contextlib.suppress(urllib.error.URLError, ConnectionError):
            _, key = monitoring_key(scene.data_dir)
            return "Flower" in scene.ask("/", password=f"nekro:{key}")
        return False

    wait_until(answers, seconds=WAIT_SECONDS, what="Flower")


def flower_wants_its_password(scene: Scene, _: Running) -> None:
    def refuses() -> bool:
        try:
            scene.ask("/")
        except urllib.error.HTTPError as exc:
            exc.close()
            return exc.code == 401
        except (urllib.error.URLError, ConnectionError):
            return False
        raise AssertionError("Flower answered without a password")

    wait_until(refuses, seconds=WAIT_SECONDS, what="Flower")
    assert "Flower" in scene.ask("/", password="ada:secret")


def gateway_answers(scene: Scene, _: Running) -> None:
    assert json.loads(scene.ask("/readyz")) == {"ok": True}


def make_a_key(scene: Scene) -> Changes:
    """Make the key that an example revokes."""
    made = json.loads(scene.nekro("keys", "create", "site", "--scope", "read", "--chats", "site-*", "--json"))
    return {KEY: made["id"]}


def metrics_are_served(scene: Scene, _: Running) -> None:
    token = monitoring_key(scene.world.data_dir)[1]
    assert 'nekro_lane_workers{lane="methods"} 1' in scene.ask("/metrics", token=token)


def files_are_there(*names: str) -> Callable[[Scene, Running], None]:
    def look(scene: Scene, _: Running) -> None:
        assert all((scene.directory / name).is_file() for name in names)

    return look


def keep_files(scene: Scene) -> Changes:
    """Store the files that the examples name in chat group_1, and beside the command."""
    for name in ("chart.png", "notes.txt", "report.pdf", "data.csv"):
        (scene.directory / name).write_text("figures")
    (scene.directory / "downloads").mkdir()
    scene.nekro("call", "forecast", "--args", '["Tokyo"]', "--chat-key", "group_1")
    scene.nekro("files", "put", "group_1", "report.pdf")
    for name in ("chart.png", "notes.txt"):
        scene.nekro("files", "put", "group_1", name, "/app/shared/")
        (scene.directory / name).unlink()
    return {}


def set_a_timer(scene: Scene) -> Changes:
    """Set a timer of chat group_1 that is due in a day."""
    scene.nekro("call", "remind", "--args", '["water the plants"]', "--chat-key", "group_1")
    timers = json.loads(scene.nekro("timers", "--chat-key", "group_1", "--json"))
    return {TIMER: timers[-1]["id"]}


def make_home(scene: Scene) -> Changes:
    """Make the folders of the shells below the scene's directory."""
    for folder in (".local/share/bash-completion/completions", ".zsh/functions", ".config/fish/completions"):
        (scene.directory / folder).mkdir(parents=True)
    return {"~": str(scene.directory)}


def is_completed(scene: Scene, _: Running) -> None:
    """Check that the script of a shell was written."""
    (script,) = [path for path in scene.directory.rglob("*nekro*") if path.is_file()]
    assert "timers" in script.read_text()


CTRL_C, TERM = signal.SIGINT, signal.SIGTERM
PINS = {"before": migrate, "without": ALONE}
SURE: dict[str, Any] = {
    "before": store_for_weather,
    "terminal": True,
    "err": r"permanently delete the data of you\.weather: 0 stored values, .*(?s:.*)deleted: ",
    "beside": lambda _, command: command.answer("y\n"),
    "after": nothing_is_stored,
}
READY = r"methods-1@\S+: ready"

SAVE_NOTE = """nekro call save_note --args '["shop", "Shopping", "milk"]' --chat-key group_1 --user-id ada"""

EXPECTED = {
    "nekro demo": Expected(out=r"✓ (?s:.*)✓ ", without=ALONE),
    "nekro --data-dir /tmp/tour demo": Expected(out=r"✓ (?s:.*)✓ ", without=ALONE),
    "nekro up": Expected(err="ready: methods-1, long-1, rounds-1;", stop=CTRL_C, without=ALONE),
    "nekro up --reload": Expected(
        err="ready: methods-1, long-1, rounds-1;", stop=CTRL_C, without=ALONE
    ),
    "nekro up --methods 2 --rounds 2 --flower-port 5555": Expected(
        err="ready: methods-1, methods-2, long-1, rounds-1, rounds-2, flower;",
        beside=flower_answers, stop=CTRL_C, without=ALONE,
    ),
    "NEKRO_DATA_DIR=/srv/nekro NEKRO_PLUGINS__DIRS=/srv/plugins nekro up": Expected(
        err="ready: methods-1", stop=TERM, after=files_are_there("srv/nekro/nekro.db"),
    ),
    "nekro up --gateway-port 0": Expected(
        err="ready: methods-1, long-1, rounds-1; Ctrl-C", stop=CTRL_C, without=ALONE
    ),
    "nekro gateway": Expected(err="^HTTP API on http://127", beside=gateway_answers, stop=CTRL_C),
    "nekro gateway --port 8700 --json": Expected(out='"url": "http://127', stop=TERM),
    "nekro gateway --host 0.0.0.0 --port 8700": Expected(
        err="^HTTP API on http://127", beside=gateway_answers, stop=TERM
    ),
    "nekro gateway --check --port 8700": Expected(err="no gateway answers", code=13),
    "nekro sandbox packages": Expected(out="^pandas +[0-9]"),
    "nekro sandbox packages list --json": Expected(out='"python": "3'),
    "nekro sandbox packages build": Expected(out="^pandas +[0-9]"),
    "nekro sandbox packages add 'sympy>=1.14' --pip-arguments '--no-index --find-links ./wheels'": Expected(
        code=6, err="No matching distribution found for sympy"
    ),
    "nekro sandbox packages remove sympy": Expected(code=6, err="sympy was not added"),
    "nekro keys": Expected(before=make_a_key, out="site .*read"),
    "nekro keys list --json": Expected(before=make_a_key, out='"chats": "site-'),
    "nekro keys create site --scope read --scope post --chats 'site-*'": Expected(
        out="^nk_", err="^created key "
    ),
    "nekro keys create laptop --scope call --scope run --scope read --chats team-docs": Expected(
        out="^nk_", err="^created key "
    ),
    "nekro plugins list --chat CHAT": Expected(out=r"^Ada\.weather +asleep +Tells the weather"),
    "nekro plugins list --chat onebot_v11-group_1": Expected(out=r"^Ada\.weather .*Tells the weather"),
    "nekro plugins wake KEY --chat CHAT --turns 5": Expected(code=2, err="there is no plugin 'KEY'"),
    "nekro plugins sleep KEY --chat CHAT": Expected(code=2, err="there is no plugin 'KEY'"),
    "nekro plugins wake Ada.weather --chat onebot_v11-group_1 --turns 5": Expected(
        code=4, err="there is no chat 'onebot_v11-group_1'"
    ),
    "nekro keys create ada --scope read --scope post --user-id ada --rate 60 --cost-per-day 0.5 --days 90":
        Expected(out="^nk_", err="^created key "),
    f"nekro keys revoke {KEY}": Expected(before=make_a_key, err="^revoked key "),
    "nekro worker --lane methods": Expected(err=r"methods-\d+@\S+ ready", stop=TERM),
    "NEKRO_BROKER__URL=redis://queue:6379/0 nekro worker --lane long --concurrency 2": Expected(
        err=r"long-\d+@\S+ ready", stop=CTRL_C,
    ),
    "nekro worker --lane rounds --without-model": Expected(err=r"rounds-\d+@\S+ ready", stop=TERM),
    "nekro worker --check": Expected(out=READY),
    "nekro worker --check --lane methods": Expected(out=READY),
    "nekro worker --check --name methods-1 --data-dir data": Expected(
        before=lambda scene: {"--data-dir data": f"--data-dir {scene.world.data_dir}"}, out=READY
    ),
    "nekro worker --check live": Expected(out=r"methods-1@\S+: live"),
    "nekro exec shopping.py --user-id ada": Expected(out="Buy milk", err="NORMAL after 3 calls"),
    "nekro exec --chat-key group_1 --user-id ada --json shopping.py": Expected(out='"stop_type": "NORMAL"'),
    "echo 'print(list_notes())' | nekro exec --user-id ada -": Expected(
        before=save_a_note, out="Shopping", err="NORMAL after 1 calls"
    ),
    "nekro call list_notes --user-id ada": Expected(before=save_a_note, out="Shopping", err=r"tool in .* ms"),
    SAVE_NOTE: Expected(
        out="Shopping", err="behavior in .* ms on methods"),
    """nekro call nekro.notes.read_note --args '{"note_id": "shop"}' --user-id ada --json""": Expected(
        before=save_a_note, out='"value": ".*milk'
    ),
    "nekro call describe --args @arguments.json": Expected(out="^the sea: wet$"),
    "nekro command": Expected(out=r"/weather .*Ada\.weather:weather"),
    "nekro command group_1 '/weather Tokyo days:3'": Expected(out="^3 days of rain in Tokyo$"),
    "nekro command group_1 '/Ada.weather:forecast Tokyo' --user-id ada --as user --json": Expected(
        out='"message": "rain in Tokyo, ada"'
    ),
    "nekro command group_1 yes": Expected(before=ask_for_an_umbrella, out="^umbrella: yes$"),
    "nekro command K '/name arguments'": Expected(
        before=lambda _: {" K ": " group_1 ", "/name arguments": "/weather Tokyo"}, out="^1 days of rain"
    ),
    "NEKRO_LLM__BASE_URL=http://127.0.0.1:8000/v1 NEKRO_LLM__MODEL=qwen nekro chat": Expected(
        given="Hello\n", out="^Qwen greets$", without=(*ALONE, "NEKRO_LLM__SCRIPT")
    ),
    "nekro chat --chat-key group_1 --user-id ada": Expected(
        given="\nHello\n", out="^Good day to you$", err="chat group_1; Ctrl-D ends"
    ),
    "nekro chat --save downloads": Expected(
        before=keep_files, given="Hello\n", out="^Good day to you$", err="chat cli; Ctrl-D ends"
    ),
    "nekro send group_1 'What is on today?'": Expected(out=f"^{HEX}$"),
    "nekro send group_1 'What is on today?' --user-id ada --wait": Expected(out="^Today: rain in Tokyo$"),
    "nekro send group_1 'What do they say?' --file report.pdf --file data.csv": Expected(
        before=keep_files, out=f"^{HEX}$"
    ),
    "nekro send onebot_v11-group_1 'See you tomorrow' --overheard --channel-name Friends": Expected(
        out=f"^{HEX}$"
    ),
    "nekro history cli": Expected(out=r"cli-user: What is on today\?\n.*Today: rain in Tokyo"),
    "nekro history cli --trace": Expected(out=r"Today: rain in Tokyo(?s:.*)scripted(?s:.*)forecast"),
    "nekro history CHAT --trace": Expected(
        before=lambda _: {"CHAT": "cli"}, out=r"Today: rain in Tokyo(?s:.*)scripted(?s:.*)forecast"
    ),
    "nekro history cli --limit 5 --json": Expected(
        before=ask_what_is_on, out=r'"text": "What is on today\?"'),
    "nekro history cli --summary": Expected(before=ask_what_is_on, out="^chat cli has no summary$"),
    "nekro tail group_1": Expected(
        err="watching chat group_1", beside=say_hello, out="message.received +cli-user: Hello", stop=CTRL_C
    ),
    "nekro tail group_1 --json --count 3": Expected(
        err="watching chat group_1", beside=say_hello, out='"type": "message.received"', after=three_lines
    ),
    "nekro tail group_1 --seconds 60": Expected(
        before=lambda _: {"--seconds 60": "--seconds 2"}, err="watching chat group_1"
    ),
    "nekro trace 4f1c2a": Expected(before=a_turn, out=r"^turn .*(?s:.*)What is on today(?s:.*)^done after"),
    "nekro trace 4f1c2a --follow": Expected(before=a_turn, out="^done after .* tokens"),
    "nekro trace 4f1c2a --prompts": Expected(before=a_turn, out="^done after .* tokens"),
    "nekro trace 4f1c2a --json": Expected(before=a_turn, out='"state": "done"'),
    "nekro replay 4f1c2a": Expected(before=a_turn, out="^round 1: .*: the same$"),
    "nekro replay 4f1c2a --json": Expected(before=a_turn, out='"is_same": true'),
    "nekro replay 4f1c2a --save cases/rain.yaml": Expected(
        before=a_turn, out="^saved cases/rain.yaml$", after=files_are_there("cases/rain.yaml")
    ),
    "nekro replay 4f1c2a --model cheap": Expected(
        before=a_turn, code=12, err="there is no model group 'cheap'"
    ),
    "nekro eval cases": Expected(before=a_case, out="^2 of 2 cases are the same$"),
    "nekro eval cases/rain.yaml cases/train.yaml --json": Expected(before=a_case, out='"is_same": true'),
    "nekro cancel group_1": Expected(before=hold_a_round, err="^stopped 1 running, cancelled 0 waiting$"),
    "nekro cancel group_1 --seconds 60 --json": Expected(
        before=hold_a_round, out=r'"stopped": \[\s*{\s*"id": "' + HEX
    ),
    "nekro costs": Expected(out=r"^DAY +ROUNDS +REQUESTS +ESTIMATED +PROMPT TOKENS"),
    "nekro costs --by chat --since 7d": Expected(out=r"^cli +\d+ +\d+ +[-\d]+ +[\d,]+ "),
    "nekro costs --by model --since 2026-05-01 --until 2026-05-31 --json": Expected(out='"budgets": '),
    "nekro models": Expected(out="^default "),
    "nekro models test": Expected(code=12, err="no endpoint to test"),
    "nekro models test cheap --json": Expected(code=12, out="there is no model group 'cheap'"),
    "nekro models use group_1 cheap": Expected(code=12, err="there is no model group 'cheap'"),
    "nekro models summarise": Expected(code=2, err="`nekro models summarise CHAT`"),
    "nekro models summarise CHAT": Expected(code=2, err="NEKRO_AGENT__SUMMARY_GROUP names no model group"),
    "nekro models summarise group_1": Expected(code=2, err="NEKRO_AGENT__SUMMARY_GROUP names no model group"),
    "nekro reset group_1": Expected(err="^chat group_1 was reset$"),
    "nekro jobs": Expected(before=begin_job, out=f"{JOB} .* running .*50% +half way"),
    "nekro jobs list --open --chat-key group_1 --json": Expected(before=begin_job, out=f'"id": "{JOB}"'),
    "nekro jobs watch": Expected(before=begin_job, beside=watch_them_end, out=" succeeded "),
    f"nekro jobs watch {JOB}": Expected(before=begin_job, beside=watch_them_end, out=f"^{JOB}.* succeeded "),
    f"nekro jobs show {JOB} --json": Expected(before=begin_job, out='"state": "running"'),
    f"nekro jobs log {JOB}": Expected(before=begin_job, out=" 1 +report +50% half way"),
    f"nekro jobs retry {JOB}": Expected(before=begin_job, code=4, err="it can be started again when"),
    f"nekro jobs cancel {JOB}": Expected(
        before=begin_job, err=f"^(job {JOB} is cancelled|requested to cancel job {JOB})"
    ),
    "nekro approvals": Expected(
        before=ask_for_approval, out=f"^{APPROVAL} +mail-.* +pending +Ada.weather.mail\\('ada@example.org', "
    ),
    "nekro approvals list --all --chat-key group_1 --json": Expected(
        before=lambda scene: ask_for_approval(scene, chat_key="group_1"), out=f'"number": {APPROVAL},'
    ),
    f"nekro approvals show {APPROVAL}": Expected(before=ask_for_approval, out="^ +'ada@example.org',$"),
    f"nekro approvals approve {APPROVAL}": Expected(
        before=ask_for_approval, code=2, err="no terminal to ask on"
    ),
    f"nekro approvals approve {APPROVAL} --scope chat --yes": Expected(
        before=ask_for_approval, err="^approved: call "
    ),
    f"nekro approvals approve {APPROVAL} --args '[\"ada@example.org\", \"Hello\"]' --yes": Expected(
        before=ask_for_approval, err="(?s)\\+ +'Hello',.*approved: call "
    ),
    f"nekro approvals deny {APPROVAL} --reason 'wrong recipient'": Expected(
        before=ask_for_approval, err="^denied: call "
    ),
    f"nekro approvals revoke {APPROVAL}": Expected(
        before=approve_for_the_chat, err=f"^approval {APPROVAL} permits no further calls"
    ),
    "nekro mcp add": Expected(without=ALONE, code=2, err="name the server"),
    "nekro mcp test": Expected(without=ALONE, code=2, err="name the server"),
    "nekro mcp add time --command uvx mcp-server-time": Expected(
        without=ALONE, before=own_database, err="^time: declared as plugin mcp.time"
    ),
    "nekro mcp add files --file /srv/docs:rw --command npx -y @modelcontextprotocol/server-filesystem /srv/docs": (  # noqa: E501
        Expected(without=ALONE, before=own_database, err="^files: declared as plugin mcp.files")
    ),
    "nekro mcp add search --env 'API_KEY=${SEARCH_KEY}' --network --command npx -y some-search-server": Expected(  # noqa: E501
        without=ALONE, before=own_database, err="^search: declared as plugin mcp.search"
    ),
    "nekro mcp add tracker --url https://mcp.example.org/mcp --header 'Authorization: Bearer ${TRACKER_TOKEN}'": (  # noqa: E501
        Expected(without=ALONE, before=own_database, err="^tracker: declared as plugin mcp.tracker")
    ),
    "nekro mcp add other --declaration @other.json": Expected(
        without=ALONE, before=describe_other, err="^other: declared as plugin mcp.other"
    ),
    "nekro mcp": Expected(without=ALONE, before=declare_time, out="^time +new +stdio +0 +database"),
    "nekro mcp list --json": Expected(without=ALONE, before=declare_time, out='"plugin": "mcp.time"'),
    # A host starts it with pipes, which these tests do not use.
    "nekro mcp serve": Expected(code=2, err="stdin and stdout must be pipes"),
    "nekro mcp serve --chat-key group_1 --user-id ada": Expected(code=2, err="must be pipes"),
    "nekro mcp remove time": Expected(without=ALONE, before=declare_time, err="^time: removed"),
    "nekro mcp test time": Expected(
        before=declare_working_time,
        after=remove_time,
        out=r"^mcp\.time\.echo\(text: str\)",
        err="^time: odd 1",
    ),
    "nekro mcp answer 3f2a9c1b-5d2e city=Rome": Expected(
        without=ALONE, before=own_database, code=4, err="no call waits"
    ),
    "nekro mcp decline 3f2a9c1b-5d2e": Expected(
        without=ALONE, before=own_database, code=4, err="no call waits"
    ),
    "nekro files list group_1": Expected(before=keep_files, out=r"^ *7 +\d.* /app/uploads/report\.pdf$"),
    "nekro files list group_1 /app/shared --json": Expected(
        before=keep_files, out='"path": "/app/shared/chart.png"'
    ),
    "nekro files get group_1 chart.png": Expected(
        before=keep_files, err="^wrote 7 bytes to chart.png$", after=files_are_there("chart.png")
    ),
    "nekro files get group_1 /app/shared/notes.txt -": Expected(before=keep_files, out="^figures$"),
    "nekro files put group_1 report.pdf": Expected(
        before=keep_files, err="^stored 7 bytes as /app/uploads/report.pdf$"
    ),
    "nekro files put group_1 data.csv /app/shared/input/data.csv": Expected(
        before=keep_files, err="^stored 7 bytes as /app/shared/input/data.csv$"
    ),
    "nekro files fsck": Expected(
        before=use_a_store, err="^checked 1 contents: 0 damaged$", without=ALONE
    ),
    "nekro files fsck --read": Expected(
        before=use_a_store, err="^checked 1 contents: 0 damaged$", without=ALONE
    ),
    "nekro files fsck --read --repair": Expected(
        before=use_a_store, err="^checked 1 contents: 0 damaged$", without=ALONE
    ),
    "nekro files import": Expected(
        before=use_a_store, err="^imported 0 directories; the store had 1; nothing was", without=ALONE
    ),
    "nekro timers": Expected(before=set_a_timer, out=f"^{TIMER} +group_1 +waiting .* once +water the pl"),
    "nekro timers list --chat-key group_1 --json": Expected(before=set_a_timer, out=f'"id": "{TIMER}"'),
    f"nekro timers pause {TIMER}": Expected(before=set_a_timer, err=f"^paused timer {TIMER} of chat"),
    f"nekro timers resume {TIMER}": Expected(before=set_a_timer, err=f"^resumed timer {TIMER} of chat"),
    f"nekro timers delete {TIMER}": Expected(before=set_a_timer, err=f"^deleted timer {TIMER} of chat"),
    "nekro methods": Expected(out=r"^forecast +tool +methods .*Ada\.weather"),
    "nekro methods nekro.notes": Expected(out=r"(?s)\A(?!.*forecast).*save_note"),
    "nekro methods --json": Expected(out='"task": "Ada.weather.forecast"'),
    "nekro methods pin Ada.weather.forecast long": Expected(
        err=r"^Ada\.weather\.forecast runs in lane long from now on$", **PINS
    ),
    "nekro methods unpin Ada.weather.forecast": Expected(
        err=r"^Ada\.weather\.forecast has no lane override$", **PINS
    ),
    "nekro methods pin Ada.weather pinned": Expected(
        err=r"^Ada\.weather runs in lane pinned from now on$", **PINS
    ),
    "nekro plugins": Expected(out=r"^Ada\.weather +ok "),
    "nekro plugins --load": Expected(out=r"^Ada\.weather +ok "),
    "nekro plugins list --json": Expected(out='"key": "Ada.weather"'),
    "nekro plugins disable Ada.weather": Expected(
        err=r"^Ada\.weather: disabled on all workers within a second$", **PINS
    ),
    "nekro plugins enable Ada.weather": Expected(err=r"^Ada\.weather is enabled already$", **PINS),
    "nekro plugins new weather": Expected(
        out=r"^weather\.py\ntest_weather\.py$", after=files_are_there("weather.py", "test_weather.py")
    ),
    "nekro plugins new weather --dir my_plugins": Expected(
        out=r"^my_plugins/weather\.py$", after=files_are_there("my_plugins/test_weather.py")
    ),
    "nekro plugins purge you.weather": Expected(**SURE),
    "nekro plugins purge author.module": Expected(**SURE),
    "nekro doctor": Expected(out=r"^✓ redis: (?s:.*)^✓ database: (?s:.*)^✓ workers: "),
    "nekro doctor --settings": Expected(out=r"^\* NEKRO_LLM__SCRIPT +/"),
    "nekro doctor --json": Expected(out='"name": "redis"'),
    "nekro dead": Expected(before=add_dead_garbage, out="^raw-.* no worker can read it$"),
    f"nekro dead show {DEAD}": Expected(before=add_dead_call, out=r"^task: Ada\.weather\.describe$"),
    f"nekro dead retry {DEAD} --timeout 60": Expected(
        before=add_dead_call, err="^sent .* to lane methods again$", after=the_call_runs
    ),
    "nekro dead drop all": Expected(before=add_dead_garbage, err="^dropped raw-", after=nothing_is_dead),
    "nekro db upgrade": Expected(err="^the database schema is up to date$", without=ALONE),
    "nekro flower": Expected(err="^Flower listens on http://127", beside=flower_answers, stop=CTRL_C),
    "FLOWER_BASIC_AUTH=ada:secret nekro flower --address 0.0.0.0 --port 5555": Expected(
        err="^Flower listens on http://127", beside=flower_wants_its_password, stop=TERM
    ),
    "nekro metrics": Expected(out='^nekro_lane_workers{lane="methods"} 1'),
    "nekro metrics --port 9463": Expected(
        err="^metrics of the fleet on http://127", beside=metrics_are_served, stop=CTRL_C
    ),
    "nekro metrics --address 0.0.0.0 --port 9463": Expected(
        err="^metrics of the fleet on http://127", beside=metrics_are_served, stop=TERM
    ),
    "nekro completion bash > ~/.local/share/bash-completion/completions/nekro": Expected(
        before=make_home, after=is_completed, err="^$"
    ),
    "nekro completion zsh > ~/.zsh/functions/_nekro": Expected(
        before=make_home, after=is_completed, err="^$"
    ),
    "nekro completion fish > ~/.config/fish/completions/nekro.fish": Expected(
        before=make_home, after=is_completed, err="^$"
    ),
    "nekro bench": Expected(
        err=r"^raw-redis starts ", stop=CTRL_C, code=130, after=nothing_is_left
    ),
    "nekro bench rpc -- --help": Expected(out=r"^usage: python -m benchmarks\.rpc"),
}  # fmt: skip


def test_each_command_of_the_pages_is_in_the_table() -> None:
    assert sorted(documented() - set(EXPECTED)) == [], "documented, and nothing is expected of it"
    assert sorted(set(EXPECTED) - documented()) == [], "expected, and gone from the pages"
    assert [line for line, expected in EXPECTED.items() if not (expected.out or expected.err)] == []


def changes(scene: Scene) -> dict[str, str]:
    """Placeholders of the examples, and their replacements."""
    broker = f"{scene.world.broker_url} NEKRO_BROKER__KEY_PREFIX=t{uuid.uuid4().hex}:"
    return {
        "redis://queue:6379/0": broker,
        "http://127.0.0.1:8000/v1": scene.world.model_url,
        "0.0.0.0": "127.0.0.1",
        "port 5555": f"port {scene.port}",
        "port 9463": f"port {scene.port}",
        "port 8700": f"port {scene.port}",
        "/srv/plugins": str(scene.world.directory / "plugins"),
        "/srv/nekro": str(scene.directory / "srv" / "nekro"),
        "/tmp/tour": str(scene.directory / "tour"),
    }


def changed(text: str, what: Mapping[str, str]) -> str:
    for placeholder, real in what.items():
        text = text.replace(placeholder, real)
    return text


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("line", EXPECTED)
def test_each_command_behaves_as_its_page_says(line: str, world: World) -> None:
    expected = EXPECTED[line]
    scene = world.scene(expected)
    what = changes(scene) | dict(expected.before(scene) if expected.before else {})
    real = changed(line, what)
    if line in ("nekro flower", "nekro gateway"):
        real += f" --port {scene.port}"  # the default port may be in use
    if "|" not in real:  # signals must reach the command and not a shell
        real = re.sub(r"(?<!\S)nekro ", "exec nekro ", real, count=1)
    out, err = (f"(?m){changed(text, what)}" for text in (expected.out, expected.err))
    command = Running(real, scene.directory, scene.environment, expected)
    try:
        if expected.beside is not None or expected.stop is not None:
            if not expected.terminal:
                command.until(err=err)
            if expected.beside is not None:
                expected.beside(scene, command)
        if expected.stop is not None:
            command.until(out=out)
            command.stop(expected.stop)
        assert command.ended() == expected.code, command.all_of_it()
    finally:
        let_jobs_end(scene)
        command.kill()
    assert re.search(out, command.said("out")), command.all_of_it()
    assert re.search(err, command.said("err")), command.all_of_it()
    assert "Traceback" not in command.said("err")
    if "--json" in line:
        documents = command.said("out").splitlines() if "--count" in line else [command.said("out")]
        assert all(json.loads(document) for document in documents)
    if expected.after is not None:
        expected.after(scene, command)


def plain(arguments: list[str]) -> list[str]:
    """Arguments of Compose without those that differ between users and the test, and without its files."""
    while "-f" in arguments:
        at = arguments.index("-f")
        arguments = arguments[:at] + arguments[at + 2 :]
    words = [re.sub(r"=\d+$", "=N", {"-d": "--detach"}.get(word, word)) for word in arguments]
    return [word for word in words if word not in ("-T", "--no-build")]


def test_each_compose_line_is_run_by_the_compose_test() -> None:
    """`make compose-test` takes too long for the suite; this compares its commands with the pages."""
    test = ast.parse((ROOT / "tests" / "compose" / "check_compose.py").read_text("utf-8"))
    calls = [
        plain([word.value for word in node.args if isinstance(word, ast.Constant)])
        for node in ast.walk(test)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "compose"
    ]
    lines = {line for page in (ROOT / "README.md", *PAGES) for line in lines_of_blocks(page)}
    lines |= {span for page in PAGES for span in re.findall(r"`(docker compose [^`]+)`", page.read_text())}
    shown = [plain(shlex.split(line)[2:]) for line in sorted(lines) if line.startswith("docker compose ")]
    assert ["exec", "rounds", "nekro", "doctor"] in shown
    files = {name for line in lines for name in re.findall(r"-f (compose\S*\.yaml)", line)}
    assert {name for name in files if name not in ast.unparse(test)} == set()
    untested = [
        line for line in shown if not any(call[:1] == line[:1] and set(line) <= set(call) for call in calls)
    ]
    assert untested == []


def test_documented_options_of_benchmarks_exist() -> None:
    parsers: dict[str, Callable[[list[str]], object]] = {
        "catalogue": catalogue.parse,
        "code_or_tools": code_or_tools.parse,
        "console_load": console_load.parse,
        "rpc": rpc.parse_options,
        "scale": scale.parse,
        "downloads": downloads.parse,
        "evaluation": parse_evaluation,
        "fleets": fleets.parse,
        "floods": floods.parse,
        "follow_up": follow_up.parse,
        "goals": goals.parse,
        "heavy_arguments": heavy_arguments.parse,
        "kv_costs": kv_costs.parse,
        "many_files": many_files.parse,
        "partitions": partitions.parse,
        "pooled_calls": pooled_calls.parse,
        "profiles": profiles.parse,
        "redis_exchanges": redis_exchanges.parse,
        "sandbox": sandbox.parse,
        "turns": turns.parse,
        "waiting_calls": waiting_calls.parse,
        "walks": walks.parse,
    }
    chores = {
        "bench": "rpc",
        "eval": "evaluation",
        "goals": "goals",
        "profile": "profiles",
        "scale": "scale",
        "turns": "turns",
    }
    for chore, module in chores.items():
        assert f"-m benchmarks.{module} $({chore.upper()}_ARGS)" in (ROOT / "Makefile").read_text()
    text = "\n".join(page.read_text("utf-8") for page in PAGES)
    by_chore = re.findall(r"make (\w+) [A-Z]+_ARGS=(?:'([^']*)'|([^\s']+))", text)
    options_by_module = [(chores[chore], quoted or bare) for chore, quoted, bare in by_chore]
    options_by_module += re.findall(r"python -m benchmarks\.(\w+)(?: ([^`\n]+))?`", text)
    scaling = (ROOT / "docs" / "scaling.md").read_text("utf-8")
    options_by_module += [("scale", option) for option in re.findall(r"`(--[a-z-]+(?: [A-Z]+)?)`", scaling)]
    assert {module for module, _ in options_by_module} == set(parsers)
    for module, options in options_by_module:
        parsers[module](shlex.split(options))
