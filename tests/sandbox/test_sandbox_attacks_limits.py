"""Attacks on resources (L of the attack list): each limit is enforced and named in the result."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from sandbox_lab import (
    REPOSITORY,
    Lab,
    answer,
    as_other_user,
    host_processes,
    lab,
    method,
    other_user_command,
)
from waiting import WAIT_SECONDS, wait_until

from nekro.sandbox.drivers.bwrap import BwrapDriver
from nekro.sandbox.limits.quota import Quota
from nekro.sandbox.models import Limit, StopType, StubCall, StubResult
from nekro_agent.errors import SandboxUnavailableError

MEMORY = {"memory_bytes": 128 << 20}
#: Uses 8 times 200 MB in processes of their own.
EIGHT_PROCESSES = """
import os, time
for _ in range(8):
    if os.fork() == 0:
        held = bytearray(b'x') * (200 << 20)
        time.sleep(20)
        os._exit(0)
statuses = [os.wait()[1] for _ in range(8)]
assert not any(statuses), statuses
"""
#: Memory without a process: a file in memory, and detached shared pages.
MEMFD = """
import os
for _ in range(40):
    fd = os.memfd_create('x')
    for _ in range(30):
        os.write(fd, b'x' * (1 << 20))
"""
SHARED_ANONYMOUS = """
import mmap
held = []
for _ in range(40):
    area = mmap.mmap(-1, 30 << 20)
    for offset in range(0, 30 << 20, 4096):
        area[offset] = 1
    area.madvise(mmap.MADV_DONTNEED)
    held.append(area)
"""


def nothing_runs(box: Lab) -> bool:
    """Whether no process of the chat's code is left; only root mode can determine it by the user."""
    return os.geteuid() != 0 or host_processes(box.user()) == []


def carry_out(request: dict[str, Any], mode: str) -> dict[str, Any]:
    return asyncio.run(answer(request)) if mode == "own" else as_other_user(request)


@pytest.fixture(params=["own", "other"], ids=["own_user", "ordinary_user"])
def mode(request: pytest.FixtureRequest, bwrap_driver: BwrapDriver) -> str:
    """As root with control groups where available; as an ordinary user by the watchdog."""
    if request.param == "other":
        request.getfixturevalue("other_user")
    return str(request.param)


def test_attack_L1_greedy_allocation_is_a_memory_error_at_its_line(mode: str) -> None:
    result = carry_out({"code": "data = bytearray(4 << 30)", "settings": MEMORY}, mode)
    assert (result["stop"], result["limit"], result["error"]) == ("ERROR", "memory", "MemoryError")


def test_attack_L1_memory_bomb_ends_the_run(mode: str) -> None:
    code = "held = []\nwhile True:\n    held.append(b'x' * (8 << 20))"
    result = carry_out({"code": code, "settings": MEMORY}, mode)
    assert (result["stop"], result["limit"]) == ("ERROR", "memory")


@pytest.mark.parametrize(
    "code", [EIGHT_PROCESSES, MEMFD, SHARED_ANONYMOUS], ids=["L2 processes", "L3 memfd", "L3 shared pages"]
)
def test_attack_L2_L3_memory_of_many_processes_and_of_none_is_bounded(mode: str, code: str) -> None:
    result = carry_out({"code": code, "settings": MEMORY}, mode)
    assert result["stop"] == "ERROR"
    # Where the kernel cannot account such memory, the filter refuses it.
    refused = result["error"] is not None and "[Errno" in result["error"]
    assert result["limit"] == "memory" or refused or "statuses" in result["output"], result


#: Memory of the kernel: full buffers, and names of empty files.
FULL_SOCKETS = """
import os, socket, time
for _ in range(6):
    if os.fork() == 0:
        break
pairs = [socket.socketpair() for _ in range(100)]
for ours, theirs in pairs:
    for end in (ours, theirs):
        end.setblocking(False)
        try:
            while True:
                end.send(b'x' * 65536)
        except BlockingIOError:
            pass
time.sleep(30)
"""
FULL_PIPES = """
import os, time
for _ in range(20):
    if os.fork() == 0:
        break
for _ in range(110):
    ours, theirs = os.pipe()
    os.set_blocking(theirs, False)
    try:
        while True:
            os.write(theirs, b'x' * 4096)
    except BlockingIOError:
        pass
time.sleep(30)
"""
MANY_EMPTY_FILES = """
import os, time
for number in range(150_000):
    os.close(os.open(f'/tmp/{number}', os.O_CREAT | os.O_WRONLY))
time.sleep(30)
"""


