"""Count what runs between two moments of a system: ``python -m benchmarks.walks``.

Three walks, on one gateway, one rounds worker, one methods worker, Redis and SQLite, each repeated by one
chat:

- TOOL: code in a sandbox calls a method, until it has the value.
- AGENT: a method returns an AGENT result, until the next request arrives at the model.
- POST: a client posts a message, until it reads the answer of the agent from the chat's event stream.

Each process reports every ``call`` event of ``sys.setprofile`` on all of its threads, and every statement
that SQLite begins to run, with the time; both clocks are that of the host. An event counts for a walk if it
happened between the walk's two moments. The first walks warm up and are not counted.

Rule of counting:

- A function is one of the product's code (no test, no benchmark), named (no comprehension, no lambda), and
  ran in at least ``_SHARE`` of the walks, so work in the background does not count. However often it runs,
  it is one.
- A module is a file with such a function.
- A function is on the way if it was on the stack when something was handed over: bytes to a socket or pipe,
  work to another thread, a result to a future, a task to the event loop, a call to a plugin. So helpers,
  checks and converters, which return to their caller before that, are not on the way. Frames below those of
  the event loop or the thread are not part of the stack, and stacks that are seen in the idle system as well
  do not count. A function is on the way once, in however many processes. The functions of one class, and
  those of a module outside of classes, are one stop.
- Calls are all ``call`` events of these functions; a coroutine has one more each time it continues. The
  median.
- A statement is SQL other than BEGIN, COMMIT, ROLLBACK and PRAGMA. The median.
- A commit ends a transaction that was begun for writing, or is one writing statement outside of one. The
  median.

What runs inside the sandbox, and Redis' own work, are not counted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median
from typing import Any, Final

import httpx

from benchmarks.follow_up import StampingModel, _streamed
from benchmarks.harness.processes import Child, free_port, interrupted_by_sigterm, local_headers
from benchmarks.harness.redis_server import redis_server
from nekro_client.sse import EventParser

__all__ = ["main", "parse"]

_ROOT: Final = Path(__file__).resolve().parent.parent
_PLUGINS: Final = Path(__file__).parent / "plugins"
_CHAT: Final = "/api/v1/chats/walks"
#: Walks at the beginning that are not counted.
_WARM_UP: Final = 8
#: Follow-up rounds of a turn: the default maximum.
_ROUNDS: Final = 7
#: Share of the walks in which a function must run.
_SHARE: Final = 0.8
_START_SECONDS: Final = 180.0
_WALK_SECONDS: Final = 120.0
#: After the last walk: until its turn has ended, then while nothing walks.
_SETTLE_SECONDS: Final = 5.0
_IDLE_SECONDS: Final = 12.0
_RETURNED: Final = re.compile(r"returned (\d+\.\d+)")
_TOOL_CODE: Final = """
import json, time
moments = []
for _ in range({count}):
    began = time.time()
    wait(0)
    moments.append((began, time.time()))
