"""Measure the time from an AGENT result to the next LLM request: ``python -m benchmarks.follow_up``.

One chat, one methods worker, one rounds worker, Redis and SQLite (or ``--database-url``). The LLM is an HTTP
server of this process that answers at once with code that calls an AGENT method. The method's text contains
the time of its return, and the server compares it with the arrival of the first byte of the next request,
by the same clock.
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
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from benchmarks.harness.figures import percentile
from benchmarks.harness.machine import describe_machine
from benchmarks.harness.processes import Child, interrupted_by_sigterm
from benchmarks.harness.redis_server import redis_server
from benchmarks.harness.yardstick import describe_beside, taskiq_seconds

__all__ = ["Running", "main", "parse", "running"]

_NEKRO: Final = str(Path(sys.executable).with_name("nekro"))
_PLUGINS: Final = Path(__file__).parent / "plugins"
_CHAT: Final = "bench_chat"
_RETURNED: Final = re.compile(r"returned (\d+\.\d+)")
#: Follow-up rounds of a turn: the default maximum.
_ROUNDS: Final = 7
_TURN_SECONDS: Final = 60


class StampingModel:
    """A minimal OpenAI chat server with persistent connections that records the time to each request."""

    def __init__(self, rounds: int) -> None:
        self.seconds: list[float] = []
        self.turn_is_over = asyncio.Event()
        self._rounds = rounds
        self._left = rounds
        self._server: asyncio.Server | None = None
        self._open: dict[asyncio.Task[None] | None, asyncio.StreamWriter] = {}

    async def start(self) -> str:
        """Listen; returns the base URL."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/v1"

    async def stop(self) -> None:
        """Accept no more connections, and close those that are open."""
        if self._server is not None:
            self._server.close()
        for writer in self._open.values():
            writer.close()
        await asyncio.gather(*filter(None, self._open))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        self._open[task] = writer
        try:
            while True:
                first = await reader.readexactly(1)
                arrived = time.time()
                head = (first + await reader.readuntil(b"\r\n\r\n")).decode().lower()
                found = re.search(r"content-length: (\d+)", head)
                body = json.loads(await reader.readexactly(int(found[1]) if found else 0))
                writer.write(self._answer(json.dumps(body["messages"]), arrived))
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            del self._open[task]
            writer.close()

    def _answer(self, prompt: str, arrived: float) -> bytes:
        if self._left < self._rounds:
            self.seconds.append(arrived - max(float(stamp) for stamp in _RETURNED.findall(prompt)))
        code = "```python\nstamp()\n```"
        if self._left:
            self._left -= 1
        else:
            code = "```python\nprint('over')\n```"
            self._left = self._rounds
            self.turn_is_over.set()
        return _streamed(code)


def _streamed(text: str) -> bytes:
    common = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "bench"}
    pieces: tuple[dict[str, object], ...] = (
        {"index": 0, "delta": {"role": "assistant", "content": text}, "finish_reason": None},
        {"index": 0, "delta": {}, "finish_reason": "stop"},
    )
    events = (*(json.dumps({**common, "choices": [piece]}) for piece in pieces), "[DONE]")
    body = "".join(f"data: {event}\n\n" for event in events).encode()
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: %d\r\n\r\n"
    return head % len(body) + body


class Running:
    """A methods and a rounds worker, whose model gives each turn ``_ROUNDS`` follow-up rounds."""

    def __init__(self, model: StampingModel, workers: Mapping[str, Child]) -> None:
        self.model = model
        #: By lane.
        self.workers = workers

    async def turn(self) -> None:
        """Send a message and wait for the end of its turn.

        Raises:
            SystemExit: it takes too long; the message ends with the last output of the workers.
        """
        await _finish(_NEKRO, "send", _CHAT, "begin", "--user-id", "bench")
        try:
            await asyncio.wait_for(self.model.turn_is_over.wait(), _TURN_SECONDS)
        except TimeoutError as exc:
            words = "\n".join(worker.last_words() for worker in self.workers.values())
            raise SystemExit(f"only {len(self.model.seconds)} rounds ran:\n{words}") from exc
        self.model.turn_is_over.clear()


@asynccontextmanager
async def running(directory: Path, redis_url: str, database_url: str | None = None) -> AsyncIterator[Running]:
    """Run the workers with data in ``directory``; the environment of this process names their settings."""
    model = StampingModel(_ROUNDS)
    os.environ |= {
        "NEKRO_BROKER__URL": redis_url,
        "NEKRO_DATA_DIR": str(directory / "data"),
        "NEKRO_PLUGINS__DIRS": str(_PLUGINS),
        "NEKRO_LOG__LEVEL": "WARNING",
        "NEKRO_LLM__BASE_URL": await model.start(),
        "NEKRO_LLM__API_KEY": "none",
        "NEKRO_LLM__MODEL": "bench",
    }
    if database_url is not None:
        os.environ["NEKRO_DATABASE__URL"] = database_url
    await _finish(_NEKRO, "db", "upgrade")
    workers = {
        lane: Child([_NEKRO, "worker", "--lane", lane], log=directory / f"{lane}.log")
        for lane in ("methods", "rounds")
    }
    try:
        yield Running(model, workers)
    finally:
        await model.stop()
        for worker in workers.values():
            worker.stop()


async def measure(turns: int, database_url: str | None) -> list[float]:
    """Run turns of ``_ROUNDS`` follow-up rounds in a chat; returns the seconds of each round."""
    with tempfile.TemporaryDirectory(prefix="nekro-bench-") as name, redis_server(Path(name)) as server:
        async with running(Path(name), server.url, database_url) as system:
            for _ in range(turns):
                await system.turn()
        print(describe_machine(server.version), file=sys.stderr)
        return system.model.seconds


async def _finish(*command: str) -> None:
    process = await asyncio.create_subprocess_exec(*command, stdout=sys.stderr)
    if await process.wait():
        raise SystemExit(f"{' '.join(command)} ended with exit code {process.returncode}")


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line; ends the process with code 2 when it is wrong."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.follow_up", description=__doc__)
    parser.add_argument("--turns", type=int, default=30, help="turns of 7 follow-up rounds (default: 30)")
    parser.add_argument("--database-url", help="instead of SQLite, for example postgresql://host/scratch")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to FILE")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    interrupted_by_sigterm()
    options = parse(argv)
    before = taskiq_seconds()
    # The first two turns warm up.
    seconds = asyncio.run(measure(options.turns + 2, options.database_url))[2 * _ROUNDS :]
    p50, p95, p99 = (percentile(seconds, percent) * 1e3 for percent in (50, 95, 99))
    print(f"{len(seconds)} follow-up rounds: p50 {p50:.2f} ms, p95 {p95:.2f} ms, p99 {p99:.2f} ms")
    after = taskiq_seconds()
    print(f"p50: {describe_beside(p50 / 1e3, before, after)}")
    if options.json is not None:
        found = {"seconds": seconds, "taskiq_seconds": [before, after]}
        options.json.write_text(json.dumps(found) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
