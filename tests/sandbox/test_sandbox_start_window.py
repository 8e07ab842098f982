"""A service that is killed while it starts a sandbox: the next start leaves nothing of it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from sandbox_lab import REPOSITORY, SYSTEM_PYTHON, wait_until

from sandbox.drivers.bwrap import BwrapDriver
from sandbox.guest.confine import children_of

#: Functions of the driver, and when the service dies: before the call or after it.
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
#: Starts sandboxes until it kills itself at a point, or says so and is killed from outside.
SERVICE = """
import asyncio, os, signal, sys, threading, time
from pathlib import Path
sys.path.insert(0, {tests!r})
from broker_config.settings import SandboxSettings
from sandbox import SandboxManager
from sandbox.drivers import bwrap
from sandbox_lab import Areas

when, _, name = {point!r}.partition(" ")

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def deadly(call):
    def dies(*args, **kwargs):
        if when == "before":
            die()
        value = call(*args, **kwargs)
        if asyncio.iscoroutine(value):
            async def waits():
                result = await value
                die()
                return result
            return waits()
        die()
        return value
    return dies

async def main():
    driver = bwrap.BwrapDriver(SandboxSettings())
    driver._cgroups, driver.interpreter
    if name == "pidfd_open":
        os.pidfd_open = deadly(os.pidfd_open)
    elif name == "open_unix_connection":
        asyncio.open_unix_connection = deadly(asyncio.open_unix_connection)
    elif name:
        setattr(bwrap, name, deadly(getattr(bwrap, name)))
    manager = SandboxManager(SandboxSettings(), Areas(root=Path({root!r})), driver=driver)
    await manager.start()
    if not name:
        launch = bwrap.launch

        def timed(*args, **kwargs):
            threading.Timer({delay!r}, die).start()  # a thread: the start goes on meanwhile
            return launch(*args, **kwargs)

        bwrap.launch = timed
    container = "killed-" + str(os.getpid())
    await manager.prepare(chat_key="chat", container_key=container)
    await manager._pool.take(("chat", container))
    time.sleep(1)
    sys.exit("the service was not killed")

asyncio.run(main())
"""


def start(program: str, uid: int) -> subprocess.Popen[bytes]:
    """Start a program as root, or as an ordinary user."""
    if uid == os.geteuid():
        return subprocess.Popen(
            [sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": str(REPOSITORY)}
        )
    packages = sysconfig.get_paths()["purelib"]
    return subprocess.Popen(
        [
            "setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups",
            str(SYSTEM_PYTHON), "-c", program,
        ],
        env={
            "PATH": "/usr/bin:/bin",
            "PYTHONPATH": f"{REPOSITORY}:{packages}",
            "PYTHONDONTWRITEBYTECODE": "1",
        },
        cwd="/",
    )  # fmt: skip


PR_SET_CHILD_SUBREAPER = 36


@pytest.fixture(autouse=True)
def adopt_orphans() -> Iterator[None]:
    """Make orphans of the services children of this process, so that they can be told from others'."""
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
    """Return processes that sandboxes left with this process: all but those that tests run beside."""
    return [pid for pid in descendants() if is_of_a_sandbox(pid)]


def is_of_a_sandbox(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
    return state != "Z" and any(word in command for word in (b"bwrap", b"setpriv", b"/opt/sandbox/"))


def left_by(service: int) -> dict[str, list[str]]:
    """Return what a service left on this host: processes, groups, directories, mounts."""
    groups = [name for _, names, _ in os.walk("/sys/fs/cgroup") for name in names]
    return {
        "processes": [str(pid) for pid in adopted()],
        "groups": [name for name in groups if name.startswith(f"nekro-run-{service}-")],
        "homes": [path.name for path in Path(tempfile.gettempdir()).glob(f"nekro-box-{service}-*")],
        "mounts": [
            line for line in Path("/proc/self/mountinfo").read_text().split("\n") if f"-{service}-" in line
        ],
    }


def kill_in_window(point: str, delay: float, root: Path, uid: int) -> int:
    """Let a service die in the window; returns its process id."""
    program = SERVICE.format(tests=str(Path(__file__).parent), point=point, root=str(root), delay=delay)
    service = start(program, uid)
    assert service.wait(60) == -signal.SIGKILL
    return service.pid


NEXT = """
import asyncio, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from broker_config.settings import SandboxSettings
from sandbox import SandboxManager
from sandbox_lab import Areas

async def main():
    manager = SandboxManager(SandboxSettings(), Areas(root=Path({root!r})))
    await manager.start()
    await manager.close()

asyncio.run(main())
"""


def start_next(root: Path, uid: int) -> None:
    """Start a service as the same user, and close it."""
    assert start(NEXT.format(tests=str(Path(__file__).parent), root=str(root)), uid).wait(60) == 0


@pytest.fixture(params=["own", "other"], ids=["own_user", "ordinary_user"])
def uid(request: pytest.FixtureRequest, bwrap_driver: BwrapDriver) -> int:
    """As root with control groups where there are any; as a user that nothing else has, without."""
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


@pytest.mark.parametrize("point", STOP_POINTS)
def test_attack_L11_service_killed_at_a_step_of_a_start_leaves_nothing(
    root: Path, uid: int, point: str
) -> None:
    service = kill_in_window(point, 0, root, uid)
    start_next(root, uid)
    assert_nothing_left([service])


def test_attack_L11_service_killed_at_any_moment_of_a_start_leaves_nothing(root: Path, uid: int) -> None:
    """In steps of half a millisecond, over the time in which bubblewrap makes the sandbox."""
    services = [kill_in_window("", step * 0.0005, root, uid) for step in range(16)]
    start_next(root, uid)
    assert_nothing_left(services)