@pytest.mark.parametrize(
    "code",
    [
        pytest.param(FULL_SOCKETS, id="sockets"),
        pytest.param(FULL_PIPES, id="pipes"),
        pytest.param(MANY_EMPTY_FILES, id="names in memory", marks=pytest.mark.slow),
    ],
)
def test_attack_L3_memory_of_the_kernel_counts_where_no_group_counts_it(
    request: pytest.FixtureRequest, bwrap_driver: BwrapDriver, code: str
) -> None:
    if os.geteuid() == 0:
        request.getfixturevalue("other_user")
    mode = "other" if os.geteuid() == 0 else "own"
    result = carry_out({"code": code, "settings": {"memory_bytes": 64 << 20}}, mode)
    assert (result["stop"], result["limit"]) == ("ERROR", "memory"), result


def test_attack_L3_buffers_cannot_be_enlarged_where_they_are_not_counted(other_user: None) -> None:
    code = """
import fcntl, os, socket
def attempt(action):
    try:
        action()
        print("done")
    except OSError as exc:
        print(exc.errno)
ours, theirs = os.pipe()
attempt(lambda: fcntl.fcntl(theirs, 1031, 1 << 20))
attempt(lambda: socket.socketpair()[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 22))
"""
    assert as_other_user({"code": code})["output"] == "1\n1\n"


def test_attack_L3_system_v_shared_memory_is_refused(mode: str) -> None:
    code = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
print(libc.shmget(0, 4096, 0o1600), ctypes.get_errno())
"""
    result = carry_out({"code": code}, mode)
    assert result["output"] == "-1 38\n"


@pytest.mark.parametrize(
    "code",
    [
        "import os, time\nwhile True:\n    if os.fork() == 0:\n        time.sleep(30)",
        "from threading import *\nwhile True:\n    Thread(target=Event().wait, daemon=True).start()",
    ],
    ids=["forks", "threads"],
)
def test_attack_L4_process_and_thread_bombs_stop_at_the_limit(mode: str, code: str) -> None:
    result = carry_out({"code": code, "settings": {"max_processes": 40}}, mode)
    assert (result["stop"], result["limit"]) == ("ERROR", "pids")


@pytest.mark.extended
def test_attack_L4_bomb_that_swallows_its_errors_ends_with_the_run(mode: str) -> None:
    code = """
import os
while True:
    try:
        os.fork()
    except OSError:
        pass
"""
    result = carry_out({"code": code, "run": {"wall_seconds": 0.5}}, mode)
    assert result["stop"] == "TIMEOUT"


IGNORES_SIGNALS = """
import signal
for number in range(1, 65):
    try:
        signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError):
        pass
while True:
    try:
        while True:
            pass
    except BaseException:
        pass
"""


@pytest.mark.parametrize(
    "code",
    [
        "while True: pass",
        IGNORES_SIGNALS,
        "x = 10 ** 10 ** 8",
        "import re\nre.match('(a+)+$', 'a' * 60 + 'b')",
    ],
    ids=["loop", "ignored signals", "large number", "backtracking"],
)
async def test_attack_L5_endless_computation_is_killed_in_time(box: Lab, code: str) -> None:
    result = await box.run(code, wall_seconds=0.3)
    assert (result.stop_type, result.limit, result.exit_code) == (StopType.TIMEOUT, Limit.WALL, 137)
    assert nothing_runs(box)


@pytest.mark.extended
async def test_attack_L5_cpu_time_is_a_limit_of_its_own(tmp_path: Path) -> None:
    async with lab(tmp_path, cpu_seconds=1) as box:
        result = await box.run("while True: pass")
    assert (result.stop_type, result.limit, result.exit_code) == (StopType.ERROR, Limit.CPU, 128 + 24)


async def test_attack_L5_endless_recursion_is_an_error_of_the_code(box: Lab) -> None:
    result = await box.run("def f():\n    f()\nf()")
    assert result.stop_type is StopType.ERROR
    assert result.error is not None
    assert result.error.startswith("RecursionError")


DAEMON = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        while True:
            open('/app/shared/alive', 'a').write('x')
            time.sleep(0.001)
    os._exit(0)
while not os.path.exists('/app/shared/alive'):
    pass
"""


