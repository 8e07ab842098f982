"""Limits that the kernel enforces, refusals where it does not, and attacks on its accounting."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sandbox_lab import (
    REPOSITORY,
    Areas,
    host_processes,
    lab,
    other_user_command,
    other_user_environment,
)
from waiting import WAIT_SECONDS

from broker_config.settings import SandboxSettings
from nekro.sandbox.driver import Enforcement, Enforcer
from nekro.sandbox.drivers.container import _kept_by_engine
from nekro.sandbox.drivers.selection import describe
from nekro.sandbox.limits.cgroups import find_cgroups
from nekro.sandbox.limits.enforcement import group_limits, is_whole_file_system
from nekro.sandbox.manager import SandboxManager
from nekro.sandbox.models import Limit, StopType
from nekro_agent.errors import SandboxUnavailableError

MEMORY_BYTES = 96 << 20


@pytest.fixture(scope="session")
def grouped(found_by_driver: dict[str, object]) -> None:
    """Needs control groups."""
    groups, check = find_cgroups(SandboxSettings())
    if groups is None:
        pytest.skip(f"this process may write no control groups: {check.detail}")


def figures(name: str) -> list[int]:
    """Read a file of every group that this process created."""
    found = []
    for directory, names, _ in os.walk("/sys/fs/cgroup"):
        for group in names:
            if group.startswith(f"nekro-run-{os.getpid()}-"):
                path = Path(directory, group, name)
                if path.exists():
                    found.append(int(path.read_text()))
    return found


async def attack(tmp_path: Path, code: str, **settings: Any) -> tuple[Any, dict[str, list[int]]]:
    """Run code that calls ``look`` at its end; returns the result and the kernel's counters at that time."""
    seen: dict[str, list[int]] = {}
    async with lab(tmp_path, **{"memory_bytes": MEMORY_BYTES, **settings}) as box:

        def look() -> None:
            for name in ("memory.max_usage_in_bytes", "memory.peak", "cpuacct.usage", "pids.current"):
                seen[name] = figures(name)
            seen["processes"] = [len(host_processes(box.user()))]

        box.handlers["look"] = look
        return await box.run(code), seen


@pytest.mark.extended
@pytest.mark.usefixtures("grouped")
async def test_attack_page_cache_is_charged_to_the_run_and_released(tmp_path: Path) -> None:
    code = """
for number in range(12):
    open(f'shared/{number}', 'wb').write(b'x' * (16 << 20))
for _ in range(3):
    for number in range(12):
        open(f'shared/{number}', 'rb').read()
look()
print('done')
"""
    result, seen = await attack(tmp_path, code)
    assert result.output == "done\n", result
    peaks = seen["memory.max_usage_in_bytes"] or seen["memory.peak"]
    assert peaks
    assert 32 << 20 < max(peaks) <= MEMORY_BYTES


TMPFS = "for number in range(30):\n    open(f'/tmp/{number}', 'wb').write(b'x' * (8 << 20))"
TMPFS_AND_SHM = """
import os
for number in range(99):
    for place in ('/tmp', '/dev/shm'):
        with open(f'{place}/{number}', 'wb') as file:
            file.truncate(8 << 20)
            os.posix_fallocate(file.fileno(), 0, 8 << 20)
"""
MEMFD_OF_CHILDREN = """
import os, socket, time
ours, theirs = socket.socketpair()
for number in range(12):
    if os.fork() == 0:
        fd = os.memfd_create('x')
        os.posix_fallocate(fd, 0, 16 << 20)
        socket.send_fds(theirs, [b'x'], [fd])  # no process has it: it waits in the socket
        os._exit(0)
    os.wait()
time.sleep(20)
"""
SHARED_BY_MANY = """
import mmap, os, time
for _ in range(12):
    area = mmap.mmap(-1, 16 << 20)
    if os.fork() == 0:
        for offset in range(0, 16 << 20, 4096):
            area[offset] = 1
        os._exit(0)
    pid, status = os.wait()
    assert status == 0, status
    area.madvise(mmap.MADV_DONTNEED)
    globals().setdefault('kept', []).append(area)
time.sleep(20)
"""


