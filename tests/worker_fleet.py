"""A system in processes of its own: workers on the test's Redis and database."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import pytest
from forked_process import Descriptor, ForkedCommand, ForkedProcess, run_forked
from sqlalchemy.engine import make_url
from waiting import WAIT_SECONDS, wait_until

from benchmarks.harness.limited import limited_command, limits_of
from broker_config.settings import Settings
from nekro.app.calls.dispatch import CallScope
from nekro.app.services import Services
from nekro.broker.calls import MethodCaller
from nekro.cli.environment import environment_of
from nekro.cli.services.system import migrate
from nekro.plugins.configuration import package_policy
from nekro.plugins.entries import MethodEntry
from nekro.plugins.hooks import PluginHost
from nekro.plugins.loader import LoadedPlugins, load_plugins
from nekro.wire.invocation import Envelope, new_id
from nekro_agent import runtime
from nekro_agent.plugin import NekroPlugin
from workers.calls.remote_hooks import HookForwarder
from workers.sdk_runtime import runtime_of

#: The plugins of callers that have imported some.
_imported: WeakKeyDictionary[Services, LoadedPlugins] = WeakKeyDictionary()
_hosts: WeakKeyDictionary[Services, PluginHost] = WeakKeyDictionary()


def imported(services: Services) -> LoadedPlugins:
    """Import the plugins of a caller's settings into this process, with the SDK on the caller's services.

    For tests that use a plugin's objects beside the workers: its store, its directory, its jobs. Closing the
    services unbinds the SDK.
    """
    if services not in _imported:
        plugins = services.settings.plugins
        _imported[services] = loaded = load_plugins(
            plugins.dirs,
            disabled=plugins.disabled,
            shipped=plugins.load_shipped,
            data_dir=services.settings.data_dir,
            packages=package_policy(services.settings),
        )
        forwarder = HookForwarder(
            background=services.background,
            make_caller=lambda: MethodCaller(lambda: services.app, services.settings),
            tasks=services.plugin_tasks,
            may_run_here=lambda key: not services.lanes.is_pinned(key),
        )
        services.closers["remote hooks"] = forwarder.close
        _hosts[services] = PluginHost(loaded.plugins, remote=forwarder)
        runtime.bind(runtime_of(services, _hosts[services]))
        services.closers["runtime"] = runtime.unbind
    return _imported[services]


def host_of(services: Services) -> PluginHost:
    """The hooks of the plugins of `imported`; those of pinned plugins run on workers."""
    imported(services)
    return _hosts[services]


def plugin_of(services: Services, key: str) -> NekroPlugin:
    """A plugin of ``imported``."""
    (plugin,) = [plugin for plugin in imported(services).plugins if plugin.key == key]
    return plugin


def main_module(environment: dict[str, str]) -> str:
    """The command's module in the code that an environment runs: versions up to 0.2 have another one."""
    tree = environment.get("PYTHONPATH", "").partition(os.pathsep)[0]
    prefix = "" if Path(tree, "cli", "main.py").is_file() else "nekro."
    return f"{prefix}cli.main"


