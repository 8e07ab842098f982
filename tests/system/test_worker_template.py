"""`nekro up` imports plugins once and forks its workers, which are as those that are started as programs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from forked_process import ForkedCommand
from nekro_shell import NEKRO, Shell, open_shell, running_up
from waiting import WAIT_SECONDS, wait_until

from nekro.cli.services.ownership import read_running

pytestmark = pytest.mark.extended

HEAD = """
import json
import os
import random
import secrets
import sys
import uuid

from nekro_agent.api.plugin import NekroPlugin, SandboxMethodType
from nekro_agent.api.schemas import AgentCtx


def note(**values):
    with open({journal!r}, "a") as file:
        file.write(json.dumps({{"plugin": "{name}", **values}}) + "\\n")


note(event="import")
plugin = NekroPlugin("n", "{name}", "d", "1", "Ada", "u")
"""
#: Imported once: it is the last one. Its init, which each worker runs, notes what must differ.
PLAIN = """
VERSION = 1

@plugin.mount_init_method()
async def init():
    note(event="init", pid=os.getpid(), random=random.random(), uuid=str(uuid.uuid4()),
         token=secrets.token_hex(), imports=sorted(sys.modules))

@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "version")
async def version(_ctx: AgentCtx) -> list[int]:
    \"\"\"Return the version and the process.\"\"\"
    return [VERSION, os.getpid()]
"""
#: Imported by each worker: the thread of another process would not answer.
THREADED = """
import queue
import threading

asked, answers = queue.Queue(), queue.Queue()

def serve():
    while True:
        answers.put(asked.get() * 2)

threading.Thread(target=serve, daemon=True).start()

@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "doubled")
async def doubled(_ctx: AgentCtx, number: int) -> int:
    \"\"\"Double a number on the thread.\"\"\"
    asked.put(number)
    return answers.get(timeout=60)
"""
CONNECTED = """
import socket

first, second = socket.socketpair()

@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "echo")
async def echo(_ctx: AgentCtx, number: int) -> int:
    \"\"\"Send a number through the sockets.\"\"\"
    first.send(str(number).encode())
    return int(second.recv(100))