@pytest.mark.parametrize(
    "end", ["", "while True: pass", "agent()", "os._exit(1)", "os.write(3, b'garbage' * 9)"]
)
async def test_attack_L6_daemons_end_with_their_run(box: Lab, end: str) -> None:
    await box.run(DAEMON + end, wall_seconds=5)
    if end == "agent()":
        await box.run("")  # that result does not wait for the killed processes; the chat's next run does
    alive = box.shared() / "alive"
    size = alive.stat().st_size
    assert nothing_runs(box)
    # A whole run is long enough for many writes at intervals of a millisecond.
    await box.run("")
    assert alive.stat().st_size == size


async def test_attack_L7_one_large_file_stops_at_its_limit(tmp_path: Path) -> None:
    async with lab(tmp_path, max_file_bytes=1 << 20) as box:
        result = await box.run("open('shared/big', 'wb').write(b'x' * (4 << 20))")
        sparse = await box.run(
            "import os\nos.truncate(os.open('shared/sparse', os.O_CREAT | os.O_RDWR), 1 << 40)"
        )
        assert (box.shared() / "big").stat().st_size == 1 << 20
    assert (result.stop_type, result.limit) == (StopType.ERROR, Limit.FILE_SIZE)
    assert (sparse.stop_type, sparse.limit) == (StopType.ERROR, Limit.FILE_SIZE)


MANY_BYTES = """
import os, time
for number in range(40):
    with open(f'shared/m{number}', 'wb') as file:
        file.write(b'x' * (1 << 20))
time.sleep(30)
"""
MANY_NAMES = """
import os, time
for number in range(20_000):
    os.close(os.open(f'shared/n{number}', os.O_CREAT | os.O_WRONLY))
time.sleep(30)
"""
UNLINKED = """
import os, time
held = []
for number in range(40):
    fd = os.open('shared/u', os.O_CREAT | os.O_WRONLY)
    os.write(fd, b'x' * (1 << 20))
    os.unlink('shared/u')
    held.append(fd)
time.sleep(30)
"""


IN_FLIGHT = """
import os, socket, time
ends = [socket.socketpair() for _ in range(8)]
for number in range(40):
    fd = os.open('shared/u', os.O_CREAT | os.O_WRONLY)
    os.write(fd, b'x' * (1 << 20))
    os.unlink('shared/u')
    socket.send_fds(ends[number % 8][0], [b'x'], [fd])
    os.close(fd)
time.sleep(30)
"""
#: The sockets that hold the files are in transit themselves, and no process has them.
IN_FLIGHT_WITHIN = """
import os, socket, time
outer = socket.socketpair()
for _ in range(4):
    ours, theirs = socket.socketpair()
    for number in range(10):
        fd = os.open('shared/u', os.O_CREAT | os.O_WRONLY)
        os.write(fd, b'x' * (1 << 20))
        os.unlink('shared/u')
        socket.send_fds(ours, [b'x'], [fd])
        os.close(fd)
    socket.send_fds(outer[0], [b'x'], [theirs.fileno()])
    ours.close()
    theirs.close()
time.sleep(30)
"""
MAPPED_ONLY = """
import mmap, os, time
held = []
for number in range(40):
    fd = os.open('shared/u', os.O_CREAT | os.O_RDWR)
    os.write(fd, b'x' * (1 << 20))
    os.unlink('shared/u')
    held.append(mmap.mmap(fd, 4096))
    os.close(fd)
# The module keeps a descriptor of its own for resizing.
os.closerange(4, 256)
time.sleep(30)
"""


@pytest.mark.parametrize(
    "code",
    [MANY_BYTES, MANY_NAMES, UNLINKED, IN_FLIGHT, IN_FLIGHT_WITHIN, MAPPED_ONLY],
    ids=["bytes", "20000 names", "unlinked files", "in flight", "in flight within", "only mapped"],
)
async def test_attack_L7_shared_directory_has_a_quota(tmp_path: Path, code: str) -> None:
    async with lab(tmp_path, shared_bytes=16 << 20, shared_files=500, max_file_bytes=1 << 20) as box:
        result = await box.run(code)
        left = list(box.shared().iterdir())
        held = Quota.at_start(box.shared(), box.settings)
    assert (result.stop_type, result.limit) == (StopType.ERROR, Limit.DISK)
    # The run's files over the quota are deleted.
    assert len(left) <= 500
    assert (held.most_bytes, held.most_names) == (16 << 20, 500)


