"""A command that is killed with SIGKILL leaves no process behind."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from nekro_shell import NEKRO, Shell, open_shell
from waiting import WAIT_SECONDS, wait_until

from nekro.cli.services.ownership import read_running

PLUGIN = '''
import time

from nekro_agent.api.plugin import NekroPlugin, SandboxMethodType
from nekro_agent.api.schemas import AgentCtx

plugin = NekroPlugin("Busy", "busy", "For tests.", "1", "t", "")


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "work")
async def work(_ctx: AgentCtx, path: str) -> int:
    """Block the event loop until the file is gone."""
    with open(path, "w"):
        pass
    while True:
        time.sleep(0.05)
'''

pytestmark = pytest.mark.extended


@pytest.fixture
def shell() -> Iterator[Shell]:
    with open_shell({"busy.py": PLUGIN}) as shell:
        yield shell


def processes_of(shell: Shell) -> dict[int, str]:
    """Processes with the shell's directory in their environment or command line."""
    mark, found = os.fsencode(shell.directory), {}
    for entry in Path("/proc").iterdir():
        try:
            command = (entry / "cmdline").read_bytes()
            if mark in command + (entry / "environ").read_bytes():
                found[int(entry.name)] = command.replace(b"\0", b" ").decode()
        except (OSError, ValueError):
            continue
    return found


def start(shell: Shell, *words: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [*NEKRO, *words],
        env=shell.environment,
        cwd=shell.directory,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def kill(process: subprocess.Popen[bytes], shell: Shell) -> None:
    """Kill a command, and wait until nothing of it is left."""
    assert len(processes_of(shell)) > 2
    os.kill(process.pid, signal.SIGKILL)
    process.wait(WAIT_SECONDS)
    wait_until(lambda: not processes_of(shell), what=lambda: f"the end of {processes_of(shell)}")


def test_a_killed_up_leaves_nothing_and_the_next_one_starts(shell: Shell) -> None:
    busy = shell.directory / "busy"
    up = start(shell, "up")
    wait_until(lambda: read_running(shell.data_dir), what="nekro up")
    call = start(shell, "call", "work", "--args", f'["{busy}"]')
    wait_until(busy.exists, what="the call to run")
    call.kill()
    call.wait(WAIT_SECONDS)
    kill(up, shell)
    up = start(shell, "up", "--gateway-port", "0")
    wait_until(lambda: read_running(shell.data_dir), what="nekro up")
    kill(up, shell)


def test_a_killed_command_with_a_system_of_its_own_leaves_nothing(shell: Shell) -> None:
    busy = shell.directory / "busy"
    call = start(shell, "call", "work", "--args", f'["{busy}"]')
    wait_until(busy.exists, what="the call to run")
    kill(call, shell)


def test_a_command_that_is_killed_while_its_workers_start_leaves_nothing(shell: Shell) -> None:
    slow = shell.directory / "plugins" / "slow.py"
    slow.write_text(
        f"import time\nopen({str(shell.directory / 'busy')!r}, 'w').close()\ntime.sleep(600)\nplugin = 1\n"
    )
    up = start(shell, "up")
    wait_until((shell.directory / "busy").exists, what="the import to begin")
    kill(up, shell)
