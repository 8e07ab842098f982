"""A method that ends its worker process: its caller gets the error at once, and other calls are repeated."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from nekro_shell import Shell, open_shell
from waiting import wait_until

from broker_config.embedded import socket_path
from broker_config.settings import BrokerSettings
from nekro.cli.running import ExitCode
from nekro.cli.services.ownership import read_running

pytestmark = pytest.mark.extended

PLUGIN = '''
import asyncio
import ctypes
import os
from pathlib import Path

from nekro_agent.api.plugin import NekroPlugin, SandboxMethodType
from nekro_agent.api.schemas import AgentCtx

plugin = NekroPlugin(
    name="Probe", module_name="probe", description="For tests.", version="1", author="t", url=""
)


def log(name):
    with (plugin.get_plugin_data_dir() / name).open("a") as file:
        file.write("x")


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "crash")
async def crash(_ctx: AgentCtx) -> None:
    """Crash."""
    log("crash")
    ctypes.string_at(0)


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "crash_beside")
async def crash_beside(_ctx: AgentCtx, name: str) -> None:
    """Crash: the first time beside another call, then when the code has its result."""
    log("crash_beside")
    again = (plugin.get_plugin_data_dir() / "crash_beside").stat().st_size > 1
    awaited = _ctx.fs.shared_path / "ended" if again else plugin.get_plugin_data_dir() / name
    while not awaited.exists():
        await asyncio.sleep(0.05)
    ctypes.string_at(0)


@plugin.mount_sandbox_method(SandboxMethodType.BEHAVIOR, "leave")
async def leave(_ctx: AgentCtx) -> str:
    """End the process."""
    log("leave")
    os._exit(3)


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "leave_long")
def leave_long(_ctx: AgentCtx) -> None:
    """End the process of a blocking method."""
    os._exit(4)


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "wait_once")
async def wait_once(_ctx: AgentCtx, name: str) -> str:
    """Wait without end, but the second time return."""
    log(name)
    if (plugin.get_plugin_data_dir() / name).stat().st_size > 1:
        return "repeated"
    await asyncio.Event().wait()


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "well")
async def well(_ctx: AgentCtx) -> str:
    """Say so."""
    return "well"
'''


@pytest.fixture(scope="module")
def shell() -> Iterator[Shell]:
    # With this lease, a caller that waited for its end would exceed the limit of every wait in these tests.
    settings = {"NEKRO_AGENT__LEASE_SECONDS": "3600"}
    settings["NEKRO_WORKERS__WAIT_SECONDS"] = "3600"  # code waits as long as a worker's start takes
    with open_shell(
        {"probe.py": PLUGIN}, **settings, NEKRO_WORKERS__LONG_METHODS="t.probe.leave_long"
    ) as shell:
        yield shell


def serving(shell: Shell, lane: str) -> int:
    """Process id of the lane's worker; waits while it is restarted."""

    def alive() -> int | None:
        running = read_running(shell.data_dir)
        ids = [worker.pid for worker in running.workers if worker.lane == lane] if running else []
        return ids[0] if ids and Path(f"/proc/{ids[0]}").exists() else None

    return int(wait_until(alive, what=f"a worker of lane {lane}"))


def runs(shell: Shell, name: str) -> int:
    file = shell.data_dir / "plugins" / "t.probe" / name
    return file.stat().st_size if file.exists() else 0


@pytest.mark.usefixtures("up")
@pytest.mark.parametrize(
    ("method", "end"), [("crash", "SIGSEGV"), ("leave", "exit code 3"), ("leave_long", "exit code 4")]
)
def test_a_call_that_ends_its_worker_fails_with_an_error(shell: Shell, method: str, end: str) -> None:
    lane = "long" if method == "leave_long" else "methods"
    before = serving(shell, lane)
    done = shell.inside("call", method, "--json")
    assert done.code == ExitCode.METHOD, done.err
    assert done.value["error"]["type"] == "OutcomeUnknownError"
    assert f"the call ended its worker process ({end})" in done.value["error"]["message"]
    wait_until(lambda: serving(shell, lane) != before, what="another worker")
    assert shell.inside("call", "well").out == "well\n"
    if method != "leave_long":
        assert runs(shell, method) == 1
    with redis.Redis(unix_socket_path=str(socket_path(shell.data_dir))) as client:
        key = f"{BrokerSettings().key_prefix}unacked.{lane}"
        # A worker acknowledges a call after it has sent its result.
        wait_until(
            lambda: client.hlen(key) == client.zcard(f"{key}_index") == 0,
            what="nothing to be delivered again",
        )


BESIDE = """
from concurrent.futures import ThreadPoolExecutor

def told(call, *arguments):
    try:
        result = call(*arguments)
        open("/app/shared/ended", "w").close()
        return result
    except Exception as exc:
        return str(exc)

with ThreadPoolExecutor(2) as pool:
    print(*pool.map(lambda pair: told(*pair), [(wait_once, "beside"), (crash_beside, "beside")]), sep="; ")
"""


@pytest.mark.usefixtures("up")
def test_a_call_beside_the_one_that_ended_the_worker_is_repeated(shell: Shell) -> None:
    """Of two calls neither is known to be the cause: both are repeated, and then one is alone."""
    serving(shell, "methods")
    done = shell("exec", "-", given=BESIDE)
    assert done.code == 0, done.err
    repeated, _, crashed = done.out.partition("; ")
    assert repeated == "repeated"
    assert "the call ended its worker process (SIGSEGV)" in crashed
    assert runs(shell, "crash_beside") == 2


@pytest.mark.usefixtures("up")
def test_a_call_of_a_worker_that_was_killed_from_outside_is_repeated(shell: Shell) -> None:
    victim = serving(shell, "methods")
    with shell.start("exec", "-", has_stdin=True) as process:
        assert process.stdin is not None
        process.stdin.write('print(wait_once("killed"))')
        process.stdin.close()
        wait_until(lambda: runs(shell, "killed"), what="the call to begin")
        os.kill(victim, signal.SIGKILL)
        assert process.stdout.read() == "repeated\n"


def test_a_command_with_workers_of_its_own_does_not_wait_for_a_dead_one(shell: Shell) -> None:
    own = {"NEKRO_DATA_DIR": str(shell.directory / "own")}
    done = shell("call", "leave", "--json", **own)
    assert done.code == ExitCode.METHOD
    assert "the call ended its worker process (exit code 3)" in done.value["error"]["message"]
    process = shell.start("call", "wait_once", "--args", '["own"]', "--json", **own)
    begun = shell.directory / "own" / "plugins" / "t.probe" / "own"
    wait_until(begun.exists, what="the call to begin")
    running = read_running(shell.directory / "own")
    assert running is not None
    (victim,) = [worker for worker in running.workers if worker.lane == "methods"]
    os.kill(victim.pid, signal.SIGKILL)
    out, _ = process.communicate()
    assert process.returncode == ExitCode.SERVICE
    assert "methods ended with SIGKILL; its log is" in out
