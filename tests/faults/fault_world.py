"""One system under test in processes of its own: Redis, a database, workers, callers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from cut_proxy import CutProxy
from evidence import Evidence, Violation, open_rows, read_calls, read_effects, read_ledger
from fault_caller import HANG_SECONDS
from fault_plan import DETACH_SECONDS, LEASE_SECONDS, LIMIT_SECONDS, CallKind, FaultKind, Options
from fleet_probes import client_of, left_in_lane
from postgres_process import PostgresServer
from redis_process import RedisServer
from redis_relay import RedisRelay
from waiting import wait_until
from worker_crew import Crew
from worker_fleet import Fleet, build_fleet

from broker_config.settings import DatabaseSettings
from nekro.cli.environment import environment_of
from storage.files.areas import DataAreas

HERE = Path(__file__).parent
#: Seconds within which all open work must end after the last fault.
QUIET_SECONDS = 90.0
LOOK_SECONDS = 0.3
#: The model of the rounds: answers a user's message with calls, anything else with one word.
SCRIPT = """
- when: 'wake (R[\\w-]+)'
  anywhere: true
  answer: |
    ```python
    # noted
    ```
- when: '(?s).*please do (R[\\w-]+)'
  anywhere: true
  answer: |
    ```python
    work("${1}")
    effect("${1}")
    wake("wake ${1}")
    ```
- when: ''
  answer: |
    ```python
    # noted
    ```
"""


class CallerProcess:
    """One caller; see `fault_caller`."""

    def __init__(
        self, fleet: Fleet, options: Options, number: int, directory: Path, *, calls_first: bool
    ) -> None:
        """Start it.

        Args:
            calls_first: it makes one call before it is ready.
        """
        self.log = directory / f"caller-{number}.jsonl"
        self.was_killed = False
        mode = "calls-first" if calls_first else "-"
        arguments = [str(self.log), str(number), json.dumps(asdict(options)), mode]
        environment = environment_of(fleet.settings) | {"PYTHONPATH": str(HERE.parent)}
        with (directory / f"caller-{number}.log").open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, str(HERE / "fault_caller.py"), *arguments], env=environment, text=True,
                stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT,
            )  # fmt: skip

    def wait_ready(self) -> None:
        """Wait until it is ready, or has ended."""
        wait_until(lambda: self._is_ready() or self.process.poll() is not None, what=f"{self.log.stem}")

    def _is_ready(self) -> bool:
        return self.log.exists() and '"event": "ready"' in self.log.read_text()

    def begin(self, until: float) -> None:
        """Let it call until then."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(f"{until}\n")
            self.process.stdin.close()

    def kill(self) -> None:
        """SIGKILL and reap."""
        self.was_killed = True
        self.process.kill()
        self.process.wait()