async def test_sockets_may_be_passed_on_and_created_in_numbers(tmp_path: Path) -> None:
    """Ordinary use of sockets does not end a program."""
    code = """
import multiprocessing, socket, time
def child(connection):
    for _ in range(30):
        received, fds, _, _ = socket.recv_fds(connection, 1, 1)
        with socket.socket(fileno=fds[0]) as passed:
            passed.send(b"hello")
ours, theirs = socket.socketpair()
process = multiprocessing.get_context("fork").Process(target=child, args=(theirs,))
process.start()
end = time.monotonic() + 0.5
for _ in range(30):
    mine, its = socket.socketpair()
    socket.send_fds(ours, [b"x"], [its.fileno()])
    its.close()
    assert mine.recv(5) == b"hello"
    mine.close()
    time.sleep(max(0, (end - time.monotonic()) / 30))
process.join()
while time.monotonic() < end:
    pairs = [socket.socketpair() for _ in range(50)]
print("done")
"""
    async with lab(tmp_path) as box:
        result = await box.run(code)
    assert (result.stop_type, result.output) == (StopType.NORMAL, "done\n"), result


async def test_attack_L7_files_in_transit_to_the_bridge_count(tmp_path: Path) -> None:
    """A bridge with the maximum of open calls stops reading; descriptors sent meanwhile stay in transit."""
    code = """
import os, socket, struct, time
def frame(call_id, payload):
    return struct.pack(">IBI", len(payload) + 5, 3, call_id) + payload
channel = socket.socket(fileno=os.dup(3))
# Eight are under way, one waits for its turn, the rest fills what is read ahead.
for number in range(1, 14):
    channel.sendall(frame(number, b"hold\\0" + b"x" * (64 << 10)))
for number in range(14, 54):
    fd = os.open('shared/u', os.O_CREAT | os.O_WRONLY)
    os.write(fd, b'x' * (1 << 20))
    os.unlink('shared/u')
    socket.send_fds(channel, [frame(number, b"hold\\0")], [fd])
    os.close(fd)
time.sleep(30)
"""

    async def hold(call: StubCall) -> StubResult:
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    async with (
        lab(tmp_path, shared_bytes=16 << 20, max_file_bytes=1 << 20) as box,
        asyncio.timeout(WAIT_SECONDS),
    ):
        result = await box.run(code, dispatch=hold, methods=[method("hold")], wall_seconds=600)
    assert (result.stop_type, result.limit) == (StopType.ERROR, Limit.DISK)


async def test_attack_L7_descriptors_in_flight_are_bounded_by_the_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two checks, and with sockets of the host, this number is the limit."""
    code = """
import os, socket
fd, count, keep = os.open('/dev/null', os.O_RDONLY), 0, []
try:
    while True:
        keep.append(socket.socketpair())
        for _ in range(2):
            socket.send_fds(keep[-1][0], [b'x'], [fd] * 10)
            count += 10
except OSError as exc:
    print(count, exc.errno)
"""
    monkeypatch.setattr("nekro.sandbox.limits.enforcement.MAX_OPEN_FILES", 64)
    async with lab(tmp_path, max_file_bytes=1 << 20, shared_bytes=1 << 30) as box:
        result = await box.run(code)
    count, number = map(int, result.output.split())
    assert number == errno.ETOOMANYREFS
    # The limit of open files, and the descriptors of one further message.
    assert count <= 64 + 253


async def test_attack_L7_quota_is_enforced_on_runs_shorter_than_the_polling_interval(tmp_path: Path) -> None:
    async with lab(tmp_path, shared_bytes=1 << 20) as box:
        (box.shared() / "old").write_bytes(b"x" * 1000)
        result = await box.run("for i in range(3):\n    open(f'shared/{i}', 'wb').write(b'x' * (1 << 20))")
        assert (box.shared() / "old").exists()
        used = sum(path.stat().st_size for path in box.shared().iterdir())
    assert (result.stop_type, result.limit) == (StopType.ERROR, Limit.DISK)
    assert used <= 1 << 20


async def test_attack_L7_full_shared_directory_can_still_be_cleaned_up(tmp_path: Path) -> None:
    async with lab(tmp_path, shared_bytes=1 << 20) as box:
        (box.shared() / "large").write_bytes(b"x" * (2 << 20))
        result = await box.run("import os\nos.unlink('shared/large')")
    assert result.stop_type is StopType.NORMAL


FILL = """
import os
for directory in ('/tmp', '/dev/shm', '/', '/dev', '/app', '/opt'):
    written = 0
    try:
        for number in range(100):
            with open(f'{directory}/f{number}', 'wb', buffering=0) as file:
                for _ in range(8):
                    written += file.write(b'x' * (1 << 20))
    except OSError as exc:
        print(directory, written >> 20, exc.errno)
