"""Where nothing hides the host's processes, code must not reach them by the rights of its user."""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path

import pytest

from broker_config.settings import SandboxSettings
from nekro_agent.errors import SandboxUnavailableError
from sandbox import RunRequest, RunResult, SandboxManager, StopType, StubCall, StubResult
from sandbox.drivers.supervised import LandlockDriver
from sandbox.guest.confine import LEAST_LANDLOCK, landlock_version
from storage.areas import DataAreas

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


async def run(root: Path, code: str) -> RunResult:
    settings = SandboxSettings(driver="landlock")
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


@pytest.mark.skipif(landlock_version() < LEAST_LANDLOCK, reason="this kernel's Landlock is too old")
def test_code_cannot_change_another_process_of_its_user(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    # The code's own second process stands for one of the same user outside: a filter cannot tell them.
    code = (
        "import os, time\nother = os.fork()\nif other == 0:\n    time.sleep(20)\n    os._exit(0)\n"
        + ATTACK
        + "\nos.kill(other, 9)\n"
    )
    root = Path("/tmp", f"nekro-landlock-{os.getpid()}")
    root.mkdir(mode=0o755)
    try:
        result = asyncio.run(run(root, code))
    except SandboxUnavailableError as exc:
        pytest.skip(str(exc))
    finally:
        shutil.rmtree(root)
    assert result.stop_type is StopType.NORMAL, result
    lines = dict(line.split(" ", 1) for line in result.output.splitlines())
    refused = {name: lines[name] for name in ("prlimit", "affinity", "scheduler", "priority", "user")}
    assert set(refused.values()) == {"1"}, refused
    assert lines["own"] == "limits work"
