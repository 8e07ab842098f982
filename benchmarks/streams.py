"""Measure the event streams of one gateway process: ``python -m benchmarks.streams``.

Readers of several chats, over sockets; one writer appends events to every chat as a worker does. The time of
an event is from its commit to its arrival at a reader, by the clock of one host. Redis, SQLite (or
``--database-url``), the gateway, the writer and the readers share the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import resource
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import redis.asyncio

from benchmarks.harness.figures import percentile
from benchmarks.harness.machine import describe_machine
from benchmarks.harness.processes import Child, cpu_seconds, interrupted_by_sigterm, local_headers, peak_bytes
from benchmarks.harness.redis_server import redis_server
from benchmarks.harness.usage import tree_rss_bytes
from broker_config.keys import Keys
from broker_config.settings import Settings

__all__ = ["main", "parse"]

_NUMBER: Final = re.compile(rb"^id: (\d+)(?:\.[0-9a-f]+)?\r?$", re.MULTILINE)
_OPEN_SECONDS: Final = 300
#: As ``Retry-After`` of such an answer says.
_RETRY_SECONDS: Final = 1.0
_IDLE_SECONDS: Final = 2.0
#: Announcements of events in a chat that no reader of the gateway follows.
_ANNOUNCEMENTS, _AT_ONCE = 10_000, 50
_SETTLE_SECONDS: Final = 1.0


@dataclass
class _Reader:
    chat_key: str
    #: Lines with the key.
    headers: str
    numbers: list[int] = field(default_factory=list)
    #: Seconds from each event's commit to its arrival.
    seconds: list[float] = field(default_factory=list)
    #: How often the gateway was too busy to open the stream.
    refusals: int = 0

    async def run(self, port: int, sent: dict[tuple[str, int], float], opened: asyncio.Semaphore) -> None:
        """Read for ever; connect again when the gateway is too busy to open the stream, as clients do."""
        while await self._is_refused(port, sent, opened):
            self.refusals += 1
            await asyncio.sleep(_RETRY_SECONDS)

    async def _is_refused(
        self, port: int, sent: dict[tuple[str, int], float], opened: asyncio.Semaphore
    ) -> bool:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        request = (
            f"GET /api/v1/chats/{self.chat_key}/events?after=0 HTTP/1.1\r\n"
            f"Host: 127.0.0.1:{port}\r\n{self.headers}\r\n"
        )
        writer.write(request.encode())
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            if b" 503 " in head[:20]:
                return True
            if b" 200 " not in head[:20]:
                raise SystemExit(f"the gateway answered {head!r} {await reader.read(500)!r}")
            opened.release()
            while data := await reader.readuntil(b"\r\n\r\n"):
                if b"\nevent:" not in b"\n" + data:
                    continue  # a comment, or the position at the beginning
                for found in _NUMBER.findall(data):
                    self.numbers.append(int(found))
                    self.seconds.append(time.time() - sent.get((self.chat_key, int(found)), time.time()))
        finally:
            writer.close()
        return False


class _Gateway:
    """Counters of the gateway's process, and of Redis."""

    def __init__(self, pid: int, redis_url: str) -> None:
        self._pid, self._redis_url = pid, redis_url

    def counters(self) -> tuple[float, float, float]:
        """Return (seconds of CPU, seconds of Redis' CPU, resident bytes)."""
        with redis.Redis.from_url(self._redis_url) as client:
            info = client.info("cpu")
        cpu = float(info["used_cpu_user"]) + float(info["used_cpu_sys"])
        return cpu_seconds(self._pid), cpu, float(tree_rss_bytes([self._pid]))


async def measure(
    *, readers: int, chats: int, events: int, per_second: float, database_url: str | None
) -> dict[str, object]:
    """Run it; returns the figures."""
    with tempfile.TemporaryDirectory(prefix="nekro-bench-") as name, redis_server(Path(name)) as server:
        directory = Path(name)
        settings = _settings(directory, server.url, database_url)
        async with _gateway(settings, directory) as (port, child):
            gateway = _Gateway(child.pid, server.url)
            found = await _read(
                settings, port, gateway, readers=readers, chats=chats, events=events, rate=per_second
            )
            found["gateway_cpu_seconds"] = round(cpu_seconds(child.pid), 1)
            found["gateway_peak_mb"] = round((peak_bytes([child.pid]) or 0) / 1e6)
        found["machine"] = describe_machine(server.version)
        return found


def _settings(directory: Path, redis_url: str, database_url: str | None) -> Settings:
    values: dict[str, object] = {
        "data_dir": str(directory / "data"),
        "broker": {"url": redis_url},
        "security": {"signing_key": "bench-signing-key"},
        "database": {"url": database_url or f"sqlite:///{directory}/nekro.db"},
        "log": {"level": "WARNING"},
    }
    (directory / "settings.json").write_text(json.dumps(values), "utf-8")
    return Settings.load(env_file=None, **values)


@asynccontextmanager
async def _gateway(settings: Settings, directory: Path) -> AsyncIterator[tuple[int, Child]]:
    from storage.migrate import upgrade

    await upgrade(settings.database, settings.data_dir)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "benchmarks.streams",
        "--serve",
        str(directory / "settings.json"),
        str(port),
    ]
    with Child(command, log=directory / "gateway.log") as child:
        for _ in range(600):
            await asyncio.sleep(0.1)
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                continue
            writer.close()
            break
        yield port, child


