"""Measure downloads: their rate in comparison with curl and aria2c, and their effect on ordinary calls.

``speed`` fetches one file from one local server with each tool in turn (A B C … A B C …).
``beside`` runs a whole system under a constant rate of ordinary calls, in alternating windows: quiet
ones, and windows during which a worker downloads from a slow server that cuts each connection. In the
quiet windows the server is frozen and the download waits for it.
``hosts`` downloads with two hosts in turns that share no disk, and kills them; the last one completes.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Final

from benchmarks.harness.figures import percentile
from benchmarks.harness.processes import interrupted_by_sigterm
from benchmarks.harness.served import served
from nekro.app import use_cases
from nekro.wire.values import encode_arguments

__all__ = ["main", "parse"]

_EPILOG = """\
examples:
  python -m benchmarks.downloads speed
  python -m benchmarks.downloads speed --mebibytes 2048 --repetitions 7
  python -m benchmarks.downloads beside --mebibytes 2048 --calls-per-second 300
  python -m benchmarks.downloads hosts --mebibytes 10240 --kills 4
"""
_MEBI: Final = 1 << 20
_PLUGINS: Final = Path(__file__).parent / "peers" / "plugins"
_CUT_BYTES: Final = 200 * 1000 * 1000
_SLOW_BYTES_PER_SECOND: Final = 40 * 1000 * 1000


@dataclass
class Served:
    """A running file server, and the first byte of each request to it."""

    url: str
    starts: list[int] = field(default_factory=list)
    #: Bytes of each body, with ``--counts``.
    sent: list[int] = field(default_factory=list)
    pid: int = 0

    @contextmanager
    def standing_still(self) -> Iterator[None]:
        """Freeze the server; its connections stay open."""
        os.kill(self.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self.pid, signal.SIGCONT)


@contextmanager
def serving(path: Path, *options: str) -> Iterator[Served]:
    """Serve a file from a process of its own."""
    command = [sys.executable, "-m", "benchmarks.harness.file_server", str(path), *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    served = Served(url=f"http://127.0.0.1:{int(process.stdout.readline())}/file", pid=process.pid)

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("sent "):
                served.sent.append(int(line.split()[1]))
            else:
                served.starts.append(int(line))

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    try:
        yield served
    finally:
        process.kill()
        process.wait()
        thread.join(5)
        process.stdout.close()


def make_file(path: Path, size: int) -> str:
    """Write incompressible bytes; returns their SHA-256."""
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for _ in range(size // _MEBI):
            piece = os.urandom(_MEBI)
            digest.update(piece)
            file.write(piece)
    return digest.hexdigest()


def speed(mebibytes: int, repetitions: int) -> int:
    """Print MB/s of each tool, and the ratio to curl within each repetition."""
    with tempfile.TemporaryDirectory(prefix="nekro-bench-") as directory:
        source, target = Path(directory, "source"), Path(directory, "target")
        make_file(source, mebibytes * _MEBI)
        with serving(source) as served:
            tools = _tools(served.url, target)
            seconds: dict[str, list[float]] = {name: [] for name in tools}
            for _ in range(repetitions):
                for name, run in tools.items():
                    begin = time.perf_counter()
                    run()
                    seconds[name].append(time.perf_counter() - begin)
                    target.unlink()
    print(f"{mebibytes} MiB from a local server, {repetitions} repetitions in turns, medians")
    for name, values in seconds.items():
        rate = mebibytes * _MEBI / 1e6 / median(values)
        ratio = median(curl / own for curl, own in zip(seconds["curl"], values, strict=True))
        print(f"  {name:<28} {rate:8.0f} MB/s   {ratio:5.2f} of curl")
    for name in ("curl", "aria2c"):
        if shutil.which(name) is None:
            print(f"  {name} is not installed")
    return 0


def _tools(url: str, target: Path) -> dict[str, Callable[[], None]]:
    tools: dict[str, Callable[[], None]] = {}

    def program(*command: str) -> Callable[[], None]:
        def run() -> None:
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)

        return run

    if shutil.which("curl"):
        tools["curl"] = program("curl", "-s", "-o", str(target), url)
        both = f"curl -s -o '{target}' '{url}' && sha256sum '{target}'"
        tools["curl, then sha256sum"] = program("sh", "-c", both)
    if shutil.which("aria2c"):
        common = ("-q", "--file-allocation=none", "-d", str(target.parent), "-o", target.name, url)
        tools["aria2c, 4 connections"] = program("aria2c", "-x4", "-s4", *common)
    for connections in (1, 4):
        tools[f"fetch, {connections} connection{'s'[: connections - 1]}"] = _fetch(url, target, connections)
    return tools


def _fetch(url: str, target: Path, connections: int) -> Callable[[], None]:
    import uvloop

    from nekro_agent import runtime
    from nekro_agent.downloads.download import fetch
    from nekro_agent.runtime import DownloadPolicy
    from nekro_agent.testing import InMemoryRuntime

    policy = DownloadPolicy(allow_private=("127.0.0.0/8",), connections=connections)

    def run() -> None:
        world = InMemoryRuntime(data_dir=target.parent, downloads=policy)
        with runtime.bound(world.runtime):
            uvloop.run(fetch(url, target))

    return run


@dataclass(frozen=True, kw_only=True)
class _Window:
    """The calls of one window, and the CPU use during it."""

    is_quiet: bool
    #: Seconds of each call, counted from its due time.
    took: list[float]
    #: Cores that each kind of process used, on average.
    cores: dict[str, float]

    @property
    def p99(self) -> float:
        return percentile(self.took, 99)


async def beside(mebibytes: int, calls_per_second: int, window_seconds: float, bytes_per_second: int) -> int:
    """Print call latencies and the worker's memory while a large file is downloaded slowly."""
    from broker_config.settings import Settings
    from nekro.cli.output import Output
    from nekro.cli.services.system import CALL_LANES, open_services
    from nekro_agent.core.logger import configure

    configure(level="WARNING")
    with tempfile.TemporaryDirectory(prefix="nekro-bench-") as directory:
        source = Path(directory, "source")
        sha256 = make_file(source, mebibytes * _MEBI)
        # Pending writes of the file must not fall into a window.
        await asyncio.to_thread(os.sync)
        options = ("--cut-bytes", str(_CUT_BYTES), "--bytes-per-second", str(bytes_per_second))
        settings = Settings.load(
            env_file=None,
            data_dir=Path(directory, "data"),
            plugins={"dirs": (_PLUGINS,)},
            downloads={"allow_private": ("127.0.0.0/8",), "connections": 1},
        )
        with serving(source, *options) as served:
            opened = open_services(settings, command="bench", lanes=CALL_LANES, output=Output())
            async with opened as (_, services):
                await _calls(services, calls_per_second, seconds=3)
                windows = [await _window(services, calls_per_second, seconds=window_seconds, is_quiet=True)]
                download = asyncio.create_task(_download(services, served.url, sha256))
                memory = asyncio.create_task(_memory(services, download))
                while not download.done():
                    busy = await _window(
                        services, calls_per_second, seconds=window_seconds, is_quiet=False, until=download
                    )
                    if len(busy.took) >= calls_per_second * window_seconds / 2:
                        windows.append(busy)
                    with served.standing_still():
                        windows.append(
                            await _window(services, calls_per_second, seconds=window_seconds, is_quiet=True)
                        )
                text = await download
                sizes = await memory
    _report(mebibytes, calls_per_second, bytes_per_second, text, served, windows, sizes)
    return 0 if sha256 in text else 1