@pytest.mark.usefixtures("grouped")
@pytest.mark.parametrize(
    "code",
    [TMPFS, TMPFS_AND_SHM, MEMFD_OF_CHILDREN, SHARED_BY_MANY],
    ids=["tmpfs", "reserved in two of them", "memfds in flight", "shared pages of children"],
)
async def test_attack_memory_without_a_process_is_charged_to_the_run(tmp_path: Path, code: str) -> None:
    result, _ = await attack(tmp_path, code, tmp_bytes=512 << 20, max_file_bytes=64 << 20)
    assert result.stop_type is StopType.ERROR, result
    # While the kernel kills, the disk watch may see sockets without a process.
    assert result.limit in (Limit.MEMORY, Limit.DISK), result


@pytest.mark.extended
@pytest.mark.usefixtures("grouped")
async def test_attack_fork_storm_of_sessions_stays_below_the_groups_limit(tmp_path: Path) -> None:
    code = """
import os, signal, time
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
end, refused = time.monotonic() + 30, 0
while refused < 200 and time.monotonic() < end:
    try:
        if os.fork() == 0:
            os.setsid()
            os.fork()
            time.sleep(30)
            os._exit(0)
    except OSError:
        refused += 1
look()
"""
    # Each fork copies the page tables of the packages that a forked run has, 1 MiB.
    result, seen = await attack(tmp_path, code, max_processes=40, memory_bytes=256 << 20)
    assert result.stop_type is StopType.NORMAL, result
    assert 30 < max(seen["pids.current"]) <= 41
    if os.geteuid() == 0:
        assert max(seen["processes"]) <= 40


@pytest.mark.extended
@pytest.mark.usefixtures("grouped")
async def test_attack_cpu_time_of_many_processes_is_that_of_one_core(tmp_path: Path) -> None:
    if (os.cpu_count() or 1) < 2:
        pytest.skip("needs two processors to use more than one")
    code = """
import os, time
for _ in range(8):
    if os.fork() == 0:
        while True:
            pass
begin = time.monotonic()
while time.monotonic() < begin + 2:
    pass
look()
print(time.monotonic() - begin)
"""
    result, seen = await attack(tmp_path, code)
    used_seconds = max(seen["cpuacct.usage"]) / 1e9
    # The start of the interpreter, and the current period.
    assert used_seconds <= float(result.output) + 0.5, (used_seconds, result)


def own_file_system(directory: Path) -> None:
    directory.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(directory)], check=True)


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Path]:
    """Areas whose shared directories are on a file system of their own."""
    if os.geteuid() != 0:
        pytest.skip("needs root to mount a file system")
    shared = tmp_path / "sandboxes"
    own_file_system(shared)
    yield tmp_path
    subprocess.run(["umount", "--lazy", str(shared)], check=True)


async def started(areas: Path, **settings: Any) -> None:
    manager = SandboxManager(SandboxSettings(require_kernel_limits=True, **settings), Areas(root=areas))
    try:
        await manager.start()
    finally:
        await manager.close()


@pytest.mark.usefixtures("grouped")
async def test_polled_disk_is_refused_where_the_kernels_limits_are_required(tmp_path: Path) -> None:
    with pytest.raises(SandboxUnavailableError) as refused:
        await started(tmp_path)
    assert "limit disk is enforced by polled" in str(refused.value)
    assert "limit inodes is enforced by polled" in str(refused.value)
    assert "NEKRO_SANDBOX__SHARED_STORAGE=image" in str(refused.value)
    assert "limit memory" not in str(refused.value)


@pytest.mark.usefixtures("grouped")
async def test_own_file_system_of_all_areas_meets_the_requirement(mounted: Path) -> None:
    await started(mounted)
    capability = await describe(SandboxSettings(), shared_root=mounted / "sandboxes")
    disk = next(limit for limit in capability.limits if limit.limit == "disk")
    assert disk.by is Enforcer.KERNEL
    assert "64 MiB for all chats together" in disk.detail


@pytest.mark.root
def test_part_of_a_file_system_is_not_one_of_its_own(tmp_path: Path, mounted: Path) -> None:
    assert is_whole_file_system(mounted / "sandboxes")
    inside = mounted / "sandboxes" / "inside"
    inside.mkdir()
    bound = tmp_path / "bound"
    bound.mkdir()
    subprocess.run(["mount", "--bind", str(inside), str(bound)], check=True)
    try:
        assert not is_whole_file_system(bound)  # such as a named volume on the host's disk
    finally:
        subprocess.run(["umount", str(bound)], check=True)
    assert not is_whole_file_system(tmp_path)