async def _read(
    settings: Settings, port: int, gateway: _Gateway, *, readers: int, chats: int, events: int, rate: float
) -> dict[str, object]:
    from nekro.app.chats.events import record
    from nekro.app.services import CALLER, Services
    from storage.repositories.events import NewEvent

    services = Services.load(settings, role=CALLER)
    await services.start()
    keys = [f"bench_{number}" for number in range(chats)]
    async with services.database.begin() as transaction:
        for key in keys:
            await transaction.chats.ensure(key)
    sent: dict[tuple[str, int], float] = {}
    opened = asyncio.Semaphore(0)
    headers = "".join(f"{name}: {value}\r\n" for name, value in local_headers(settings.data_dir).items())
    all_readers = [_Reader(keys[number % chats], headers) for number in range(readers)]
    before, begin = gateway.counters(), time.perf_counter()
    tasks = [asyncio.create_task(reader.run(port, sent, opened)) for reader in all_readers]
    async with asyncio.timeout(_OPEN_SECONDS):
        for _ in all_readers:
            await opened.acquire()
    open_seconds = time.perf_counter() - begin
    opened_all = gateway.counters()
    await asyncio.sleep(_IDLE_SECONDS)
    idle = gateway.counters()
    foreign = await _foreign(settings, gateway)
    events_began = gateway.counters()
    data = {"text": "x" * 200}
    begin = time.perf_counter()
    for number in range(events):
        for key in keys:
            async with services.database.begin() as transaction:
                record(transaction, services.publisher, key, NewEvent(type="call.ended", data=data))
            sent[key, number + 1] = time.time()
            await asyncio.sleep(max(0.0, begin + len(sent) / rate - time.perf_counter()))
    async with asyncio.timeout(_OPEN_SECONDS):
        while not all(len(reader.numbers) == events for reader in all_readers):
            await asyncio.sleep(0.05)
    taken = time.perf_counter() - begin
    after = gateway.counters()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await services.close()
    whole = list(range(1, events + 1))
    seconds = [value for reader in all_readers for value in reader.seconds]
    return {
        "readers": readers,
        "chats": chats,
        "complete": sum(reader.numbers == whole for reader in all_readers),
        "open_seconds": round(open_seconds, 3),
        "refusals": sum(reader.refusals for reader in all_readers),
        "deliveries_per_second": round(len(seconds) / taken),
        "gateway_cpu_us_per_opening": round((opened_all[0] - before[0]) / readers * 1e6),
        "gateway_kib_per_stream": round((opened_all[2] - before[2]) / readers / 1024, 1),
        "gateway_cpu_us_per_idle_stream_and_second": round(
            (idle[0] - opened_all[0]) / _IDLE_SECONDS / readers * 1e6, 1
        ),
        "gateway_cpu_us_per_event": round((after[0] - events_began[0]) / (events * chats) * 1e6),
        "gateway_cpu_us_per_foreign_announcement": round(foreign[0] * 1e6, 1),
        "redis_cpu_us_per_foreign_announcement": round(foreign[1] * 1e6, 1),
        **{f"p{percent}_ms": round(percentile(seconds, percent) * 1e3, 2) for percent in (50, 95, 99)},
    }


async def _foreign(settings: Settings, gateway: _Gateway) -> tuple[float, float]:
    """Announce events of a chat without readers; returns the CPU of the gateway and of Redis for each."""
    # Sent as in a busy fleet: a reader gets several at a time.
    channel = Keys(prefix=settings.broker.key_prefix).events
    body = {"chat_key": "bench_unread", "number": 1, "types": ["call.ended"]}
    message = json.dumps({"kind": "added", "body": body})
    before = gateway.counters()
    async with redis.asyncio.Redis.from_url(settings.broker.url or "") as client:
        for _ in range(_ANNOUNCEMENTS // _AT_ONCE):
            pipeline = client.pipeline(transaction=False)
            for _ in range(_AT_ONCE):
                pipeline.publish(channel, message)
            await pipeline.execute()
    await asyncio.sleep(_SETTLE_SECONDS)  # until the gateway has read them
    after = gateway.counters()
    return (after[0] - before[0]) / _ANNOUNCEMENTS, (after[1] - before[1]) / _ANNOUNCEMENTS


def _serve(settings: Path, port: int) -> None:
    import uvicorn

    from nekro.gateway.app import create_app

    app = create_app(Settings.load(env_file=None, **json.loads(settings.read_text("utf-8"))))
    uvicorn.run(app, host="127.0.0.1", port=port, log_config=None, access_log=False)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line; ends the process with code 2 when it is wrong."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.streams", description=__doc__)
    parser.add_argument("--readers", type=int, default=2000, help="open streams (default: 2000)")
    parser.add_argument("--chats", type=int, default=20, help="chats that they read (default: 20)")
    parser.add_argument("--events", type=int, default=50, help="events of each chat (default: 50)")
    parser.add_argument(
        "--per-second", type=float, default=20, help="events of all chats together (default: 20)"
    )
    parser.add_argument("--database-url", help="instead of SQLite, for example postgresql://host/scratch")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to FILE")
    parser.add_argument("--serve", nargs=2, metavar=("SETTINGS", "PORT"), help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; 1 when a reader missed an event or got one twice."""
    interrupted_by_sigterm()
    options = parse(argv)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = max(soft, min(hard, 2 * options.readers + 1000))
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    if options.serve is not None:
        _serve(Path(options.serve[0]), int(options.serve[1]))
        return 0
    found = asyncio.run(
        measure(
            readers=options.readers,
            chats=options.chats,
            events=options.events,
            per_second=options.per_second,
            database_url=options.database_url,
        )
    )
    print(found.pop("machine"), file=sys.stderr)
    for name, value in found.items():
        print(f"{name:24} {value}")
    if options.json is not None:
        options.json.write_text(json.dumps(found) + "\n", "utf-8")
    return 0 if found["complete"] == found["readers"] else 1


if __name__ == "__main__":
    sys.exit(main())