"""


async def test_attack_L7_memory_file_systems_are_small_and_the_rest_read_only(tmp_path: Path) -> None:
    async with lab(tmp_path, tmp_bytes=16 << 20) as box:
        result = await box.run(FILL)
    lines = dict(line.split(" ", 1) for line in result.output.splitlines())
    assert lines["/tmp"] == "16 28"
    assert lines["/dev/shm"] == "16 28"
    assert {lines[path].split()[0] for path in ("/", "/dev", "/app", "/opt")} == {"0"}
    assert {lines[path].split()[1] for path in ("/", "/dev", "/app", "/opt")} <= {"30", "13"}


@pytest.mark.parametrize("descriptor", [1, 2])
async def test_attack_L8_output_flood_ends_the_run(box: Lab, descriptor: int) -> None:
    result = await box.run(f"import os\nwhile True:\n    os.write({descriptor}, b'x' * 65536)")
    assert (result.stop_type, result.limit) == (StopType.ERROR, Limit.OUTPUT)
    assert len(result.output) < 70_000


async def test_attack_L9_descriptors_run_out_inside_only(box: Lab) -> None:
    result = await box.run("import os\nheld = []\nwhile True:\n    held.append(os.open('/dev/null', 0))")
    assert (result.stop_type, result.limit) == (StopType.ERROR, Limit.OPEN_FILES)


async def test_attack_L10_call_that_never_answers_times_out(tmp_path: Path) -> None:
    async with lab(tmp_path) as box:

        async def never() -> None:
            await asyncio.Event().wait()

        box.handlers["never"] = never
        result = await box.run(
            "try:\n    never()\nexcept MethodError as exc:\n    print(exc)",
            methods=[method("never", timeout_seconds=0.2)],
        )
    assert "did not answer within 0.2 s" in result.output


FORKS_AND_WAITS = """
import os, time
for _ in range(5):
    os.fork()
{last_words}
time.sleep(60)
"""
SERVICE = """
import asyncio, json, sys
from functools import partial
from pathlib import Path
sys.path.insert(0, {tests!r})
from sandbox_lab import lab

async def main():
    async with lab(Path({root!r}), name={name!r}) as box:
        box.handlers["started"] = lambda: None
        await asyncio.gather(box.run({code!r}), box.run({waits!r}, chat_key="waits"))

asyncio.run(main())
"""


NO_DEATH_SIGNAL = """
import ctypes, signal
for number in range(1, 32):
    if number not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(number, signal.SIG_IGN)
for number in (0, signal.SIGCONT, signal.SIGURG):
    ctypes.CDLL(None).prctl(1, number, 0, 0, 0)  # PR_SET_PDEATHSIG
