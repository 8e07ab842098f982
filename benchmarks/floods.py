"""Measure what a flood of one owner costs another one: ``python -m benchmarks.floods rounds|calls``.

``rounds``: one rounds worker, Redis and SQLite (or ``--database-url``), a model that answers after a fixed
time. One key posts messages to many chats, or one chat gets them all; another chat posts one message after
the other, first alone and then beside the flood. ``calls``: one methods worker. One chat, or a hundred chats
that call one plugin, have thousands of calls waiting, and another chat makes one call of another plugin after
the other.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from benchmarks.harness.figures import percentile
from benchmarks.harness.limited import limit, limited_command
from benchmarks.harness.machine import describe_machine
from benchmarks.harness.processes import Child, cpu_seconds, interrupted_by_sigterm
from benchmarks.harness.redis_server import redis_server
from benchmarks.harness.served import call_served, served

if TYPE_CHECKING:
    from nekro.app.services import Services

__all__ = ["main", "parse"]

_PLUGINS: Final = Path(__file__).parent / "plugins"
_NAME: Final = re.compile(r"(?:flood|probe)-\d+")
_WAIT_SECONDS: Final = 600
_KEY: Final = "greedy"
#: How the calls of a flood are sent.
_AT_ONCE, _STEP_SECONDS = 100, 0.2


class SlowModel:
    """A minimal OpenAI chat server that answers after a fixed time, and notes when each message arrived."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.answered: dict[str, asyncio.Future[float]] = {}
        #: Names of the newest messages of the prompts, in the order of the requests.
        self.asked: list[str] = []

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator[str]:
        """Listen in this block; gives the base URL."""
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        try:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
        finally:
            server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ended = (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError)
        with contextlib.suppress(*ended), contextlib.closing(writer):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                found = re.search(r"content-length: (\d+)", head)
                prompt = (await reader.readexactly(int(found[1]) if found else 0)).decode()
                name = _NAME.findall(prompt)[-1]
                self.asked.append(name)
                await asyncio.sleep(self._seconds)
                writer.write(_ANSWER)
                await writer.drain()
                future = self.answered.get(name)
                if future is not None and not future.done():
                    future.set_result(time.perf_counter())


def _answer(text: str) -> bytes:
    message = {"role": "assistant", "content": text}
    body = json.dumps(
        {
            "id": "c",
            "object": "chat.completion",
            "created": 1,
            "model": "bench",
            "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
        }
    ).encode()
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    return head % len(body) + body


_ANSWER: Final = _answer("done")


async def _rounds(options: argparse.Namespace, directory: Path) -> dict[str, list[float]]:
    model = SlowModel(options.seconds)
    async with model.listening() as url:
        os.environ |= {
            "NEKRO_LLM__BASE_URL": url,
            "NEKRO_LLM__API_KEY": "none",
            "NEKRO_LLM__MODEL": "bench",
            "NEKRO_LLM__STREAM": "false",
            "NEKRO_WORKERS__ROUNDS_CONCURRENCY": str(options.slots),
        }
        worker = _Worker({}, "rounds", directory)
        async with _system(worker, wait_for=None) as services:
            await _add_key(services)

            async def post(chat_key: str, text: str, key_id: str | None = None) -> None:
                from nekro_agent.ports import IncomingMessage

                message = IncomingMessage(chat_key=chat_key, text=text, user_id="u", user_name="u")
                await services.intake.accept(message, key_id=key_id)

            async def probe(number: int) -> float:
                name = f"probe-{number}"
                model.answered[name] = asyncio.get_running_loop().create_future()
                began = time.perf_counter()
                await post("probe", name)
                return await asyncio.wait_for(model.answered[name], _WAIT_SECONDS) - began

            async def flood() -> None:
                worker.stop()  # so that all of them wait
                for number in range(options.flood):
                    if options.owner == "key":
                        await post(f"flood{number}", f"flood-{number}", _KEY)
                    else:
                        await post("flood", f"flood-{number}")
                worker.start()
                await probe(1 + 2 * options.probes)  # warms up

            found = await _beside(options, probe, flood)
            asked = sum(name.startswith("flood") for name in model.asked)
            cpu = 1e3 * worker.cpu_seconds() / max(1, asked + options.probes)
            print(f"{asked} rounds of the flood had been asked for when the last probe was answered")
            print(f"CPU of the worker, its start included: {cpu:.0f} ms for each round since the flood")
            return found


async def _add_key(services: Services) -> None:
    from storage.accounts.keys import NewKey

    async with services.database.begin() as transaction:
        await transaction.keys.add(
            NewKey(id=_KEY, name=_KEY, digest=b"0" * 32, scopes=[], requests_per_minute=0)
        )