class Worker:
    """One `nekro worker` process with the ready handshake of `nekro up`."""

    def __init__(
        self,
        settings: Settings,
        log: Path,
        *,
        lane: str,
        concurrency: int | None,
        environment: dict[str, str] | None = None,
        prefix: Sequence[str] = (),
    ) -> None:
        """Start it: with an environment as ``python -m nekro.cli.main``, else forked, which is faster.

        Args:
            prefix: command that runs the worker's command; it needs an environment.
        """
        self.process: ForkedProcess | subprocess.Popen[bytes]
        self.log = log
        self.lane = lane
        url = settings.database.url or ""
        self._sqlite = make_url(url).database if url.startswith("sqlite") else None
        self._ours, theirs = socket.socketpair()
        arguments = ["worker", "--lane", lane, "--name", log.stem]
        if concurrency is not None:
            arguments += ["--concurrency", str(concurrency)]
        arguments.append("--supervisor-fd")
        limits = limits_of(settings)
        command = limited_command(limits)
        if environment is not None and (module := main_module(environment)) != "nekro.cli.main":
            command = [sys.executable, "-P", "-m", module]
        number = theirs.fileno()
        with theirs, log.open("ab") as output:
            if environment is None:
                self.process = ForkedProcess(
                    "benchmarks.harness.limited",
                    [json.dumps(limits), *arguments, Descriptor(number)],
                    environ=environment_of(settings),
                    stdout=output.fileno(),
                )
            else:
                self.process = subprocess.Popen(
                    [*prefix, *command, *arguments, str(number)],
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    pass_fds=[number],
                    start_new_session=True,
                )

    def wait_ready(self) -> str:
        """Wait until it consumes; returns its Celery node name."""
        self._ours.settimeout(WAIT_SECONDS)
        with self._ours.makefile("rb") as lines:
            line = next((line for line in lines if b'"node"' in line), b"")
        if not line:
            ended = self.process.wait(WAIT_SECONDS)
            pytest.fail(f"{self.log.stem} ended with {ended} before it was ready:\n{self.log.read_text()}")
        return str(json.loads(line)["node"])

    @property
    def pid(self) -> int:
        return self.process.pid

    def freeze(self) -> None:
        """SIGSTOP; on SQLite while it writes nothing, or its lock would keep every other process waiting."""
        with self._nobody_writes():
            self.process.send_signal(signal.SIGSTOP)
            state = Path(f"/proc/{self.pid}/stat")
            wait_until(lambda: state.read_text().rpartition(")")[2].split()[0] == "T", what="the stop")

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    @contextlib.contextmanager
    def _nobody_writes(self) -> Iterator[None]:
        if self._sqlite is None:
            yield
            return
        database = sqlite3.connect(self._sqlite, timeout=WAIT_SECONDS, isolation_level=None)
        with contextlib.closing(database):
            database.execute("BEGIN IMMEDIATE")
            yield
            database.execute("ROLLBACK")

    def kill(self) -> None:
        """SIGKILL and reap."""
        self.process.kill()
        self.process.wait(WAIT_SECONDS)
        self._ours.close()

    def stop(self) -> int:
        """SIGTERM and reap; returns the exit code."""
        self.process.terminate()
        try:
            return self.process.wait(WAIT_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGUSR1)  # Celery writes the stacks of all threads
            time.sleep(1)
            self.kill()
            pytest.fail(f"{self.log.stem} did not stop:\n{self.log.read_text()[-20000:]}")
        finally:
            self._ours.close()