async def _window(
    services: Any, rate: int, *, seconds: float, is_quiet: bool, until: asyncio.Task[Any] | None = None
) -> _Window:
    directory = str(services.settings.data_dir)
    before, began = _cpu_seconds(directory), time.perf_counter()
    took = await _calls(services, rate, seconds=seconds, until=until)
    lasted = time.perf_counter() - began
    used = {name: (total - before.get(name, 0.0)) / lasted for name, total in _cpu_seconds(directory).items()}
    return _Window(is_quiet=is_quiet, took=took, cores=used)


def _cpu_seconds(directory: str) -> dict[str, float]:
    """Return the CPU time so far of this process and of the processes of the run, by kind."""
    tick = os.sysconf("SC_CLK_TCK")
    totals = {"caller": sum(os.times()[:2])}
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (entry / "cmdline").read_text().split("\0")
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            is_redis = any(directory in word for word in words) and "redis" in words[0]
            if int(fields[1]) != os.getpid() and not is_redis:
                continue
            lane = words[words.index("--lane") + 1] if "--lane" in words else None
            name = "redis" if is_redis else lane or "file server"
            totals[name] = totals.get(name, 0.0) + (int(fields[11]) + int(fields[12])) / tick
    return totals


async def _download(services: Any, url: str, sha256: str) -> str:
    envelope = await use_cases.invoke(
        services,
        "download_model",
        (url, "bench", sha256),
        {},
        chat_key="bench",
        user_id=None,
        timeout_seconds=3600,
    )
    return str(envelope.text)


