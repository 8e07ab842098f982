"""Measure what open pages of the console cost a gateway under calls: ``python -m benchmarks.console_load``.

One gateway, a methods worker and a rounds worker on SQLite. Turns in some of the chats run code that makes
calls at a fixed rate, each with its events; without readers and with one reader per chat in turn. A reader
opens what the console's page of a chat opens: the stream of its events. With ``--changes`` it opens what the
pages of lists share: the stream of changes over all chats and the fleet. The code measures each call, from
the time at which it is due to its result, so a call that starts late counts as slow. All share the machine.
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
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Final

import httpx
import uvloop
import yaml

from benchmarks.harness.figures import percentile
from benchmarks.harness.limited import limited_command
from benchmarks.harness.machine import describe_machine
from benchmarks.harness.processes import Child, cpu_seconds, free_port, interrupted_by_sigterm, local_headers
from benchmarks.harness.redis_server import redis_server
from nekro_client.sse import EventParser

__all__ = ["main", "parse"]

_PLUGINS: Final = Path(__file__).parent / "plugins"
_METHOD: Final = "bench.wait.wait"
#: What the code prints: each call's milliseconds, and the seconds of all.
_FIGURES: Final = re.compile(r"figures: (.*)")
_CODE: Final = """
import json, time
began, taken = time.perf_counter(), []
for number in range({calls}):
    due = began + number / {rate}
    time.sleep(max(0, due - time.perf_counter()))
    wait(0)
    taken.append(round((time.perf_counter() - due) * 1000, 2))
print("figures:", json.dumps([taken, time.perf_counter() - began]))
"""
_START_SECONDS: Final = 90.0
_API: Final = "/api/v1"
#: Longest time that the gateway lets a request wait for its turn.
_WAIT_SECONDS: Final = 60


@dataclass(frozen=True, kw_only=True)
class Turn:
    """The figures of one turn of calls."""

    readers: int
    calls_per_second: float
    p50_ms: float
    p99_ms: float
    #: Processor time of the gateway per call.
    gateway_cpu_ms: float
    #: Share of one core that the gateway used.
    gateway_cpu_share: float
    #: Events that all readers received.
    events: int


class _Readers:
    """Open pages: one stream per chat, or as many of the changes."""

    def __init__(self, *, of_changes: bool) -> None:
        self.events = 0
        self._of_changes = of_changes
        self._opened = asyncio.Semaphore(0)

    @asynccontextmanager
    async def open(self, http: httpx.AsyncClient, chats: Sequence[str]) -> AsyncIterator[None]:
        """Have a reader on each chat; all streams are open when the block begins."""
        tasks = [asyncio.create_task(self._read(http, chat)) for chat in chats]
        try:
            for _ in chats:
                opened = asyncio.create_task(self._opened.acquire())
                await asyncio.wait([opened, *tasks], return_when=asyncio.FIRST_COMPLETED)
                if not opened.done():
                    raise SystemExit("a stream of events ended")
            yield
            if any(task.done() for task in tasks):
                raise SystemExit("a stream of events ended")
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self, http: httpx.AsyncClient, chat: str) -> None:
        path = "changes" if self._of_changes else f"chats/{chat}/events"
        async with http.stream("GET", f"{_API}/{path}", timeout=None) as response:
            response.raise_for_status()
            self._opened.release()
            parser = EventParser()
            async for piece in response.aiter_bytes():
                self.events += sum(1 for _ in parser.feed(piece))


async def _run(http: httpx.AsyncClient, chat: str) -> tuple[list[float], float]:
    """Run the code in a chat; returns the milliseconds of its calls and the seconds of all."""
    body = {"text": "go", "user_id": "ada"}
    answer = await http.post(f"{_API}/chats/{chat}/messages", params={"wait": _WAIT_SECONDS}, json=body)
    turn = answer.raise_for_status().json().get("turn") or {}
    outputs = "\n".join(one["output"] or "" for one in turn.get("rounds", ()))
    found = _FIGURES.search(outputs)
    if found is None:
        raise SystemExit(f"the turn has no figures: {answer.text[:2000]}")
    taken, seconds = json.loads(found[1])
    return taken, seconds


async def _turn(url: str, pid: int, options: argparse.Namespace, *, is_read: bool) -> Turn:
    chats = [f"bench-{number}" for number in range(options.readers)]
    readers = _Readers(of_changes=options.changes)
    limits = httpx.Limits(max_connections=None)
    async with (
        httpx.AsyncClient(base_url=url, headers=_headers(), timeout=2 * _WAIT_SECONDS, limits=limits) as http,
        readers.open(http, chats if is_read else []),
    ):
        before, began = cpu_seconds(pid), time.perf_counter()
        runs = await asyncio.gather(*(_run(http, chat) for chat in chats[: options.turns]))
        taken, used = time.perf_counter() - began, cpu_seconds(pid) - before
    milliseconds = [one for run, _ in runs for one in run]
    calls = len(milliseconds)
    return Turn(
        readers=len(chats) if is_read else 0,
        calls_per_second=round(sum(len(run) / seconds for run, seconds in runs), 1),
        p50_ms=round(percentile(milliseconds, 50), 2),
        p99_ms=round(percentile(milliseconds, 99), 2),
        gateway_cpu_ms=round(used / calls * 1e3, 3),
        gateway_cpu_share=round(used / taken, 3),
        events=readers.events,
    )


def _script(directory: Path, options: argparse.Namespace) -> Path:
    """Write the answer of the model."""
    rate = options.per_second / options.turns
    code = _CODE.format(calls=round(rate * options.seconds), rate=rate)
    path = directory / "script.yaml"
    path.write_text(yaml.safe_dump([{"when": ".", "answer": f"```python{code}```"}]), "utf-8")
    return path


@contextmanager
def _system(directory: Path) -> Iterator[tuple[str, int]]:
    """Start workers and a gateway; yields the gateway's URL and process id."""
    nekro, port = str(Path(sys.executable).with_name("nekro")), free_port()
    commands = {
        "methods": [nekro, "worker", "--lane", "methods"],
        "rounds": [*limited_command({"sandbox": {"max_calls": 1_000_000}}), "worker", "--lane", "rounds"],
        "gateway": [nekro, "gateway", "--port", str(port)],
    }
    children = [Child(command, log=directory / f"{name}.log") for name, command in commands.items()]
    try:
        url = f"http://127.0.0.1:{port}"
        _await_ready(f"{url}{_API}/methods", children)
        yield url, children[-1].pid
    finally:
        for child in reversed(children):
            child.stop()


