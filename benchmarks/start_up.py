"""Times of commands and of `nekro up` with the shipped plugins and with 70 more.

``python -m benchmarks.start_up [--plugins 70] [--repetitions 5]`` generates the plugins in a temporary
directory, starts `nekro up` there, and prints for each command its processor time (user and system) and its
duration: median, least and greatest. It also prints the time from the start of `nekro up` to its readiness
and the processor time of all its processes until then, the time that a round takes from its start to the
answer of a scripted model, which is that of its prompt, and the memory of a methods worker and of all workers
with the process that they are forked from (resident, and proportional, which shares pages among processes).
"""

from __future__ import annotations

import argparse
import os
import resource
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Final

from benchmarks.harness.usage import tree_cpu_seconds
from nekro.cli.services.ownership import read_running
from nekro.sandbox.guest.confine import children_of

_NEKRO: Final = (sys.executable, "-P", "-m", "nekro.cli.main")
_READY_SECONDS: Final = 180.0
_METHODS: Final = 8

_HEAD: Final = '''"""Generated plugin {number}."""

import json
from typing import Any

from pydantic import Field

from nekro_agent.api.plugin import ConfigBase, NekroPlugin, SandboxMethodType
from nekro_agent.api.schemas import AgentCtx

plugin = NekroPlugin("Generated {number}", "generated_{number}", "A generated plugin.", "1.0.0", "bench", "")


@plugin.mount_config()
class Config(ConfigBase):
    """Configuration."""

    LIMIT: int = Field(default=10, title="Limit")
    KEY: str = Field(default="", title="Key")


@plugin.mount_prompt_inject_method("generated_{number}")
async def inject(_ctx: AgentCtx) -> str:
    """Add a line to the prompt."""
    return "Plugin {number} is ready."
'''
_METHOD: Final = '''

@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "work_{number}_{method}")
async def work_{number}_{method}(
    _ctx: AgentCtx, text: str, times: int = 1, options: dict[str, Any] | None = None
) -> str:
    """Repeat a text, as an example of a method with a documentation of usual length.

    Args:
        text: the text to repeat.
        times: how often.
        options: not used.

    Returns:
        The repeated text.
    """
    return json.dumps([text] * times)
'''


@dataclass(frozen=True, kw_only=True)
class Spent:
    """Times of one run, in seconds."""

    cpu: float
    wall: float


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--plugins", type=int, default=70, help="generated plugins (default: %(default)s)")
    parser.add_argument("--repetitions", type=int, default=5, help="runs per command (default: %(default)s)")
    arguments = parser.parse_args()
    print(f"load {os.getloadavg()[0]:.2f}, {os.cpu_count()} cores, Python {sys.version.split()[0]}")
    for count in dict.fromkeys((0, arguments.plugins)):
        with tempfile.TemporaryDirectory() as directory:
            _measure(Path(directory), plugins=count, repetitions=arguments.repetitions)


def write_plugins(folder: Path, count: int) -> None:
    """Write ``count`` plugins with eight methods each."""
    folder.mkdir()
    for number in range(count):
        methods = [_METHOD.format(number=number, method=method) for method in range(_METHODS)]
        (folder / f"generated_{number}.py").write_text(
            _HEAD.format(number=number) + "".join(methods), "utf-8"
        )