async def _calls(options: argparse.Namespace, directory: Path) -> dict[str, list[float]]:
    from nekro.app.calls.dispatch import CallScope
    from nekro.wire.values import encode_arguments

    os.environ["NEKRO_WORKERS__METHODS_CONCURRENCY"] = str(options.slots)
    limits = {"broker": {"max_queued": 2 * options.flood}}
    if options.owner == "plugin":
        limits["broker"]["calls_per_chat"] = options.flood
    async with _system(_Worker(limits, "methods", directory), wait_for="bench.wait.wait") as services:
        waiting = await served(services, "bench.wait.wait")
        other = await served(services, "bench.pause.pause")
        arguments = encode_arguments((options.seconds,), {})

        async def scope_of(chat_key: str) -> CallScope:
            return CallScope(chat=await services.chat(chat_key), user_id=None)

        async def call(scope: CallScope) -> None:
            await call_served(services, waiting, arguments, scope, seconds=_WAIT_SECONDS)

        own = await scope_of("probe")

        async def probe(number: int) -> float:
            del number
            began = time.perf_counter()
            await call_served(services, other, arguments, own, seconds=_WAIT_SECONDS)
            return time.perf_counter() - began

        tasks: list[asyncio.Task[None]] = []

        async def flood() -> None:
            keys = [f"flood{number}" for number in range(100)] if options.owner == "plugin" else ["flood"]
            scopes = [await scope_of(key) for key in keys]
            for number in range(options.flood):
                tasks.append(asyncio.create_task(call(scopes[number % len(scopes)])))
                if number % _AT_ONCE == 0:  # a process that sends all at once has no time left to send them
                    await asyncio.sleep(_STEP_SECONDS)
            await asyncio.sleep(2 * options.seconds)

        found = await _beside(options, probe, flood)
        ended = [task for task in tasks if task.done()]
        failed = sum(task.exception() is not None for task in ended)
        print(f"{len(ended)} calls of the flood had ended after the last probe, {failed} with an error")
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return found


async def _beside(
    options: argparse.Namespace,
    probe: Callable[[int], Awaitable[float]],
    flood: Callable[[], Awaitable[None]],
) -> dict[str, list[float]]:
    await probe(0)  # warms up
    count = options.probes
    alone = [await probe(1 + number) for number in range(count)]
    await flood()
    return {"alone": alone, "beside": [await probe(1 + count + number) for number in range(count)]}


class _Worker:
    """A worker that can be started again."""

    def __init__(self, limits: dict[str, dict[str, int]], lane: str, directory: Path) -> None:
        self.limits = limits
        self._command = [*limited_command(limits), "worker", "--lane", lane]
        self._log = directory / "worker.log"
        self._child: Child | None = None

    def start(self) -> None:
        self._child = Child(self._command, log=self._log)

    def stop(self) -> None:
        if self._child is not None:
            self._child.stop()
            self._child = None

    def cpu_seconds(self) -> float:
        return cpu_seconds(self._child.pid) if self._child is not None else 0.0

    def last_words(self) -> str:
        return self._child.last_words() if self._child is not None else ""


@contextlib.asynccontextmanager
async def _system(worker: _Worker, *, wait_for: str | None) -> AsyncIterator[Services]:
    from broker_config.settings import Settings
    from nekro.app.services import Services
    from storage.migrate import upgrade

    limit(worker.limits)
    settings = Settings.load(env_file=None)
    await upgrade(settings.database, settings.data_dir)
    worker.start()
    services = Services.load(settings, role="cli")
    try:
        await services.start()
        if wait_for is not None:
            await served(services, wait_for)
        yield services
    except BaseException:
        print(worker.last_words(), file=sys.stderr)
        raise
    finally:
        await services.close()
        worker.stop()


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line; ends the process with code 2 when it is wrong."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.floods", description=__doc__)
    parser.add_argument("kind", choices=["rounds", "calls"])
    parser.add_argument(
        "--owner", choices=["key", "chat", "plugin"], help="of the flood (default: key or plugin)"
    )
    parser.add_argument("--flood", type=int, default=1000, help="rounds or calls (default: 1000)")
    parser.add_argument("--probes", type=int, default=50, help="alone, and beside the flood (default: 50)")
    parser.add_argument("--slots", type=int, default=8, help="of the worker (default: 8)")
    parser.add_argument("--seconds", type=float, default=0.2, help="of each answer or call (default: 0.2)")
    parser.add_argument("--database-url", help="instead of SQLite, for example postgresql://host/scratch")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to FILE")
    options = parser.parse_args(argv)
    if options.owner is None:
        options.owner = "key" if options.kind == "rounds" else "plugin"
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    interrupted_by_sigterm()
    options = parse(argv)
    with tempfile.TemporaryDirectory(prefix="nekro-bench-") as name, redis_server(Path(name)) as server:
        os.environ |= {
            "NEKRO_BROKER__URL": server.url,
            "NEKRO_DATA_DIR": str(Path(name) / "data"),
            "NEKRO_PLUGINS__DIRS": str(_PLUGINS),
            "NEKRO_LOG__LEVEL": "WARNING",
        }
        if options.database_url is not None:
            os.environ["NEKRO_DATABASE__URL"] = options.database_url
        measure = _rounds if options.kind == "rounds" else _calls
        found = asyncio.run(measure(options, Path(name)))
        print(describe_machine(server.version), file=sys.stderr)
    for when, seconds in found.items():
        p50, p99 = (percentile(seconds, percent) * 1e3 for percent in (50, 99))
        print(f"{options.kind}, {when}: p50 {p50:.1f} ms, p99 {p99:.1f} ms")
    if options.json is not None:
        options.json.write_text(json.dumps(found) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