def _headers() -> dict[str, str]:
    return local_headers(Path(os.environ["NEKRO_DATA_DIR"]))


def _await_ready(url: str, children: list[Child]) -> None:
    end = time.monotonic() + _START_SECONDS
    while time.monotonic() < end:
        ended = [child for child in children if child.ended() is not None]
        if ended:
            raise SystemExit(f"{ended[0].log.stem} ended:\n{ended[0].last_words()}")
        try:
            answer = httpx.get(url, headers=_headers())
        except httpx.TransportError:
            answer = None
        if answer is not None and answer.is_success and _METHOD in answer.text:
            return
        time.sleep(0.1)
    raise SystemExit(f"{url} does not answer")


def _report(turns: list[Turn]) -> None:
    """Print each turn, then the ratios of each pair: the median, the least and the greatest."""
    for turn in turns:
        print("  ".join(f"{name} {value}" for name, value in asdict(turn).items()))
    alone = [turn for turn in turns if not turn.readers]
    read = [turn for turn in turns if turn.readers]
    for name in ("gateway_cpu_ms", "gateway_cpu_share", "calls_per_second", "p50_ms", "p99_ms"):
        found = [getattr(two, name) / getattr(one, name) for one, two in zip(alone, read, strict=True)]
        print(f"{name}, with / without readers: {median(found):.2f} ({min(found):.2f} to {max(found):.2f})")


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line; ends the process with code 2 when it is wrong."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.console_load", description=__doc__)
    parser.add_argument("--readers", type=int, default=50, help="chats, each with a page (default: 50)")
    parser.add_argument("--changes", action="store_true", help="pages of lists instead of chats")
    parser.add_argument("--turns", type=int, default=10, help="chats whose code makes calls (default: 10)")
    parser.add_argument("--per-second", type=float, default=300, help="calls of all turns (default: 300)")
    parser.add_argument("--seconds", type=float, default=10, help="of each run (default: 10)")
    parser.add_argument("--repetitions", type=int, default=3, help="pairs of turns (default: 3)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to FILE")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    from benchmarks.gateway import prepare

    interrupted_by_sigterm()
    options = parse(argv)
    with tempfile.TemporaryDirectory(prefix="nekro-bench-") as name, redis_server(Path(name)) as server:
        print(describe_machine(server.version), file=sys.stderr)
        os.environ |= {
            "NEKRO_BROKER__URL": server.url,
            "NEKRO_DATA_DIR": str(Path(name) / "data"),
            "NEKRO_PLUGINS__DIRS": str(_PLUGINS),
            "NEKRO_LOG__LEVEL": "WARNING",
            "NEKRO_LLM__SCRIPT": str(_script(Path(name), options)),
            "NEKRO_AGENT__DEBOUNCE_SECONDS": "0",
            "NEKRO_WORKERS__ROUNDS_CONCURRENCY": str(options.turns),
            "NEKRO_SANDBOX__MAX_CONCURRENT": str(options.turns),
            "NEKRO_GATEWAY__REQUESTS_PER_MINUTE": "0",
        }
        prepare()
        turns = []
        with _system(Path(name)) as (url, pid):
            uvloop.run(_turn(url, pid, options, is_read=False))  # makes the chats and warms all processes
            for number in range(options.repetitions):
                # In turns, so that a drift of the machine favours neither.
                for is_read in (False, True) if number % 2 == 0 else (True, False):
                    turns.append(uvloop.run(_turn(url, pid, options, is_read=is_read)))
    _report(turns)
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(turn) for turn in turns]) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