send_msg_text(_ck, "moments " + json.dumps(moments))
"""
#: Imported by each process at its start. One write per event: processes fork, and are killed.
_SITE: Final = """
import asyncio, mmap, os, sqlite3, sys, threading, time
import uvloop
# Its transports are in Cython, and the interpreter reports no calls of Cython code.
uvloop.new_event_loop = asyncio.new_event_loop
# 1 when the system has started.
switch = mmap.mmap(os.open(os.environ["WALKS_SWITCH"], os.O_RDWR), 1)
out = os.open(os.environ["WALKS_FILE"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
root = os.environ["WALKS_ROOT"] + "/"
plugins = root + "benchmarks/plugins/"
others = tuple(root + name for name in ("tests/", "benchmarks/", ".venv/"))
known = {}
# What hands something over, in Python and in C; the second ones have these names for other objects too.
given = {"create_task", "call_soon_threadsafe", "run_in_executor"}
given_in_c = given | {
    "put", "switch", "set_result", "write", "writelines", "send", "sendall", "sendmsg", "sendto",
}
not_given = ("generator.", "coroutine.", "async_generator", "StringIO.", "BytesIO.", "Text", "Buffered")
# Below them are the event loop and the thread.
bottoms = (
    "/asyncio/events.py", "/asyncio/runners.py", "/threading.py", "/celery/worker/loops.py",
    "/nekro/base/loop_thread.py",
)

def name_of(code):
    path = code.co_filename
    is_ours = path.startswith(root) and not path.startswith(others) and not code.co_name.startswith("<")
    return f"{path[len(root):]}:{code.co_firstlineno}:{code.co_qualname}" if is_ours else None

def report(kind, name):
    os.write(out, f"{time.time():.6f} {os.getpid()} {kind} {name}\\n".encode())

def named(code):
    if code not in known:
        known[code] = name_of(code)
    return known[code]

def stack(frame):
    found = []
    while frame is not None and not frame.f_code.co_filename.endswith(bottoms):
        name = named(frame.f_code)
        if name is not None:
            found.append(name)
        frame = frame.f_back
    if found:
        report("way", "|".join(found))

def profile(frame, event, arg):
    if not switch[0]:
        return
    code = frame.f_code
    if event == "call":
        name = named(code)
        if name is not None:
            report("call", name)
        elif code.co_name in given or code.co_filename.startswith(plugins):
            stack(frame)
    elif event == "c_call" and arg.__name__ in given_in_c and not arg.__qualname__.startswith(not_given):
        stack(frame)

connect = sqlite3.connect

def traced(*given, **named):
    connection = connect(*given, **named)
    key = id(connection)
    connection.set_trace_callback(lambda sql: report("sql", f"{key} {' '.join(sql[:300].split())}"))
    return connection

sqlite3.connect = traced
threading.setprofile(profile)
sys.setprofile(profile)
"""


class Model(StampingModel):
    """Answers with the code of the walk that runs; records the time from each AGENT result to its request."""

    def __init__(self) -> None:
        super().__init__(_ROUNDS)
        self.code = ""
        self.windows: list[tuple[float, float]] = []

    def _answer(self, prompt: str, arrived: float) -> bytes:
        if self.code:
            return _streamed(f"```python\n{self.code}\n```")
        if self._left < self._rounds:
            self.windows.append((max(float(stamp) for stamp in _RETURNED.findall(prompt)), arrived))
        return super()._answer(prompt, 0.0)


class System:
    """The processes, a client of the gateway, and its stream of the chat's events."""

    def __init__(self, http: httpx.AsyncClient, chunks: AsyncIterator[bytes], model: Model) -> None:
        self._http = http
        self._chunks = chunks
        self._parser = EventParser()
        self.model = model

    async def post(self) -> tuple[float, float, str]:
        """Post a message and read the agent's answer; returns both moments and its text."""
        async with asyncio.timeout(_WALK_SECONDS):
            began = time.time()
            posting = asyncio.create_task(
                self._http.post(f"{_CHAT}/messages", json={"text": "walk", "user_id": "ada"})
            )
            while True:
                for event in self._parser.feed(await anext(self._chunks)):
                    if (text := _text_of_agent(event.type, event.data)) is not None:
                        ended = time.time()
                        (await posting).raise_for_status()
                        return began, ended, text

    async def post_walks(self, count: int) -> list[tuple[float, float]]:
        """Return the moments of walks of a posted message."""
        self.model.code = 'send_msg_text(_ck, "walked")'
        return [(await self.post())[:2] for _ in range(count + _WARM_UP)][_WARM_UP:]

    async def tool_walks(self, count: int) -> list[tuple[float, float]]:
        """Return the moments of calls of a TOOL method."""
        self.model.code = _TOOL_CODE.format(count=count + _WARM_UP)
        _, _, text = await self.post()
        return [tuple(pair) for pair in json.loads(text.removeprefix("moments "))][_WARM_UP:]

    async def agent_walks(self, count: int) -> list[tuple[float, float]]:
        """Return the moments of follow-up rounds."""
        self.model.code = ""
        while len(self.model.windows) < count + _WARM_UP:
            async with asyncio.timeout(_WALK_SECONDS):
                sent = await self._http.post(f"{_CHAT}/messages", json={"text": "walk", "user_id": "ada"})
                sent.raise_for_status()
                await self.model.turn_is_over.wait()
            self.model.turn_is_over.clear()
            await asyncio.sleep(1)  # the turn ends
        return self.model.windows[_WARM_UP : count + _WARM_UP]


def _text_of_agent(kind: str, data: str) -> str | None:
    """Return the text of an event that is a message of the agent; None for other events."""
    if not kind.startswith("message"):
        return None
    content = json.loads(data)
    content = content.get("data", content)
    content = content.get("message", content)
    text = content.get("text") or ""
    return text if text.startswith(("walked", "moments ")) else None


@asynccontextmanager
async def _system(directory: Path) -> AsyncIterator[System]:
    with redis_server(directory) as server:
        model, port = Model(), free_port()
        (directory / "site").mkdir()
        (directory / "switch").write_bytes(b"\0")
        (directory / "site" / "sitecustomize.py").write_text(_SITE, "utf-8")
        os.environ |= {
            "NEKRO_BROKER__URL": server.url,
            "NEKRO_DATA_DIR": str(directory / "data"),
            "NEKRO_PLUGINS__DIRS": str(_PLUGINS),
            "NEKRO_LOG__LEVEL": "WARNING",
            "NEKRO_LLM__BASE_URL": await model.start(),
            "NEKRO_LLM__API_KEY": "none",
            "NEKRO_LLM__MODEL": "bench",
            "WALKS_FILE": str(directory / "events"),
            "WALKS_ROOT": str(_ROOT),
            "WALKS_SWITCH": str(directory / "switch"),
        }
        nekro = str(Path(sys.executable).with_name("nekro"))
        upgrade = await asyncio.create_subprocess_exec(nekro, "db", "upgrade", stdout=sys.stderr)
        await upgrade.wait()
        environment = os.environ | {"PYTHONPATH": str(directory / "site")}
        commands = (
            ("gateway", "--port", str(port)),
            ("worker", "--lane", "methods"),
            ("worker", "--lane", "rounds"),
        )
        children = [
            Child([nekro, *words], log=directory / f"{words[-1]}.log", environment=environment)
            for words in commands
        ]
        try:
            url = f"http://127.0.0.1:{port}"
            async with httpx.AsyncClient(base_url=url, timeout=60) as http:
                await _ready(http, directory, children)
                with (directory / "switch").open("r+b") as switch:
                    switch.write(b"\1")
                http.headers.update(local_headers(directory / "data"))
                async with http.stream("GET", f"{_CHAT}/events", timeout=None) as response:
                    yield System(http, response.aiter_bytes(), model)
        finally:
            await model.stop()
            for child in reversed(children):
                child.stop()


async def _ready(http: httpx.AsyncClient, directory: Path, children: Sequence[Child]) -> None:
    end = time.monotonic() + _START_SECONDS
    while time.monotonic() < end:
        for child in children:
            if child.ended() is not None:
                raise SystemExit(child.last_words())
        try:
            answer = await http.get("/api/v1/methods", headers=local_headers(directory / "data"))
            if answer.is_success and "bench.stamp.stamp" in answer.text:
                return
        except httpx.TransportError:
            pass
        await asyncio.sleep(0.2)
    raise SystemExit("the gateway does not answer, or lacks the methods")


def counted(
    events: Path, windows: Sequence[tuple[float, float]], idle: tuple[float, float]
) -> dict[str, Any]:
    """Count the events of a walk; see the rule of counting."""
    calls: list[Counter[str]] = [Counter() for _ in windows]
    ways: list[set[str]] = [set() for _ in windows]
    statements: list[list[str]] = [[] for _ in windows]
    commits = [0] * len(windows)
    open_: dict[str, bool] = defaultdict(bool)
    writing: dict[str, bool] = defaultdict(bool)
    lines = sorted(line.split(" ", 3) for line in events.read_text("utf-8").strip().split("\n"))
    background = {name for at, _, kind, name in lines if kind == "way" and idle[0] <= float(at) <= idle[1]}
    walk = 0
    for moment, pid, kind, name in lines:
        at = float(moment)
        while walk < len(windows) and windows[walk][1] < at:
            walk += 1
        inside = walk < len(windows) and windows[walk][0] <= at
        if kind == "call":
            if inside:
                calls[walk][f"{pid} {name}"] += 1
            continue
        if kind == "way":
            if inside and name not in background:
                ways[walk].update(name.split("|"))
            continue
        key, _, words = name.partition(" ")
        key, words = f"{pid} {key}", words.upper()
        is_commit = words.startswith("COMMIT") and writing[key]
        if words.startswith("BEGIN"):
            open_[key], writing[key] = True, "IMMEDIATE" in words
        elif words.startswith(("COMMIT", "ROLLBACK")):
            open_[key] = writing[key] = False
        elif not words.startswith(("PRAGMA", "--")):
            is_commit = not open_[key] and words.startswith(("INSERT", "UPDATE", "DELETE"))
            if inside:
                statements[walk].append(f"{pid} {words.lower()}")
        if is_commit and inside:
            commits[walk] += 1
    functions, way = _usual(calls), _usual(ways)
    processes = Counter(name.split(" ")[0] for name in functions)
    return {
        "walks": len(windows),
        "functions": len(functions),
        "modules": len({name.split(" ")[1].split(":")[0] for name in functions}),
        "on the way": len(way),
        "stops": len({_stop(name) for name in way}),
        "modules on the way": len({name.split(":")[0] for name in way}),
        "by process": sorted(processes.values(), reverse=True),
        "calls": median(sum(times for name, times in one.items() if name in functions) for one in calls),
        "statements": median(map(len, statements)),
        "commits": median(commits),
        "names": sorted(functions),
        "way": sorted(way),
        "sql": statements[-1],
    }


def _usual(walks: Sequence[Iterable[str]]) -> set[str]:
    """Return the functions of most walks."""
    ran = Counter(name for one in walks for name in one)
    return {name for name, times in ran.items() if times >= _SHARE * len(walks)}


def _stop(name: str) -> tuple[str, str]:
    """Return the module and the class of a function; "" for one outside of classes."""
    path, _, function = name.split(":")
    return path, function.partition(".<locals>")[0].rpartition(".")[0]


async def measure(walks: Sequence[str], count: int) -> dict[str, dict[str, Any]]:
    """Walk and count."""
    with tempfile.TemporaryDirectory(prefix="nekro-walks-") as name:
        directory, moments = Path(name), {}
        async with _system(directory) as system:
            await system.post_walks(0)
            for walk in walks:
                moments[walk] = await getattr(system, f"{walk}_walks")(count)
            await asyncio.sleep(_SETTLE_SECONDS)
            since = time.time()
            await asyncio.sleep(_IDLE_SECONDS)
            idle = since, time.time()
        return {walk: counted(directory / "events", windows, idle) for walk, windows in moments.items()}


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line; ends the process with code 2 when it is wrong."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.walks", description=__doc__.split("\n")[0])
    names = ("tool", "agent", "post")
    parser.add_argument("walks", nargs="*", default=names, help="tool, agent, post (default: all)")
    parser.add_argument("--count", type=int, default=30, help="walks of each kind (default: 30)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures and names to FILE")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    interrupted_by_sigterm()
    options = parse(argv)
    found = asyncio.run(measure(options.walks, options.count))
    for walk, figures in found.items():
        print(
            f"{walk}: "
            + ", ".join(
                f"{key} {value}" for key, value in figures.items() if key not in ("names", "way", "sql")
            )
        )
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