class Fleet:
    """Workers on one broker and one database."""

    def __init__(self, settings: Settings, directory: Path, *, is_forked: bool = True) -> None:
        """Start nothing yet; without ``is_forked`` every worker is an interpreter of its own."""
        self.settings = settings
        #: Where its logs are.
        self.directory = directory
        self._is_forked = is_forked
        self.workers: list[Worker] = []

    def start(
        self,
        *lanes: str,
        concurrency: int | None = None,
        settings: Settings | None = None,
        variables: Mapping[str, str] | None = None,
        prefix: Sequence[str] = (),
    ) -> list[Worker]:
        """Start one worker per lane named, and wait until all consume.

        Args:
            variables: of their environment, besides the settings; such workers are interpreters of their
                own, because the variables may change an interpreter.
            prefix: command that runs the command of such a worker.
        """
        settings, started = settings or self.settings, []
        environment = None
        if variables or not self._is_forked:
            environment = {**environment_of(settings), **(variables or {})}
        for lane in lanes:
            log = self.directory / f"{lane}-{len(self.workers)}.log"
            worker = Worker(
                settings, log, lane=lane, concurrency=concurrency, environment=environment, prefix=prefix
            )
            self.workers.append(worker)
            started.append(worker)
        for worker in started:
            worker.wait_ready()
        return started

    def services(self) -> Services:
        """Services of this test's process, like those of a command; start and close them."""
        return Services.load(self.settings, role="cli")

    def worker_of(self, node: str | None) -> Worker:
        """The worker that rows name ``<role>@<host>:<pid>``."""
        assert node is not None
        return next(worker for worker in self.workers if worker.pid == int(node.rpartition(":")[2]))

    def command(self, *arguments: str, stderr: int | None = None) -> ForkedCommand:
        """Start a `nekro` command on this system, with pipes.

        Args:
            stderr: descriptor that it writes to instead of a pipe.
        """
        limits = json.dumps(limits_of(self.settings))
        return ForkedCommand(
            "benchmarks.harness.limited",
            [limits, *arguments],
            environ=environment_of(self.settings),
            stderr=stderr,
        )

    def run(
        self,
        *arguments: str,
        variables: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        given: str = "",
    ) -> subprocess.CompletedProcess[str]:
        """Run a `nekro` command on this system to its end.

        Args:
            variables: of its environment, besides the settings; with others than ours the command is an
                interpreter of its own, without ``given``.
            given: its standard input.
        """
        environ = {**environment_of(self.settings), **(variables or {})}
        limits = limits_of(self.settings)
        try:
            if all(name.startswith("NEKRO_") for name in variables or ()):
                return run_forked(
                    "benchmarks.harness.limited",
                    json.dumps(limits),
                    *arguments,
                    environ=environ,
                    cwd=cwd,
                    given=given,
                )
            return subprocess.run(
                [*limited_command(limits), *arguments], env=environ, cwd=cwd,
                stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=WAIT_SECONDS,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            pytest.fail(f"nekro {' '.join(arguments)} did not end\n{self.logs()}")

    def waiting_for(self, what: str) -> Callable[[], str]:
        """The message of a failed wait: its description, and the workers' output so far."""
        return lambda: f"{what}\n{self.logs()}"

    def logs(self) -> str:
        """Output of all workers, for failure messages."""
        return "\n".join(f"--- {w.log.stem}\n{w.log.read_text()[-3000:]}" for w in self.workers)

    def stop(self) -> None:
        """Stop every worker that still runs."""
        running = [worker for worker in self.workers if worker.process.poll() is None]
        for worker in running:
            worker.thaw()
            worker.process.terminate()
        for worker in running:
            worker.stop()
        for worker in self.workers:
            worker._ours.close()  # also of those that ended by themselves


def build_fleet(
    directory: Path,
    redis_url: str,
    database_url: str,
    *,
    is_migrated: bool = True,
    is_forked: bool = True,
    **overrides: Any,
) -> Fleet:
    """Make a fleet without workers, with a key prefix of its own and, mostly, a migrated database."""
    values: dict[str, Any] = {
        "data_dir": directory / "data",
        "broker": {"url": redis_url, "key_prefix": f"t{uuid.uuid4().hex}:"},
        "database": {"url": database_url, "pool_timeout_seconds": WAIT_SECONDS},
        "security": {"signing_key": "test-signing-key"},
        # A call that code waits for no longer, on a busy machine, would end its program.
        "workers": {"drain_seconds": 10, "wait_seconds": WAIT_SECONDS},
    }
    for name, value in overrides.items():
        values[name] = {**values.get(name, {}), **value} if isinstance(value, dict) else value
    settings = Settings.load(env_file=None, **values)
    if is_migrated:
        asyncio.run(migrate(settings))
    return Fleet(settings, directory, is_forked=is_forked)


async def call_in(
    services: Services,
    entry: MethodEntry,
    arguments: str,
    scope: CallScope,
    *,
    seconds: float = WAIT_SECONDS,
    call_id: str | None = None,
) -> Envelope:
    """Call a method for the chat of ``scope``, which may be woken, and wait for its result."""
    deadline = datetime.now(UTC) + timedelta(seconds=seconds)
    invocation = scope.call(entry, arguments, call_id=call_id or new_id(), deadline=deadline)
    return await services.caller.call(invocation, lane=services.dispatcher.lane_of(entry))