def _measure(directory: Path, *, plugins: int, repetitions: int) -> None:
    write_plugins(directory / "plugins", plugins)
    (directory / "code.py").write_text("print(list_notes())", "utf-8")
    (directory / "script.yaml").write_text("- answer: Nothing to do.\n", "utf-8")
    own = {name: value for name, value in os.environ.items() if not name.startswith("NEKRO_")}
    environ = {
        **own,
        "NEKRO_DATA_DIR": str(directory / "data"),
        "NEKRO_PLUGINS__DIRS": str(directory / "plugins"),
        "NEKRO_LLM__SCRIPT": str(directory / "script.yaml"),
    }
    print(f"\nshipped plugins and {plugins} generated ones ({plugins * _METHODS} methods)")
    with _up(environ, directory) as ready:
        print(f"  {'up to ready':24} CPU {ready.cpu:6.2f} s, wall {ready.wall:6.2f} s")
        commands: Sequence[tuple[str, tuple[str, ...]]] = (
            ("--help", ("--help",)),
            ("methods", ("methods",)),
            ("plugins", ("plugins",)),
            ("call", ("call", "list_notes", "--user-id", "ada")),
            ("exec", ("exec", "code.py", "--user-id", "ada")),
        )
        for name, command in commands:
            _run(command, environ, directory)  # warm: files in the page cache, the chat exists
            _print(name, [_run(command, environ, directory) for _ in range(repetitions)])
        for _ in range(repetitions + 1):
            _run(("send", "prompts", "hello", "--wait"), environ, directory)
        print(f"  {'prompt of a round':24} {_prompts(directory / 'data')}")
        running = read_running(directory / "data")
        worker = next(worker for worker in running.workers if worker.lane == "methods") if running else None
        if worker is not None:
            print(f"  {'methods worker':24} {_memory([worker.pid])}")
        if running is not None:
            print(f"  {'all workers':24} {_memory(_workers(running.pid))}")


@contextmanager
def _up(environ: dict[str, str], directory: Path) -> Iterator[Spent]:
    with (directory / "up.log").open("w") as log:
        began = time.monotonic()
        process = subprocess.Popen(
            [*_NEKRO, "up"], env=environ, cwd=directory, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
        try:
            while read_running(directory / "data") is None:
                if process.poll() is not None or time.monotonic() - began > _READY_SECONDS:
                    raise SystemExit((directory / "up.log").read_text("utf-8")[-2000:])
                time.sleep(0.05)
            wall = time.monotonic() - began
            yield Spent(cpu=tree_cpu_seconds([process.pid]), wall=wall)
        finally:
            process.terminate()
            process.wait()


def _run(command: tuple[str, ...], environ: dict[str, str], directory: Path) -> Spent:
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    done = subprocess.run(
        [*_NEKRO, *command],
        env=environ,
        cwd=directory,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    wall, after = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode != 0:
        raise SystemExit(f"nekro {' '.join(command)}: {done.stderr}")
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Spent(cpu=cpu, wall=wall)


def _print(name: str, runs: Sequence[Spent]) -> None:
    def spread(values: Sequence[float]) -> str:
        return f"{statistics.median(values):6.2f} s ({min(values):.2f}–{max(values):.2f})"

    cpu, wall = [run.cpu for run in runs], [run.wall for run in runs]
    print(f"  {name:24} CPU {spread(cpu)}, wall {spread(wall)}")


def _prompts(data_dir: Path) -> str:
    """Times from the start of a round to its answer, without the first round."""
    (path,) = data_dir.rglob("*.db")
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as database:
        rows = database.execute(
            "SELECT started_at, answered_at, prompt_chars FROM rounds WHERE chat_key = 'prompts'"
            " ORDER BY sequence"
        ).fetchall()
    taken = [
        (datetime.fromisoformat(answered) - datetime.fromisoformat(started)).total_seconds() * 1000
        for started, answered, _ in rows
    ][1:]
    return f"{statistics.median(taken):6.1f} ms ({min(taken):.1f}–{max(taken):.1f}), {rows[-1][2]} characters"


def _workers(up: int) -> list[int]:
    """Return the workers of a `nekro up`, and the process that they are forked from."""
    commands = {pid: Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0") for pid in children_of(up)}
    return [pid for pid, words in commands.items() if b"nekro.cli.main" in words and b"worker" in words]


def _memory(pids: Sequence[int]) -> str:
    sizes = dict.fromkeys(("Rss", "Pss"), 0.0)
    for pid in pids:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text("utf-8").rstrip("\n").split("\n")[1:]:
            name, _, rest = line.partition(":")
            if name in sizes:
                sizes[name] += int(rest.split()[0]) / 1024
    return f"{sizes['Rss']:6.0f} MiB resident, {sizes['Pss']:.0f} MiB proportional"


if __name__ == "__main__":
    main()