@pytest.mark.root
async def test_images_meet_the_requirement(tmp_path: Path, grouped: None) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root to mount images")
    await started(tmp_path, shared_storage="image")


AS_OTHER = """
import asyncio, json, sys
from pathlib import Path
from broker_config.settings import SandboxSettings
from nekro.sandbox.drivers.selection import describe
settings = SandboxSettings(**json.loads(sys.argv[1]))
capability = asyncio.run(describe(settings, shared_root=Path("/nonexistent/sandboxes")))
print(json.dumps([capability.ok, list(capability.reasons), {l.limit: l.by for l in capability.limits}]))
"""


def described_as_other_user(**settings: Any) -> tuple[bool, str, dict[str, str]]:
    done = subprocess.run(
        other_user_command("-c", AS_OTHER, json.dumps(settings)),
        env=other_user_environment(),
        cwd="/",
        capture_output=True,
        text=True,
        timeout=WAIT_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    ok, reasons, limits = json.loads(done.stdout)
    return ok, "; ".join(reasons), limits


@pytest.mark.extended
def test_ordinary_user_without_groups_is_polled_and_refused_when_that_is_not_enough(other_user: None) -> None:
    ok, _, limits = described_as_other_user()
    assert ok
    assert (limits["memory"], limits["cpu"], limits["disk"]) == ("polled", "nothing", "polled")
    assert (limits["pids"], limits["file_size"], limits["wall"]) == ("kernel", "kernel", "host")
    ok, reasons, _ = described_as_other_user(require_kernel_limits=True)
    assert not ok
    for limit in ("memory", "cpu", "disk", "inodes"):
        assert f"limit {limit} is enforced by " in reasons
    assert "Delegate=yes" in reasons


@pytest.mark.extended
def test_ordinary_user_with_images_configured_is_refused(other_user: None) -> None:
    ok, reasons, limits = described_as_other_user(shared_storage="image")
    assert not ok
    assert limits["disk"] == "nothing"
    assert "NEKRO_SANDBOX__SHARED_STORAGE=directory" in reasons


def test_limit_that_a_group_does_not_enforce_is_not_the_kernels() -> None:
    groups, _ = find_cgroups(SandboxSettings())
    if groups is None:
        pytest.skip("this process may write no control groups")
    groups.missing = {"cpu": "cgroup v1 has no cpu controller here"}
    found: dict[str, Enforcement] = {limit.limit: limit for limit in group_limits(groups)}
    assert found["memory"].by is Enforcer.KERNEL
    assert (found["cpu"].by, found["cpu"].ok) == (Enforcer.NOTHING, False)
    assert "no cpu controller" in found["cpu"].detail
    assert found["cpu"].fix


@pytest.mark.parametrize(
    ("info", "kept"),
    [
        (
            '{"MemoryLimit":true,"SwapLimit":false,"PidsLimit":true,"CpuCfsQuota":true}',
            {"memory", "pids", "cpu"},
        ),
        ('{"host":{"cgroupControllers":["cpu","memory","pids"]}}', {"memory", "swap", "pids", "cpu"}),
        ('{"host":{"cgroupControllers":[]}}', set()),
        ("Cannot connect to the Docker daemon", set()),
        ("[]", set()),
    ],
    ids=["docker without swap", "podman", "rootless podman on v1", "no answer", "another answer"],
)
def test_engine_that_does_not_confirm_a_limit_does_not_enforce_it(info: str, kept: set[str]) -> None:
    assert _kept_by_engine(info) == kept


@pytest.mark.slow
@pytest.mark.usefixtures("grouped")
def test_doctor_fails_on_polled_limits_that_are_required(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "from nekro.cli.main import main; raise SystemExit(main())",
            "doctor",
            "--json",
        ],
        env={
            **os.environ,
            "PYTHONPATH": str(REPOSITORY),
            "NEKRO_DATA_DIR": str(tmp_path / "data"),
            "NEKRO_SANDBOX__REQUIRE_KERNEL_LIMITS": "true",
        },
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=WAIT_SECONDS,
        check=False,
    )
    lines = {check["name"]: check for check in json.loads(done.stdout)}
    assert done.returncode == 7
    assert lines["sandbox limit disk"]["verdict"] == "failed"
    assert lines["sandbox limit memory"]["verdict"] == "ok"