"""
CRASHING = "os.kill(os.getpid(), 11)\n"


class World:
    """A shell with plugins that keep a journal."""

    def __init__(self, shell: Shell) -> None:
        self.shell, self._journal = shell, shell.directory / "journal"
        for name, code in {"zplain": PLAIN, "threaded": THREADED, "connected": CONNECTED}.items():
            self.write(name, code)

    def write(self, name: str, code: str) -> None:
        head = HEAD.format(journal=str(self._journal), name=name)
        (self.shell.directory / "plugins" / f"{name}.py").write_text(head + code, "utf-8")

    def notes(self, name: str, event: str) -> list[dict[str, Any]]:
        notes = map(json.loads, self._journal.read_text("utf-8").splitlines())
        return [note for note in notes if note["plugin"] == name and note["event"] == event]

    def call(self, method: str, *args: object) -> Any:
        return self.shell("call", method, "--args", json.dumps(args), "--user-id", "u").value

    def workers(self) -> list[int]:
        running = read_running(self.shell.data_dir)
        return [worker.pid for worker in running.workers] if running else []

    def replaced(self, pid: int) -> int:
        """Kill a worker; returns the process that replaces it."""
        others = set(self.workers())
        os.kill(pid, signal.SIGKILL)
        (new,) = wait_until(lambda: set(self.workers()) - others, what="another worker")
        return int(new)


@pytest.fixture
def world() -> Iterator[World]:
    with open_shell({}) as shell:
        yield World(shell)


def template_of(up: ForkedCommand, workers: list[int]) -> int:
    """The process that forks: the child of the child of `nekro up` that is no worker."""
    parents = {pid: parent_of(pid) for pid in map(int, filter(str.isdigit, os.listdir("/proc")))}
    below = {pid: parent for pid, parent in parents.items() if parents.get(parent) == up.pid}
    program = os.readlink(f"/proc/{up.pid}/exe")
    (template,) = (
        pid
        for pid, parent in below.items()
        if parent not in workers and os.readlink(f"/proc/{pid}/exe") == program
    )
    return template


def parent_of(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def test_workers_share_the_imports_that_can_be_shared(world: World) -> None:
    world.write("crashing", CRASHING)
    with running_up(world.shell):
        workers = world.workers()
        assert len(workers) == 3
        assert len(world.notes("zplain", "import")) == 1
        inits = world.notes("zplain", "init")
        assert sorted(note["pid"] for note in inits) == sorted(workers)
        for drawn in ("random", "uuid", "token"):
            assert len({note[drawn] for note in inits}) == 3
        # One trial, and each worker.
        assert len(world.notes("threaded", "import")) == len(world.notes("connected", "import")) == 4
        assert world.call("doubled", 4) == 8
        assert world.call("echo", 5) == 5
        assert len(world.notes("crashing", "import")) == 1
        listed = {entry["path"]: entry for entry in world.shell("plugins", "--json").value}
        crashing = listed[str(world.shell.directory / "plugins" / "crashing.py")]
        assert (crashing["status"], crashing["error"]) == (
            "failed",
            "its import ended the process with SIGSEGV",
        )


def test_a_killed_worker_is_forked_again_until_its_plugins_change(world: World) -> None:
    with running_up(world.shell):
        methods = world.call("version")[1]
        again = world.replaced(methods)
        assert world.call("version") == [1, again]
        assert len(world.notes("zplain", "import")) == 1
        world.write("zplain", PLAIN.replace("VERSION = 1", "VERSION = 2"))
        last = world.replaced(again)
        assert world.call("version") == [2, last]
        assert len(world.notes("zplain", "import")) == 2
    with running_up(world.shell):
        assert world.call("version")[0] == 2


def test_workers_outlive_the_template_and_are_replaced_without_it(world: World) -> None:
    with running_up(world.shell) as up:
        workers = world.workers()
        os.kill(template_of(up, workers), signal.SIGKILL)
        version, methods = world.call("version")
        assert methods in workers
        new = world.replaced(methods)
        assert world.call("version") == [version, new]
        assert set(workers) - {methods} < set(world.workers())
        assert len(world.notes("zplain", "import")) == 2


@pytest.mark.parametrize("in_store", [False, True])
def test_a_forked_worker_imports_nothing_that_all_workers_need(world: World, in_store: bool) -> None:
    """Needs an interpreter that was started for it: ours has imported all."""
    if in_store:
        world.shell.environment["NEKRO_FILES__URL"] = f"file://{world.shell.directory}/objects"
    code = "note(event='template', imports=sorted(sys.modules))\n"
    done = """
@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "imports")
async def imports(_ctx: AgentCtx) -> list[str]:
    \"\"\"Return the names of the modules.\"\"\"
    return sorted(sys.modules)
"""
    world.write("zzlast", code + done)
    up = subprocess.Popen(
        [*NEKRO, "up", "--methods", "2", "--long", "0", "--rounds", "0", "--gateway-port", "0"],
        env=world.shell.environment,
        cwd=world.shell.directory,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_until(lambda: len(world.workers()) == 2, what="nekro up")
        found = set(world.call("imports"))
    finally:
        up.send_signal(signal.SIGTERM)
        up.wait(WAIT_SECONDS)
    before = world.notes("zzlast", "template")[0]
    ours = (
        "broker_config",
        "celery",
        "nekro.app",
        "nekro.broker",
        "nekro.extensions",
        "nekro.plugins",
        "nekro.wire",
        "nekro_agent",
        "storage",
        "workers",
    )
    missing = {name for name in found - set(before["imports"]) if f"{name}.".startswith(ours)}
    # Only workers of this lane need these, or only while they run a call.
    assert missing <= ONLY_HERE
    assert ("storage.files.host_files" in found) == in_store, "hosts with one disk do without"


ONLY_HERE = {"workers.plugins.pinned", "workers.pools.thread_pool"}