"""


@pytest.mark.extended
@pytest.mark.parametrize(
    "last_words",
    ["os.getpid() == 2 and started()", "pass", NO_DEATH_SIGNAL],
    ids=["after a call", "no call", "death signal changed"],
)
async def test_attack_L11_killed_service_leaves_no_process_behind(
    box: Lab, tmp_path: Path, last_words: str
) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root mode, where the code's host user tells its processes from others")
    program = SERVICE.format(
        tests=str(Path(__file__).parent),
        root=str(tmp_path / "service"),
        code=FORKS_AND_WAITS.replace("{last_words}", last_words),
        waits="import time\ntime.sleep(60)",
        name=box.name,
    )
    service = subprocess.Popen(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )
    try:
        wait_until(lambda: len(host_processes(box.user())) >= 32, what="the code's 32 processes")
        users = [box.user(), box.user("waits")]
        wait_until(lambda: bool(host_processes(users[1])), what="the other run")
        assert all(host_processes(user) for user in users)
    finally:
        os.kill(service.pid, signal.SIGKILL)
        service.wait(WAIT_SECONDS)
    for user in users:
        wait_until(partial(is_gone, user), what=f"the processes of user {user} to end")


def is_gone(user: int) -> bool:
    return host_processes(user) == []


#: Parts of mount points of tests that run concurrently: their directories, a container engine's.
OF_OTHER_TESTS = ("pytest-of-", "small-disk-", "nekro-engine-", "/docker/")


def leftovers() -> dict[str, object]:
    """Possible leftovers of runs on the host."""
    # Not by a glob, which fails when groups of other tests disappear meanwhile.
    groups = [name for _, names, _ in os.walk("/sys/fs/cgroup") for name in names]
    return {
        "zombies": [pid for pid in host_children() if is_zombie(pid)],
        "mounts": [point for point in mount_points() if not any(mark in point for mark in OF_OTHER_TESTS)],
        "groups": [name for name in groups if name.startswith(f"nekro-run-{os.getpid()}-")],
        "descriptors": len(os.listdir("/proc/self/fd")),
        "directories": sorted(
            path.name for path in Path(tempfile.gettempdir()).glob(f"nekro-box-{os.getpid()}-*")
        ),
        "children": host_children(),
    }


def mount_points() -> list[str]:
    return sorted(line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines())


def host_children() -> list[int]:
    text = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text()
    return [int(word) for word in text.split()]


def is_zombie(pid: int) -> bool:
    return ") Z " in Path(f"/proc/{pid}/stat").read_text()


@pytest.mark.extended
@pytest.mark.parametrize("runs", [12, pytest.param(200, marks=pytest.mark.slow)])
async def test_attack_L12_many_runs_leave_nothing_behind(box: Lab, runs: int) -> None:
    endings = [
        "print(1)",
        "1/0",
        "agent()",
        "import os; os.abort()",
        "while True: print('x' * 9999)",
        "echo(1)",
    ]
    await box.run("print('warm up')")
    before = leftovers()
    for number in range(runs):
        await box.run(endings[number % len(endings)])
    assert leftovers() == before
    assert nothing_runs(box)


@pytest.mark.extended
async def test_concurrent_chats_never_share_a_host_user(
    bwrap_driver: BwrapDriver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel counts processes, pipes and descriptors in flight by user."""
    if os.geteuid() != 0:
        pytest.skip("needs root mode: as an ordinary user all code has the service's own user")
    # A range of its own: the locks belong to the host, and other tests may run concurrently.
    monkeypatch.setattr("nekro.sandbox.users._RANGE_SIZE", 2)
    # The fork server would take one of the two.
    start = 700_000 + os.getpid() % 1000 * 10
    # Without a user of its own, of which it would hold one too.
    async with lab(tmp_path, name=uuid4().hex, uid_range_start=start, fork_server=False) as box:
        both = asyncio.Barrier(2)
        users: dict[str, int] = {}

        async def here(chat: str, user: int) -> None:
            users[chat] = user
            await both.wait()

        box.handlers["here"] = here
        code = "import os\nopen(f'shared/{os.urandom(4).hex()}', 'w').close()\nhere(_ck, os.getuid())"
        # In either order: with two users for two chats, one of them has its second choice.
        for _ in range(3):
            results = await asyncio.gather(box.run(code, chat_key="a"), box.run(code, chat_key="b"))
            assert [result.stop_type for result in results] == [StopType.NORMAL] * 2, results
            assert users["a"] != users["b"]
        first, second = box.run(code, chat_key="a"), box.run("print(1)", chat_key="c")
        with pytest.raises(SandboxUnavailableError, match="all 2 host users"):
            await asyncio.wait_for(_third(box, first, second, both), WAIT_SECONDS)


#: Fills as many pipes as the kernel allows a user before it makes new ones small and lets none grow.
HOLDS_PIPES = """
import os, pathlib, resource, sys
most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
pages = int(pathlib.Path('/proc/sys/fs/pipe-user-pages-soft').read_text())
held = [os.pipe() for _ in range(pages // 16 + 1)]
print('holds them', flush=True)
sys.stdin.read()
"""


def test_full_pipes_of_its_own_user_do_not_prevent_a_start(other_user: None) -> None:
    holding = other_user_command("-c", HOLDS_PIPES)
    with subprocess.Popen(holding, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdin is not None and holder.stdout is not None
        assert holder.stdout.readline() == "holds them\n"
        result = as_other_user({"code": "print('started')"})
        holder.stdin.close()
    assert (result["stop"], result["output"]) == ("NORMAL", "started\n"), result


async def _third(box: Lab, first: Any, second: Any, both: asyncio.Barrier) -> None:
    """Run two chats that hold both users, and a third one at the same time."""
    waiting = asyncio.Event()
    box.handlers["wait"] = waiting.wait
    others = [asyncio.create_task(first), asyncio.create_task(box.run("wait()", chat_key="b"))]
    while both.n_waiting == 0 or all(name != "wait" for name, *_ in box.calls):
        await asyncio.sleep(0.01)
    try:
        await second
    finally:
        waiting.set()
        await both.abort()
        await asyncio.wait(others)
