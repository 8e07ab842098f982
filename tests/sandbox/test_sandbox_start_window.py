"""A service that is killed while it starts a sandbox: the next start removes all of its leftovers."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from sandbox_lab import REPOSITORY, other_user_command, other_user_environment
from waiting import WAIT_SECONDS, wait_until

from nekro.sandbox.drivers.bwrap import BwrapDriver
from nekro.sandbox.guest.confine import children_of

pytestmark = pytest.mark.extended

#: Functions of the driver, and when the service is killed: before the call or after it.
STOP_POINTS = [
    "before launch",
    "before open_unix_connection",
    "after open_unix_connection",
    "after launch",
    "before pidfd_open",
    "before expect_hello",
    "after expect_hello",
    "after verify_isolation",
]
#: Forks a service for each (point, delay), which is killed while it starts a sandbox; prints their ids.
SERVICES = """
import asyncio, json, os, signal, sys, threading, time
from pathlib import Path
sys.path.insert(0, {tests!r})
from broker_config.settings import SandboxSettings
from nekro.sandbox.manager import SandboxManager
from nekro.sandbox.models import RunRequest
from nekro.sandbox.drivers import bwrap
from sandbox_lab import Areas

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def deadly(call, when):
    def dies(*args, **kwargs):
        if when == "before":
            die()
        value = call(*args, **kwargs)
        if not asyncio.iscoroutine(value):
            die()
        async def waits():
            await value
            die()
        return waits()
    return dies

def prepare_death(point, delay):
    when, _, name = point.partition(" ")
    owner = {{"pidfd_open": os, "open_unix_connection": asyncio}}.get(name, bwrap)
    if name:
        setattr(owner, name, deadly(getattr(owner, name), when))
        return
    launch = bwrap.launch
    def timed(*args, **kwargs):
        threading.Timer(delay, die).start()  # a thread: the start goes on meanwhile
        return launch(*args, **kwargs)
    bwrap.launch = timed

async def serve(driver, point, delay):
    prepare_death(point, delay)
    manager = SandboxManager(SandboxSettings(), Areas(root=Path({root!r})), driver=driver)
    container = "killed-" + str(os.getpid())
    await manager.run(RunRequest(
        run_id="run", chat_key="chat", container_key=container, code="import time; time.sleep(60)",
        methods=(), dispatch=None,
    ))

driver = bwrap.BwrapDriver(SandboxSettings())
driver.tools, driver.interpreter, driver._cgroups, driver._filter, driver._runner
killed = []
for point, delay in json.loads({deaths!r}):
    pid = os.fork()
    if pid == 0:
        asyncio.run(serve(driver, point, delay))
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL, (point, delay)
    killed.append(pid)
print(json.dumps(killed))
"""


def start(program: str, uid: int) -> subprocess.Popen[bytes]:
    """Start a program as root, or as an ordinary user."""
    if uid == os.geteuid():
        return subprocess.Popen(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
            stdout=subprocess.PIPE,
        )
    return subprocess.Popen(
        other_user_command("-c", program, uid=uid),
        env=other_user_environment(),
        cwd="/",
        stdout=subprocess.PIPE,
    )


PR_SET_CHILD_SUBREAPER = 36


@pytest.fixture(autouse=True)
def adopt_orphans() -> Iterator[None]:
    """Make orphans of the services children of this process, which distinguishes them from others'."""
    libc = ctypes.CDLL(None)
    assert libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    yield
    libc.prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
    for pid in adopted():  # of a test that failed
        os.kill(pid, signal.SIGKILL)
    for pid in descendants():
        with contextlib.suppress(ChildProcessError, OSError):
            if ") Z " in Path(f"/proc/{pid}/stat").read_text():
                os.waitpid(pid, os.WNOHANG)


def descendants() -> list[int]:
    return children_of(os.getpid())


def adopted() -> list[int]:
    """Return orphaned processes of sandboxes, without those of concurrent tests."""
    return [pid for pid in descendants() if is_of_a_sandbox(pid)]


def is_of_a_sandbox(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
    return state != "Z" and any(word in command for word in (b"bwrap", b"setpriv", b"/opt/sandbox/"))


def left_by(service: int) -> dict[str, list[str]]:
    """Return leftovers of a service on this host: processes, groups, directories, mounts."""
    groups = [name for _, names, _ in os.walk("/sys/fs/cgroup") for name in names]
    return {
        "processes": [str(pid) for pid in adopted()],
        "groups": [name for name in groups if name.startswith(f"nekro-run-{service}-")],
        "homes": [path.name for path in Path(tempfile.gettempdir()).glob(f"nekro-box-{service}-*")],
        "mounts": [
            line for line in Path("/proc/self/mountinfo").read_text().split("\n") if f"-{service}-" in line
        ],
    }


def kill_services(deaths: list[tuple[str, float]], root: Path, uid: int) -> list[int]:
    """Kill a service for each (point, delay in seconds); returns their process ids."""
    program = SERVICES.format(tests=str(Path(__file__).parent), root=str(root), deaths=json.dumps(deaths))
    with start(program, uid) as services:
        output, _ = services.communicate(timeout=WAIT_SECONDS)
    assert services.returncode == 0
    killed: list[int] = json.loads(output)
    assert len(killed) == len(deaths)
    return killed


NEXT = """
import asyncio, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from broker_config.settings import SandboxSettings
from nekro.sandbox.manager import SandboxManager
from sandbox_lab import Areas

async def main():
    manager = SandboxManager(SandboxSettings(), Areas(root=Path({root!r})))
    await manager.start()
    await manager.close()

asyncio.run(main())
"""


def start_next(root: Path, uid: int) -> None:
    """Start a service as the same user, and close it."""
    with start(NEXT.format(tests=str(Path(__file__).parent), root=str(root)), uid) as service:
        service.communicate(timeout=WAIT_SECONDS)
    assert service.returncode == 0


@pytest.fixture(params=["own", "other"], ids=["own_user", "ordinary_user"])
def uid(request: pytest.FixtureRequest, bwrap_driver: BwrapDriver) -> int:
    """As root with control groups where available; as an otherwise unused user, without them."""
    if request.param == "own":
        return os.geteuid()
    request.getfixturevalue("other_user")
    return 700_000 + os.getpid() % 60_000


@pytest.fixture
def root() -> Iterator[Path]:
    """A directory that every user may enter and write, unlike pytest's."""
    with tempfile.TemporaryDirectory(prefix="nekro-lab-") as name:
        os.chmod(name, 0o777)
        yield Path(name)


def assert_nothing_left(services: list[int]) -> None:
    def left() -> dict[int, dict[str, list[str]]]:
        found = {service: left_by(service) for service in services}
        return {service: left for service, left in found.items() if any(left.values())}

    wait_until(lambda: not left(), what=f"nothing to be left of {left()}")


def test_attack_L11_services_killed_at_each_step_of_a_start_leave_nothing(root: Path, uid: int) -> None:
    killed = kill_services([(point, 0) for point in STOP_POINTS], root, uid)
    start_next(root, uid)
    assert_nothing_left(killed)


def test_attack_L11_services_killed_at_any_moment_of_a_start_leave_nothing(root: Path, uid: int) -> None:
    """In steps of half a millisecond, over the time in which bubblewrap creates the sandbox."""
    killed = kill_services([("", step * 0.0005) for step in range(32)], root, uid)
    start_next(root, uid)
    assert_nothing_left(killed)