async def _calls(
    services: Any, rate: int, *, seconds: float, until: asyncio.Task[Any] | None = None
) -> list[float]:
    """Call at a fixed rate, regardless of the answers; returns each call's seconds from its due time.

    Args:
        until: ends it before ``seconds``.
    """
    took: list[float] = []
    entry, chat = await served(services, "probe"), await services.chat("bench")
    arguments = encode_arguments((1, "text"), {})

    async def one(due: float) -> None:
        await services.dispatcher.invoke_once(entry, arguments, chat=chat, user_id=None, timeout_seconds=60)
        took.append(time.perf_counter() - due)

    begin = time.perf_counter()
    number = 0
    async with asyncio.TaskGroup() as group:
        while time.perf_counter() - begin < seconds and (until is None or not until.done()):
            due = begin + number / rate
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            group.create_task(one(due))
            number += 1
    return took


async def _memory(services: Any, download: asyncio.Task[Any]) -> list[int]:
    """Return the resident memory of the downloading worker in bytes, sampled once a second."""
    sizes: list[int] = []
    while not download.done():
        await asyncio.sleep(1)
        async with services.database.read() as transaction:
            jobs = await transaction.jobs.newest(limit=1)
        pid = int((jobs[0].worker or "").rpartition(":")[2] or 0) if jobs else 0
        if pid:
            resident = Path(f"/proc/{pid}/statm").read_text().split()[1]
            sizes.append(int(resident) * os.sysconf("SC_PAGE_SIZE"))
    return sizes


def _report(
    mebibytes: int,
    rate: int,
    bytes_per_second: int,
    text: str,
    served: Served,
    windows: Sequence[_Window],
    sizes: Sequence[int],
) -> None:
    again = sum(start == 0 for start in served.starts) - 1
    print(f"{mebibytes} MiB at {bytes_per_second / 1e6:.0f} MB/s, cut every {_CUT_BYTES / 1e6:.0f} MB")
    print(f"  {text}")
    print(f"  requests {len(served.starts)}, from zero again {again}")
    print(
        f"  worker memory MiB: first {sizes[0] / _MEBI:.0f}, middle {sizes[len(sizes) // 2] / _MEBI:.0f}, "
        f"last {sizes[-1] / _MEBI:.0f}, most {max(sizes) / _MEBI:.0f}"
    )
    kinds = {"quiet": [w for w in windows if w.is_quiet], "beside": [w for w in windows if not w.is_quiet]}
    for name, own in kinds.items():
        took = [seconds for window in own for seconds in window.took]
        each = " ".join(f"{window.p99 * 1000:.1f}" for window in own)
        cores = {kind: median(window.cores.get(kind, 0.0) for window in own) for kind in own[0].cores}
        print(
            f"  {name:<7} {len(took):6} calls at {rate}/s: p50 {percentile(took, 50) * 1000:.2f} ms, "
            f"p99 {percentile(took, 99) * 1000:.2f} ms; of each window {each}"
        )
        print("          cores: " + ", ".join(f"{kind} {used:.2f}" for kind, used in sorted(cores.items())))
    quiet, busy = (median(window.p99 for window in own) for own in kinds.values())
    print(f"  p99 beside / quiet, medians of the windows: {busy / quiet:.2f}")


