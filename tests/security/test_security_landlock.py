"""Without hidden host processes, code must not use its user's permissions on them."""

from __future__ import annotations

import asyncio
import os
import subprocess
from pathlib import Path

import pytest

from broker_config.settings import SandboxSettings
from nekro.sandbox.drivers.supervised import LandlockDriver
from nekro.sandbox.guest.confine import LEAST_LANDLOCK, landlock_version
from nekro.sandbox.limits import proc_files
from nekro.sandbox.limits.processes import shared_out
from nekro.sandbox.manager import SandboxManager
from nekro.sandbox.models import Limit, RunRequest, RunResult, StopType, StubCall, StubResult
from nekro_agent.errors import SandboxUnavailableError
from storage.files.areas import DataAreas

ATTACK = """
import os, resource
def attempt(name, action):
    try:
        action()
    except OSError as exc:
        print(name, exc.errno)
    else:
        print(name, "done")
attempt("prlimit", lambda: resource.prlimit(other, resource.RLIMIT_CORE))
attempt("affinity", lambda: os.sched_setaffinity(other, {0}))
attempt("scheduler", lambda: os.sched_setscheduler(other, os.SCHED_BATCH, os.sched_param(0)))
attempt("priority", lambda: os.setpriority(os.PRIO_PROCESS, other, 19))
attempt("user", lambda: os.setpriority(os.PRIO_USER, 0, 19))
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
os.sched_setaffinity(0, os.sched_getaffinity(0))
print("own limits work")
"""


async def run(root: Path, code: str, **changes: int) -> RunResult:
    settings = SandboxSettings.model_validate({"driver": "landlock"} | changes)
    manager = SandboxManager(settings, DataAreas(root), driver=LandlockDriver(settings))
    await manager.start()
    try:
        return await manager.run(
            RunRequest(
                run_id="run", chat_key="chat", container_key="box", code=code, methods=(), dispatch=refuse
            )
        )
    finally:
        await manager.close()


async def refuse(call: StubCall) -> StubResult:
    raise AssertionError(f"no method was granted: {call}")


needs_landlock = pytest.mark.skipif(
    landlock_version() < LEAST_LANDLOCK, reason="this kernel's Landlock is too old"
)


def outcome(root: Path, code: str, **settings: int) -> RunResult:
    try:
        return asyncio.run(run(root, code, **settings))
    except SandboxUnavailableError as exc:
        pytest.skip(str(exc))


@needs_landlock
def test_code_cannot_change_another_process_of_its_user(passable_dir: Path) -> None:
    # The code's own second process represents one of the same user outside: a filter cannot distinguish them.
    second = "import os, time\nother = os.fork()\nif other == 0:\n    time.sleep(20)\n    os._exit(0)\n"
    result = outcome(passable_dir, second + ATTACK + "\nos.kill(other, 9)\n")
    assert result.stop_type is StopType.NORMAL, result
    lines = dict(line.split(" ", 1) for line in result.output.splitlines())
    refused = {name: lines[name] for name in ("prlimit", "affinity", "scheduler", "priority", "user")}
    assert set(refused.values()) == {"1"}, refused
    assert lines["own"] == "limits work"


@needs_landlock
def test_other_processes_of_the_user_do_not_use_up_the_limit_of_processes(passable_dir: Path) -> None:
    """As an ordinary user without a namespace of users, the kernel counts all processes of the user."""
    code = """
import os
children = []
try:
    while len(children) < 500:
        child = os.fork()
        if child == 0:
            os.close(release)
            os.read(held, 1)
            os._exit(0)
        children.append(child)
except BlockingIOError:
    pass
print(len(children))
os.close(release)
for child in children:
    os.waitpid(child, 0)
"""
    others = [subprocess.Popen(["sleep", "1000"]) for _ in range(40)]
    try:
        result = outcome(passable_dir, "import os\nheld, release = os.pipe()\n" + code, max_processes=30)
    finally:
        for other in others:
            other.kill()
        for other in others:
            other.wait()
    assert result.stop_type is StopType.NORMAL, result
    assert 0 < int(result.output) < 100, result.output


@needs_landlock
def test_tmp_is_limited_and_deleted_with_the_run(passable_dir: Path) -> None:
    """With landlock it is a directory on the host's disk, not a file system with a size."""
    code = """
import os, tempfile, time
os.chdir(tempfile.gettempdir())
print(os.getcwd(), flush=True)
with open("big", "wb") as file:
    file.write(b"x" * (8 << 20))
for _ in range(1100):
    os.mkdir("d" * 50)
    os.chdir("d" * 50)
time.sleep(20)
"""
    result = outcome(passable_dir, code, tmp_bytes=4 << 20)
    assert (result.stop_type, result.limit) == (StopType.ERROR, Limit.DISK)
    assert not Path(result.output.strip()).parent.exists()


def test_memory_of_an_unreadable_process_is_charged(monkeypatch: pytest.MonkeyPatch) -> None:
    """``PR_SET_DUMPABLE`` closes ``smaps_rollup`` to a service of the same user, but not ``statm``."""
    readable = proc_files.read

    def closed(path: str | Path) -> bytes:
        if str(path).endswith("smaps_rollup"):
            raise PermissionError(13, "closed")
        return readable(path)

    monkeypatch.setattr(proc_files, "read", closed)
    assert shared_out([os.getpid()]) > 10 << 20
