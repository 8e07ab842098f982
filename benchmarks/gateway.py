"""Measure a gateway beside a bare echo on FastAPI and Redis pub/sub: ``python -m benchmarks.gateway``.

Each repetition measures both, in turns, on one Redis: requests per second of posted messages and of calls,
and the time from the post to the first event at a reader. The gateway records every message in SQLite and
its calls run in a methods worker; the echo keeps nothing. The results are ratios: the machine cancels out.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, Final

import httpx
import uvloop

from benchmarks.harness.machine import describe_machine
from benchmarks.harness.processes import Child, free_port, interrupted_by_sigterm, local_headers
from benchmarks.harness.redis_server import redis_server
from nekro_client.sse import EventParser

__all__ = ["main", "parse", "prepare"]

_PLUGINS: Final = Path(__file__).parent / "plugins"
_METHOD: Final = "bench.wait.wait"
_START_SECONDS: Final = 90.0
_API: Final = "/api/v1"
#: The message starts no turn, which would need a language model.
_MESSAGE: Final = {"text": "hello", "user_id": "ada", "to_agent": False}


async def _rate(send: Callable[[int], Awaitable[httpx.Response]], requests: int, clients: int) -> float:
    """Return the requests per second of some clients that each wait for their answers."""
    numbers = iter(range(requests))

    async def client() -> None:
        for number in numbers:
            (await send(number)).raise_for_status()

    began = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(clients)))
    return requests / (time.perf_counter() - began)


async def _delay(http: httpx.AsyncClient, base: str, posts: int) -> float:
    """Return the median of the milliseconds from a post to its event at a reader."""
    delays = []
    path = f"{base}/chats/delay/events"
    async with http.stream("GET", path, timeout=None) as response:
        parser, chunks = EventParser(), response.aiter_bytes()
        await anext(chunks)  # the stream stands
        for _ in range(posts):
            began = time.perf_counter()
            post = asyncio.create_task(http.post(f"{base}/chats/delay/messages", json=_MESSAGE))
            while not list(parser.feed(await anext(chunks))):
                pass
            delays.append((time.perf_counter() - began) * 1000)
            (await post).raise_for_status()
    return median(delays)


async def _measure(url: str, base: str, options: argparse.Namespace) -> dict[str, float]:
    """Return the figures of one server."""
    most = options.clients + 2
    # Earlier than the servers close it: a request that is sent at that moment would fail.
    limits = httpx.Limits(max_connections=most, max_keepalive_connections=most, keepalive_expiry=1)
    async with httpx.AsyncClient(base_url=url, headers=_headers(), limits=limits, timeout=60) as http:

        def post(number: int) -> Awaitable[httpx.Response]:
            return http.post(f"{base}/chats/rate-{number % 20}/messages", json=_MESSAGE)

        found = {"posts_per_second": await _rate(post, options.requests, options.clients)}
        if base:
            body = {"method": _METHOD, "chat_key": "rate", "args": [0]}

            def call(number: int) -> Awaitable[httpx.Response]:
                return http.post(f"{base}/calls", json=body)

            found["calls_per_second"] = await _rate(call, options.requests, options.clients)
        return found | {"event_ms": await _delay(http, base, options.posts)}


@contextmanager
def _servers(directory: Path, redis_url: str) -> Iterator[tuple[str, str]]:
    """Start the worker, the gateway and the echo; yields the URLs of the last two."""
    nekro = str(Path(sys.executable).with_name("nekro"))
    ports = free_port(), free_port()
    commands = {
        "worker": [nekro, "worker", "--lane", "methods"],
        "gateway": [nekro, "gateway", "--port", str(ports[0])],
        "echo": [sys.executable, "-m", "benchmarks.peers.echo_site", redis_url, str(ports[1])],
    }
    children = [Child(command, log=directory / f"{name}.log") for name, command in commands.items()]
    try:
        urls = tuple(f"http://127.0.0.1:{port}" for port in ports)
        _await_ready(f"{urls[0]}{_API}/methods", children, lambda answer: _METHOD in answer.text)
        _await_ready(f"{urls[1]}/docs", children, lambda answer: True)
        yield urls[0], urls[1]
    finally:
        for child in reversed(children):
            child.stop()


def _headers() -> dict[str, str]:
    return local_headers(Path(os.environ["NEKRO_DATA_DIR"]))


def _await_ready(url: str, children: list[Child], is_ready: Callable[[httpx.Response], bool]) -> None:
    end = time.monotonic() + _START_SECONDS
    while time.monotonic() < end:
        ended = [child for child in children if child.ended() is not None]
        if ended:
            raise SystemExit(f"{ended[0].log.stem} ended:\n{ended[0].last_words()}")
        try:
            answer = httpx.get(url, headers=_headers())
        except httpx.TransportError:
            answer = None
        if answer is not None and answer.is_success and is_ready(answer):
            return
        time.sleep(0.1)
    raise SystemExit(f"{url} does not answer")


def _report(runs: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Print each figure's ratio to the echo: the median of the runs, the least and the greatest."""
    own, bare = [run["gateway"] for run in runs], [run["echo"] for run in runs]
    pairs = list(zip(own, bare, strict=True))
    ratios = {
        "POST messages, rate": [one["posts_per_second"] / two["posts_per_second"] for one, two in pairs],
        "POST calls, rate": [one["calls_per_second"] / two["posts_per_second"] for one, two in pairs],
        "post to event, time": [one["event_ms"] / two["event_ms"] for one, two in pairs],
    }
    for name, found in ratios.items():
        print(f"{name}: {median(found):.2f} x echo ({min(found):.2f} to {max(found):.2f}, {len(found)} runs)")
    for name in ("posts_per_second", "calls_per_second", "event_ms"):
        beside = [run[name] for run in bare if name in run]
        words = f", echo {median(beside):.4g}" if beside else ""
        print(f"{name}: gateway {median(run[name] for run in own):.4g}{words}")
    return ratios


def prepare() -> None:
    """Create the database of the environment before a worker is started."""
    from broker_config.settings import Settings
    from storage.migrate import upgrade

    settings = Settings.load(env_file=None)
    asyncio.run(upgrade(settings.database, settings.data_dir))


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line; ends the process with code 2 when it is wrong."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gateway", description=__doc__)
    parser.add_argument("--requests", type=int, default=2000, help="of each kind in a run (default: 2000)")
    parser.add_argument("--clients", type=int, default=32, help="at the same time (default: 32)")
    parser.add_argument("--posts", type=int, default=200, help="whose event is awaited (default: 200)")
    parser.add_argument("--repetitions", type=int, default=5, help="runs of both in turns (default: 5)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to FILE")
    return parser.parse_args(argv)


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
            "NEKRO_GATEWAY__REQUESTS_PER_MINUTE": "0",
        }
        prepare()
        runs: list[dict[str, Any]] = []
        with _servers(Path(name), server.url) as (gateway, echo):
            for number in range(options.repetitions):
                pair = [("gateway", gateway, _API), ("echo", echo, "")]
                # In turns, so that a drift of the machine favours neither.
                ordered = pair if number % 2 == 0 else pair[::-1]
                runs.append({key: uvloop.run(_measure(url, base, options)) for key, url, base in ordered})
        print(describe_machine(server.version), file=sys.stderr)
    ratios = _report(runs)
    if options.json is not None:
        options.json.write_text(json.dumps({"runs": runs, "ratios": ratios}) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
