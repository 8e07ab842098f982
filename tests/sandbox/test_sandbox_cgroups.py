"""Control groups of this host's kernel: ending processes, sweeping, reported limits."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from waiting import WAIT_SECONDS, wait_until

from broker_config.settings import SandboxSettings
from nekro.sandbox.leftovers import own_id
from nekro.sandbox.limits.cgroup_files import set_and_verify
from nekro.sandbox.limits.cgroups import Cgroups, _CgroupsV1, _GroupV2, _Knob, find_cgroups

UNIFIED = [Path("/sys/fs/cgroup/unified"), Path("/sys/fs/cgroup")]
#: Forks as fast as it can; each process lives briefly.
STORM = """
import os, time
while True:
    try:
        if os.fork() == 0:
            os.fork()
            time.sleep(0.1)
            os._exit(0)
        os.waitpid(-1, os.WNOHANG)
    except OSError:
        pass
"""


@pytest.fixture
def groups() -> Cgroups:
    found, check = find_cgroups(SandboxSettings(memory_bytes=128 << 20, max_processes=40))
    if found is None:
        pytest.skip(f"this process may write no control groups: {check.detail}")
    return found


@pytest.fixture
def waits() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield process
    process.kill()
    process.wait(WAIT_SECONDS)


@pytest.fixture
def storm() -> Iterator[subprocess.Popen[bytes]]:
    """A program that forks without end, once it is signalled."""
    process = subprocess.Popen([sys.executable, "-c", f"input(); {STORM!r}; exec({STORM!r})"], stdin=-1)
    yield process
    process.kill()
    process.communicate(timeout=WAIT_SECONDS)


def let_loose(storm: subprocess.Popen[bytes]) -> None:
    assert storm.stdin is not None
    storm.stdin.write(b"\n")
    storm.stdin.flush()


def test_attack_fork_storm_does_not_escape_the_end_of_its_group(
    groups: Cgroups, storm: subprocess.Popen[bytes]
) -> None:
    group = groups.create()
    group.attach(storm.pid)
    let_loose(storm)
    try:
        wait_until(lambda: len(group.processes()) > 20, what="the storm to rise")
    finally:
        is_removed = group.remove()
    assert is_removed
    assert storm.wait(WAIT_SECONDS) == -9
    assert not group.is_populated()


def test_version_2_ends_a_fork_storm_by_cgroup_kill(storm: subprocess.Popen[bytes]) -> None:
    parent = next((path for path in UNIFIED if (path / "cgroup.threads").exists()), None)
    if parent is None or not os.access(parent, os.W_OK):
        pytest.skip("needs a writable cgroup v2 hierarchy")
    path = parent / f"nekro-test-{os.getpid()}"
    path.mkdir()
    group = _GroupV2(path)
    group.attach(storm.pid)
    let_loose(storm)
    wait_until(lambda: len(group.processes()) > 5, what="the storm to rise")
    assert group.remove()
    assert not path.exists()


@pytest.mark.parametrize("is_reused", [False, True], ids=["gone", "its process id given again"])
def test_group_of_a_dead_service_is_swept_with_its_processes(
    groups: Cgroups, waits: subprocess.Popen[bytes], is_reused: bool
) -> None:
    group = groups.create()
    me = own_id()
    owner = f"{me.pid}-{me.started + 1}" if is_reused else "4194999-1"
    parents = groups._parents
    paths = {key: parent / f"nekro-run-{owner}-{me.namespace}-0" for key, parent in parents.items()}
    stray = groups._group(paths)

    def is_attached() -> bool:
        """Another service of this machine may start now, and sweep the group while it is empty."""
        try:
            for path in set(paths.values()):
                path.mkdir(exist_ok=True)
            stray.attach(waits.pid)
        except OSError:
            return waits.poll() is not None
        return True

    wait_until(is_attached, what="a process in the group")
    again, _ = find_cgroups(SandboxSettings())
    assert again is not None
    assert waits.wait(WAIT_SECONDS) == -9
    assert not any(path.exists() for path in paths.values())
    # The group of a live service is not swept.
    assert group.usage().processes == 0
    assert group.remove()


def test_limit_that_this_kernel_does_not_enforce_is_named(groups: Cgroups) -> None:
    if not isinstance(groups, _CgroupsV1):
        pytest.skip("needs cgroup v1")
    knobs = (*groups._knobs, _Knob(limit="swap", controller="memory", file="memory.no_such_file", value=0))
    assert set(type(groups)(groups._parents, knobs).missing) == {"swap"}
    with pytest.raises(OSError, match="no_such_file"):
        type(groups)(
            groups._parents,
            (_Knob(limit="memory", controller="memory", file="memory.no_such_file", value=0),),
        )


def test_value_that_the_kernel_changes_is_refused(groups: Cgroups) -> None:
    group = groups.create()
    try:
        path = next(iter(groups._parents.values())) / "cgroup.procs"
        with pytest.raises(OSError, match="keeps"):
            set_and_verify(path, os.getpid())
    finally:
        assert group.remove()