class World:
    """The components in which `Nemesis` injects faults; created by `world`."""

    def __init__(
        self,
        options: Options,
        directory: Path,
        fleet: Fleet,
        redis: RedisServer,
        relay: RedisRelay,
        postgres: PostgresServer | None,
        proxy: CutProxy | None,
    ) -> None:
        self.options, self.directory, self.fleet = options, directory, fleet
        self.redis, self.relay, self.postgres, self.proxy = redis, relay, postgres, proxy
        self.crew = Crew(fleet.settings, directory, concurrency=20, least_running=2)
        self.callers: list[CallerProcess] = []
        self.until = 0.0
        self.evidence = Evidence()

    async def start(self) -> None:
        """Start workers and callers; returns when each caller got an answer, so that faults meet calls."""
        if self.options.server:
            self._declare_server()
        await asyncio.gather(*(self.crew.start(lane) for lane in self.options.lanes))
        if self.options.server:
            await self._see_tools()
        callers = [self._add_caller(calls_first=True) for _ in range(self.options.callers)]
        await asyncio.gather(*(asyncio.to_thread(caller.wait_ready) for caller in callers))
        self.until = time.time() + self.options.seconds
        for caller in callers:
            caller.begin(self.until)

    @property
    def _marks(self) -> Path:
        """Directory of the log of the MCP server, which runs as a user of its own."""
        return self.directory / "marks"

    def _declare_server(self) -> None:
        self._marks.mkdir()
        self._marks.chmod(0o777)
        script = str(HERE / "mark_server.py")
        entry = {
            "command": "/usr/bin/python3",
            "args": ["-u", script, str(self._marks / "marks.jsonl")],
            "nekro": {"files": {script: "ro", str(self._marks): "rw"}, "approval": False},
        }
        self.fleet.settings.data_dir.mkdir(parents=True, exist_ok=True)
        declared = self.fleet.settings.data_dir / "mcp.json"
        declared.write_text(json.dumps({"mcpServers": {"marks": entry}}))

    async def _see_tools(self) -> None:
        services = self.fleet.services()
        await services.start()
        try:
            while CallKind.SERVER_ONCE.value not in services.registry:
                await asyncio.sleep(LOOK_SECONDS)
                await services.read_catalogue()
        finally:
            await services.close()

    def server_processes(self) -> list[int]:
        """Processes of the MCP server, its sandbox not included."""
        log = str(self._marks / "marks.jsonl").encode()
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                words = path.read_bytes().split(b"\0")
                if log in words and words[0].rpartition(b"/")[2].startswith(b"python"):
                    found.append(int(path.parent.name))
        return found

    async def replace_caller(self) -> None:
        """Start another caller with calls of its own."""
        caller = self._add_caller(calls_first=False)
        await asyncio.to_thread(caller.wait_ready)
        caller.begin(self.until)

    def _add_caller(self, *, calls_first: bool) -> CallerProcess:
        number = len(self.callers)
        self.callers.append(
            CallerProcess(self.fleet, self.options, number, self.directory, calls_first=calls_first)
        )
        return self.callers[-1]

    def notice(self, rule: str, subject: str, detail: str) -> None:
        """Record a violation that only this process can detect."""
        self.evidence.noticed.append(Violation(rule=rule, subject=subject, detail=detail))

    async def finish(self) -> Evidence:
        """Wait for the callers and for open work, read the evidence, and stop the workers."""
        await asyncio.gather(*(self._finish_caller(caller) for caller in self.callers))
        services = self.fleet.services()
        try:
            await self._become_quiet(services.database)
            await read_ledger(self.evidence, services.database)
        finally:
            await services.close()
        await self._stop_workers()
        log = DataAreas(self.fleet.settings.data_dir).plugin_dir("tests.effects") / "effects.jsonl"
        self.evidence.effects = read_effects(log, self._marks / "marks.jsonl")
        self.evidence.calls = read_calls({caller.log: caller.was_killed for caller in self.callers})
        return self.evidence

    async def _finish_caller(self, caller: CallerProcess) -> None:
        seconds = None if self.options.calls else LIMIT_SECONDS + 2 * HANG_SECONDS
        try:
            async with asyncio.timeout(seconds):
                while caller.process.poll() is None:
                    await asyncio.sleep(LOOK_SECONDS)
        except TimeoutError:
            self.notice("caller", caller.log.stem, "did not end after its calls")
            caller.kill()
        if caller.process.returncode and not caller.was_killed:
            self.notice("caller", caller.log.stem, f"ended with status {caller.process.returncode}")

    async def _become_quiet(self, database: Any) -> None:
        end = time.monotonic() + QUIET_SECONDS
        while left := await open_rows(database) or await asyncio.to_thread(self._left_in_lanes):
            if time.monotonic() > end:
                self.evidence.noticed += left
                return
            await asyncio.sleep(LOOK_SECONDS)

    def _left_in_lanes(self) -> list[Violation]:
        with client_of(self.fleet) as client:
            found = {lane: left_in_lane(self.fleet, client, lane) for lane in sorted(set(self.options.lanes))}
        return [
            Violation(rule="left-queued", subject=lane, detail=str(left)[:500])
            for lane, left in found.items()
            if left
        ]

    async def _stop_workers(self) -> None:
        self.crew.collect_deserters()
        for deserter in self.crew.deserters:
            # So ends the owner of a pinned plugin that was frozen for longer than its lease.
            if self.options.server and "status 70" in deserter and "pinned_plugin_lost" in deserter:
                continue
            self.notice("worker-ended", deserter.partition(" ")[0], deserter)
        try:
            await self.crew.stop()
        except pytest.fail.Exception as exc:
            self.notice("worker-stop", "the last", str(exc)[:300])


@contextlib.asynccontextmanager
async def world(options: Options, directory: Path, postgres: PostgresServer | None) -> AsyncIterator[World]:
    """Build the system of a run; its processes end with the context."""
    redis_directory = directory / "redis"
    redis_directory.mkdir(parents=True)
    (directory / "script.yaml").write_text(SCRIPT)
    redis = RedisServer(redis_directory)
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(redis.kill)
        await asyncio.to_thread(redis.start)
        relay = await stack.enter_async_context(RedisRelay(redis.port))
        is_relayed = bool({FaultKind.CUT, FaultKind.LOSE} & set(options.faults))
        url, proxy = f"sqlite:///{directory / 'nekro.db'}", None
        if postgres is not None:
            url = await asyncio.to_thread(postgres.create_database)
        if postgres is not None and {FaultKind.DB_AWAY, FaultKind.DB_LOSE} & set(options.faults):
            proxy = CutProxy(DatabaseSettings(url=url))
            url = str((await proxy.start()).url)
            stack.push_async_callback(proxy.stop)
        fleet = await asyncio.to_thread(
            build_fleet,
            directory,
            relay.url if is_relayed else redis.url,
            url,
            # Workers are killed during calls and rounds again and again here.
            broker={"visibility_timeout_seconds": LEASE_SECONDS, "max_deliveries": 1000},
            agent={"lease_seconds": 3, "rounds_per_turn": 50},
            plugins={"dirs": (HERE / "fault_plugins",)},
            llm={"script": directory / "script.yaml"},
            # Calls of sandboxes and of a part of the callers are detached.
            workers={
                "drain_seconds": 8, "wait_seconds": DETACH_SECONDS, "call_timeout_seconds": LIMIT_SECONDS,
            },
        )  # fmt: skip
        made = World(options, directory, fleet, redis, relay, postgres, proxy)
        stack.push_async_callback(made.crew.stop)
        stack.callback(lambda: [caller.kill() for caller in made.callers])
        yield made
