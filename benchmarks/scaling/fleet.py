"""Run a Redis, workers and one caller on this machine, and measure their resource usage."""

from __future__ import annotations

import asyncio
import os
import resource
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import redis

from benchmarks.harness.contender import ROOT
from benchmarks.harness.limited import limited_command, limits_of
from benchmarks.harness.processes import Child, cpu_seconds
from benchmarks.harness.redis_server import RedisServer
from benchmarks.harness.served import call_served, served

if TYPE_CHECKING:
    from broker_config.settings import Settings
    from nekro.app.services import Services

__all__ = ["CHATS", "Caller", "Fleet", "Usage", "opened_caller", "running_fleet"]

#: Number of chats that calls are spread over, as each chat has limits of its own.
CHATS = 200
CALL_SECONDS = 120
_START_SECONDS = 60


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Cumulative resource usage of Redis, workers and caller."""

    redis_commands: float
    redis_cpu_seconds: float
    #: Time in commands by Redis' own count; those inside scripts count twice.
    redis_command_seconds: float
    redis_net_bytes: int
    #: Of the Redis with the results; 0 when they are in the same one.
    results_cpu_seconds: float
    worker_cpu_seconds: float
    caller_cpu_seconds: float

    def since(self, before: Usage) -> Usage:
        """Return the usage since ``before``."""
        return Usage(**{name: getattr(self, name) - getattr(before, name) for name in vars(self)})


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """A Redis server and its workers."""

    #: None when there are no workers.
    settings: Settings | None
    server: RedisServer
    workers: tuple[Child, ...]
    #: Has the results; None when they are in the same one.
    results: RedisServer | None = None

    def usage(self) -> Usage:
        """Return the cumulative usage."""
        info = self._info()
        results = 0.0 if self.results is None else cpu_seconds(self.results.pid)
        own = resource.getrusage(resource.RUSAGE_SELF)
        return Usage(
            redis_commands=int(info["total_commands_processed"]),
            redis_cpu_seconds=float(info["used_cpu_user"]) + float(info["used_cpu_sys"]),
            redis_command_seconds=_command_seconds(info),
            redis_net_bytes=int(info["total_net_input_bytes"]) + int(info["total_net_output_bytes"]),
            results_cpu_seconds=results,
            worker_cpu_seconds=sum(cpu_seconds(worker.pid) for worker in self.workers),
            caller_cpu_seconds=own.ru_utime + own.ru_stime,
        )

    def redis_bytes(self) -> int:
        """Return the present memory of Redis."""
        return int(self._info()["used_memory"])

    def worker_bytes(self) -> int:
        """Return the present memory of all workers."""
        return sum(_resident_bytes(worker.pid) for worker in self.workers)

    def _info(self) -> dict[str, Any]:
        with redis.Redis.from_url(self.server.url) as client:
            found: dict[str, Any] = client.info("all")
        return found


class Caller:
    """Calls the method ``linger`` as the bridge calls."""

    def __init__(self, services: Services) -> None:
        self.services = services

    async def open(self) -> None:
        """Prepare the chats."""
        from nekro.app.calls.dispatch import CallScope

        self._entry = await served(self.services, "bench.linger.linger")
        self._scopes = [
            CallScope(chat=await self.services.chat(f"chat-{number}"), user_id=None)
            for number in range(CHATS)
        ]

    async def call(self, number: int, seconds: float) -> str:
        """Make one call; returns the name of the worker that ran it."""
        from nekro.wire.values import encode_arguments

        envelope = await call_served(
            self.services,
            self._entry,
            encode_arguments((seconds,), {}),
            self._scopes[number % CHATS],
            seconds=CALL_SECONDS,
        )
        return envelope.worker

    async def until_all_answer(self, workers: int) -> None:
        """Call until that many workers have answered."""
        seen: set[str] = set()
        async with asyncio.timeout(_START_SECONDS):
            while len(seen) < workers:
                seen |= set(await asyncio.gather(*(self.call(number, 0.05) for number in range(4 * workers))))


@contextmanager
def running_fleet(
    server: RedisServer,
    directory: Path,
    *,
    workers: int,
    concurrency: int,
    results: RedisServer | None = None,
) -> Iterator[Fleet]:
    """Empty the Redis and start methods workers on it, with the results in a second one if it is given."""
    from broker_config.settings import Settings
    from nekro.cli.environment import environment_of
    from storage.migrate import upgrade

    server.clear()
    directory.mkdir()
    settings = Settings.load(
        env_file=None,
        data_dir=directory / "data",
        broker={"url": server.url, "max_queued": 1_000_000, "calls_per_chat": 1_000_000},
        results={"url": None if results is None else results.url},
        plugins={"dirs": (Path(__file__).with_name("plugins"),)},
        security={"signing_key": "benchmark"},
        workers={"methods_concurrency": concurrency},
        log={"level": "WARNING"},
    )
    asyncio.run(upgrade(settings.database, settings.data_dir))
    environment = environment_of(settings) | {"PYTHONPATH": str(ROOT)}
    command = [*limited_command(limits_of(settings)), "worker", "--lane", "methods", "--name"]
    with ExitStack() as stack:
        children = tuple(
            stack.enter_context(
                Child([*command, f"scale-{number}"], log=directory / f"{number}.log", environment=environment)
            )
            for number in range(workers)
        )
        yield Fleet(settings=settings, server=server, workers=children, results=results)


@asynccontextmanager
async def opened_caller(fleet: Fleet) -> AsyncIterator[Caller]:
    """Open a caller in this process; yields it when every worker has answered."""
    from nekro.app.services import Services
    from nekro_agent.core.logger import configure

    assert fleet.settings is not None
    configure(level=fleet.settings.log.level)
    services = Services.load(fleet.settings, role="cli")
    await services.start()
    try:
        caller = Caller(services)
        await caller.open()
        await caller.until_all_answer(len(fleet.workers))
        yield caller
    finally:
        await services.close()


def _command_seconds(info: Mapping[str, Any]) -> float:
    commands = {name: value for name, value in info.items() if name.startswith("cmdstat_")}
    return sum(float(value["usec"]) for name, value in commands.items() if name != "cmdstat_info") / 1e6


def _resident_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
