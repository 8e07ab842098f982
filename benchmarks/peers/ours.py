"""The contenders of this project: a methods worker, called as the bridge calls it and from a sandbox."""

from __future__ import annotations

import asyncio
import json
from abc import abstractmethod
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

from benchmarks.harness.contender import (
    CALL_SECONDS,
    TEXT,
    AsyncClient,
    Contender,
    Latencies,
    NotAvailableError,
    Setup,
)
from benchmarks.harness.limited import limit, limited_command
from benchmarks.harness.served import call_served, served
from nekro.app import use_cases

if TYPE_CHECKING:
    from nekro.app.services import Services
    from nekro.plugins.entries import MethodEntry

__all__ = ["BRIDGE", "SANDBOX", "BridgeClient", "SandboxClient"]

_PLUGINS = Path(__file__).with_name("plugins")
_METHOD = "bench.probe.probe"
_CHAT = "bench_chat"
_RUN_SECONDS = 3600
_OUTPUT_BYTES = 4 << 20

#: The code in the sandbox; it prints one JSON line.
_PROGRAM = Template("""\
import json, threading, time

TEXT = $text

def checked(number):
    answer = probe(number, TEXT)
    if answer != {"number": number + 1, "text": TEXT}:
        raise SystemExit(f"call {number} was answered {answer!r}")

def sequential(calls, warm_up):
    latencies = []
    for number in range(warm_up + calls):
        began = time.perf_counter()
        checked(number)
        latencies.append(time.perf_counter() - began)
    return latencies[warm_up:]

def flood(calls, in_flight):
    numbers, failures = iter(range(calls)), []

    def caller():
        try:
            for number in numbers:
                checked(number)
        except BaseException as exc:
            failures.append(repr(exc))

    # Small, because a sandbox counts the address space of a hundred stacks.
    threading.stack_size(256 << 10)
    threads = [threading.Thread(target=caller) for _ in range(in_flight)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise SystemExit(failures[0])
    return time.perf_counter() - began

def peak_bytes():
    with open("/proc/self/status") as status:
        peaks = [line.split()[1] for line in status if line.startswith("VmHWM:")]
    return int(peaks[0]) * 1024

measured = $call
print(json.dumps({"measured": measured, "peak_bytes": peak_bytes()}))
""")


def _environment(setup: Setup) -> dict[str, str]:
    """Return settings: defaults, except addresses and the time limit of a run."""
    return {
        "NEKRO_BROKER__URL": setup.redis_url,
        "NEKRO_DATA_DIR": str(Path(setup.directory) / "data"),
        "NEKRO_PLUGINS__DIRS": str(_PLUGINS),
        "NEKRO_LOG__LEVEL": "WARNING",
        "NEKRO_SANDBOX__WALL_SECONDS": str(_RUN_SECONDS),
    }


def _limits(setup: Setup) -> dict[str, dict[str, int]]:
    return {
        "sandbox": {
            "max_calls": 1_000_000_000,
            "max_calls_in_flight": setup.in_flight,
            "max_processes": setup.in_flight + 64,
            "cpu_seconds": _RUN_SECONDS,
            "output_keep_bytes": _OUTPUT_BYTES,
        }
    }


def _worker_commands(setup: Setup) -> list[list[str]]:
    nekro = limited_command(_limits(setup))
    return [[*nekro, "worker", "--lane", "methods", "--name", f"bench-{i}"] for i in range(setup.workers)]


def _prepare(setup: Setup) -> None:
    from broker_config.settings import Settings
    from storage.migrate import upgrade

    settings = Settings.load(env_file=None)
    asyncio.run(upgrade(settings.database, settings.data_dir))


class _ServicesClient(AsyncClient):
    """A client with the services of a rounds worker."""

    _services: Services

    def __init__(self, setup: Setup) -> None:
        limit(_limits(setup))
        super().__init__()

    async def open(self) -> None:
        from broker_config.settings import Settings
        from nekro.app.services import Services
        from nekro_agent.core.logger import configure
        from workers.process import keep_what_is_loaded

        settings = Settings.load(env_file=None)
        configure(level=settings.log.level)
        self._services = Services.load(settings, role="cli")
        await self._services.start()
        await self.begin()
        keep_what_is_loaded()  # as in a rounds worker

    async def shut(self) -> None:
        await self._services.close()

    @abstractmethod
    async def begin(self) -> None:
        """Prepare what needs no worker."""


class BridgeClient(_ServicesClient):
    """Calls as the bridge does: encode arguments, sign an invocation, ``MethodCaller``, decode the value."""

    async def begin(self) -> None:
        from nekro.app.calls.dispatch import CallScope

        self._entry: MethodEntry | None = None
        self._scope = CallScope(chat=await self._services.chat(_CHAT), user_id=None)
        self._return_bytes = self._services.settings.sandbox.return_bytes

    async def call(self, number: int) -> object:
        from nekro.wire.values import decode_value, encode_arguments

        if self._entry is None:
            self._entry = await served(self._services, _METHOD)
        envelope = await call_served(
            self._services,
            self._entry,
            encode_arguments((number, TEXT), {}),
            self._scope,
            seconds=CALL_SECONDS,
        )
        return decode_value(envelope.value_bytes(), max_bytes=self._return_bytes)


class SandboxClient(_ServicesClient):
    """Calls from code in a sandbox: each measurement is one run, timed by the code itself."""

    _peak_bytes = 0
    _is_served = False

    async def begin(self) -> None:
        from nekro_agent.errors import SandboxUnavailableError

        try:
            await self._services.sandboxes()
        except SandboxUnavailableError as exc:
            await self._services.close()
            raise NotAvailableError(str(exc)) from exc

    async def call(self, number: int) -> object:
        raise NotImplementedError("calls are made inside the sandbox")

    def peak_bytes(self) -> int:
        return self._peak_bytes

    async def _sequential(self, calls: int, warm_up: int) -> Latencies:
        latencies: Latencies = await self._run(f"sequential({calls}, {warm_up})")
        return latencies

    async def _flood(self, calls: int, in_flight: int) -> float:
        return float(await self._run(f"flood({calls}, {in_flight})"))

    async def _run(self, call: str) -> Any:
        if not self._is_served:
            await served(self._services, _METHOD)
            self._is_served = True
        report = await use_cases.run_code(
            self._services,
            _PROGRAM.substitute(text=repr(TEXT), call=call),
            chat_key=_CHAT,
            user_id=None,
            follow_up=False,
            file_name="probe.py",
        )
        if report.stop_type.name != "NORMAL":
            raise RuntimeError(f"{call} ended with {report.stop_type.name}: {report.output[-1000:]}")
        said = json.loads(report.output)
        self._peak_bytes = max(self._peak_bytes, said["peak_bytes"])
        return said["measured"]


BRIDGE = Contender(
    name="nekro-bridge",
    about="nekro worker --lane methods with the shipped plugins, called as the bridge calls (MethodCaller)",
    modules=("nekro.app.services", "nekro.cli.main"),
    worker_commands=_worker_commands,
    open_client=BridgeClient,
    ours=True,
    prepare=_prepare,
    environment=_environment,
)

SANDBOX = Contender(
    name="nekro-sandbox",
    about="the same worker, called by code in the sandbox (100 in flight: as many threads in it)",
    modules=("nekro.app.services", "nekro.cli.main"),
    worker_commands=_worker_commands,
    open_client=SandboxClient,
    ours=True,
    prepare=_prepare,
    environment=_environment,
)