def hosts(mebibytes: int, kills: int) -> int:
    """Print what two hosts without a shared disk fetch, and the memory of each, while they are killed."""
    from broker_config.settings import DatabaseSettings
    from storage.migrate import upgrade

    with tempfile.TemporaryDirectory(prefix="nekro-bench-") as directory:
        root, size = Path(directory), mebibytes * _MEBI
        sha256 = make_file(root / "source", size)
        database = f"sqlite:///{root / 'nekro.db'}"
        asyncio.run(upgrade(DatabaseSettings(url=database), root))
        with serving(root / "source", "--counts") as served:
            begin = time.perf_counter()
            for turn in range(kills + 1):
                at = size * (turn + 1) // (kills + 1) if turn < kills else None
                _host_turn(root, f"host{turn % 2}", database, served.url, at=at, sha256=sha256)
            seconds = time.perf_counter() - begin
        fetched = sum(served.sent)
    print(f"{mebibytes} MiB, {kills} kills, {seconds:.0f} s; requests from {served.starts}")
    print(f"  fetched / size: {fetched / size:.3f}")
    return 0


def _host_turn(root: Path, name: str, database: str, url: str, *, at: int | None, sha256: str) -> None:
    """Download on a host; kill it when it has ``at`` bytes."""
    (root / name).mkdir(exist_ok=True)
    command = [sys.executable, "-m", "benchmarks.harness.downloading_host"]
    command += [database, f"file://{root / 'objects'}", str(root / name), url]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        most, last = 0, ""
        for line in process.stdout:
            last = line
            with suppress(OSError, IndexError):
                status = Path(f"/proc/{process.pid}/status").read_text()
                most = max(most, int(status.partition("RssAnon:")[2].split()[0]) << 10)
            if at is not None and line.startswith("progress") and int(line.split()[1]) >= at:
                process.kill()
                break
    outcome = "killed" if at is not None else ("complete" if sha256 in last else "wrong digest")
    print(f"  {name}: {outcome}, most anonymous memory {most / _MEBI:.0f} MiB", flush=True)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line; ends the process with code 2 when it is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.downloads",
        description=(__doc__ or "").split("\n", 1)[0],
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("what", choices=("speed", "beside", "hosts"))
    parser.add_argument("--mebibytes", type=int, default=1024, help="size of the file (default: %(default)s)")
    parser.add_argument("--repetitions", type=int, default=5, help="for speed (default: %(default)s)")
    parser.add_argument("--kills", type=int, default=2, help="for hosts (default: %(default)s)")
    parser.add_argument("--calls-per-second", type=int, default=300, help="for beside (default: %(default)s)")
    parser.add_argument(
        "--window-seconds",
        type=float,
        default=8,
        help="length of a window, for beside (default: %(default)s)",
    )
    parser.add_argument(
        "--megabytes-per-second",
        type=int,
        default=_SLOW_BYTES_PER_SECOND // 1_000_000,
        help="how fast the server sends, for beside (default: %(default)s)",
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one of the benchmarks."""
    interrupted_by_sigterm()
    options = parse(argv)
    if options.what == "speed":
        return speed(options.mebibytes, options.repetitions)
    if options.what == "hosts":
        return hosts(options.mebibytes, options.kills)
    rate = options.megabytes_per_second * 1_000_000
    return asyncio.run(beside(options.mebibytes, options.calls_per_second, options.window_seconds, rate))


if __name__ == "__main__":
    sys.exit(main())
