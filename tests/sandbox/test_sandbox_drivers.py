"""The drivers without bubblewrap: landlock, unsafe, and the container engine's command line."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from loguru import logger
from sandbox_lab import REPOSITORY, Lab, host_processes, lab
from waiting import WAIT_SECONDS, wait_until

from broker_config.settings import SandboxSettings
from nekro.sandbox.driver import SandboxSpec
from nekro.sandbox.drivers.container import ContainerDriver
from nekro.sandbox.drivers.selection import describe, probe
from nekro.sandbox.drivers.supervised import UNSAFE_SWITCH, LandlockDriver, UnsafeDriver
from nekro.sandbox.guest.confine import LEAST_LANDLOCK, landlock_version
from nekro.sandbox.leftovers import ServiceId, make_home, own_id, pid_namespace, sweep_homes
from nekro.sandbox.models import Limit, StopType
from nekro_agent.errors import SandboxUnavailableError


@pytest.fixture
def open_dir() -> Iterator[Path]:
    """A directory that every user may enter: these drivers use paths of the host."""
    with tempfile.TemporaryDirectory(prefix="nekro-test-") as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.fixture
async def fenced(open_dir: Path) -> AsyncIterator[Lab]:
    """A lab on the landlock driver."""
    if landlock_version() < LEAST_LANDLOCK:
        pytest.skip(f"the kernel's Landlock is version {landlock_version()}, {LEAST_LANDLOCK} is needed")
    settings = SandboxSettings(driver="landlock")
    driver = LandlockDriver(settings)
    try:
        _ = driver.interpreter
    except SandboxUnavailableError as exc:
        pytest.skip(str(exc))
    async with lab(open_dir, use=driver) as box:
        yield box


async def test_landlock_writes_relative_names_to_the_shared_files(fenced: Lab) -> None:
    (fenced.areas.uploads_dir("chat") / "in.txt").write_text("upload")
    result = await fenced.run(
        "open('out.txt', 'w').write(open('uploads/in.txt').read())\nprint(open('shared/out.txt').read())"
    )
    assert result.output == "upload\n", result
    assert [path.name for path in fenced.shared().iterdir()] == ["out.txt"]


async def test_landlock_runs_code_with_methods_and_files(fenced: Lab) -> None:
    (fenced.areas.uploads_dir("chat") / "in.txt").write_text("upload")
    result = await fenced.run(
        "print(open('uploads/in.txt').read(), echo(1))\nopen('shared/out.txt', 'w').write('x')"
    )
    assert (result.stop_type, result.output) == (StopType.NORMAL, "upload ((1,), {})\n")
    assert result.driver == "landlock"
    assert (fenced.shared() / "out.txt").read_text() == "x"


async def test_landlock_denies_files_network_and_processes(fenced: Lab) -> None:
    code = f"""
def read(path):
    return open(path).read(10)
for path in ("/etc/passwd", "/etc/hostname", "/proc/self/environ", "/proc/1/cmdline", "/root", {__file__!r}):
    attempt("read " + path, lambda: os.listdir(path) if os.path.isdir(path) else read(path))
for path in ("/tmp/x", "/dev/shm/x", "/usr/x", "uploads/x", "../x", {str(Path(__file__).parent / "x")!r}):
    attempt("write " + path, lambda: open(path, "w"))
for family in (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, 16, 40):
    attempt("socket %d" % family, lambda: socket.socket(family))
attempt("signal", lambda: os.kill({os.getpid()}, 0))
attempt("root", lambda: os.setuid(0))
attempt("run a program from shared", lambda: os.execv("shared/program", ["program"]))
"""
    program = fenced.shared() / "program"
    program.write_bytes(Path("/bin/true").resolve().read_bytes())
    program.chmod(0o755)
    attempts = await fenced.attempts(code)
    assert {label for label, outcome in attempts.items() if outcome[0] != "refused"} == set()


@pytest.mark.extended
async def test_landlock_ends_daemons_with_their_run(fenced: Lab) -> None:
    code = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(60)
    os._exit(0)
"""
    for end in ("", "while True: pass", "agent()"):
        await fenced.run(code + end, wall_seconds=1)
        if end == "agent()":
            await fenced.run(
                ""
            )  # that result does not wait for the killed processes; the chat's next run does
        if os.geteuid() == 0:
            assert host_processes(fenced.user()) == []


@pytest.mark.extended
async def test_landlock_enforces_limits(fenced: Lab) -> None:
    endless = await fenced.run("while True: pass", wall_seconds=0.3)
    assert (endless.stop_type, endless.limit) == (StopType.TIMEOUT, Limit.WALL)
    greedy = await fenced.run("held = []\nwhile True: held.append(b'x' * (32 << 20))")
    assert (greedy.stop_type, greedy.limit) == (StopType.ERROR, Limit.MEMORY)


async def test_landlock_leaves_no_directory_behind(fenced: Lab) -> None:
    before = set(Path("/tmp").glob(f"nekro-box-{os.getpid()}-*"))
    await fenced.run("print(1)")
    assert set(Path("/tmp").glob(f"nekro-box-{os.getpid()}-*")) <= before


async def test_landlock_is_described_as_degraded(fenced: Lab) -> None:
    capability = await describe(SandboxSettings(driver="landlock"))
    lines = {check.name: check for check in capability.checks}
    assert not lines["processes"].ok
    assert "no namespaces" in lines["processes"].detail
    assert lines["landlock"].ok


async def test_landlock_does_not_build_packages(fenced: Lab) -> None:
    spec = SandboxSpec(shared_dir=Path("/tmp"), uploads_dir=Path("/tmp"), uid=200_000, loopback=True)
    with pytest.raises(SandboxUnavailableError, match="no network of its own"):
        await LandlockDriver(fenced.settings).start(spec)


async def test_old_landlock_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nekro.sandbox.guest.confine.landlock_version", lambda: 4)
    capability = await probe(LandlockDriver(SandboxSettings(driver="landlock")), SandboxSettings())
    assert not capability.ok
    assert "use Linux 6.12 or newer" in capability.reasons[0]


async def test_unsafe_driver_runs_with_both_switches_and_warns(
    open_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    warnings: list[str] = []
    sink = logger.add(warnings.append, level="WARNING")
    monkeypatch.setenv(UNSAFE_SWITCH, "1")
    settings = SandboxSettings(driver="unsafe", python=Path("/usr/bin/python3"))
    driver = UnsafeDriver(settings)
    try:
        _ = driver.interpreter
    except SandboxUnavailableError as exc:
        pytest.skip(str(exc))
    async with lab(open_dir, use=driver) as box:
        result = await box.run("import os; print(echo(2), os.getuid() != 0, os.path.exists('/etc/passwd'))")
    assert (result.stop_type, result.driver) == (StopType.NORMAL, "unsafe")
    # Even without isolation, code does not run as root.
    assert result.output == "((2,), {}) True True\n"
    logger.remove(sink)
    assert "sandbox_unsafe_run" in "".join(warnings)


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A substitute for docker that records its arguments and runs nothing."""
    path = tmp_path / "bin" / "docker"
    path.parent.mkdir()
    path.write_text(
        f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\n'
        "case $1 in info) echo id;; image) echo sha256:0123456789abcdef;; ps) ;;"
        " run) echo refused; exit 125;; esac\n"
    )
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{path.parent}:/usr/bin:/bin")
    return tmp_path / "calls"


async def test_container_command_requests_every_restriction(engine: Path, tmp_path: Path) -> None:
    if platform.machine() not in ("x86_64", "aarch64"):
        pytest.skip("no seccomp filter for this machine")
    driver = ContainerDriver(SandboxSettings(driver="container", container_runtime="runsc"))
    spec = SandboxSpec(
        shared_dir=tmp_path / "s", uploads_dir=tmp_path / "u", uid=200_123, layers=(tmp_path / "l",)
    )
    with pytest.raises(SandboxUnavailableError, match="ended while it started: refused"):
        await driver.start(spec)
    run = next(line for line in engine.read_text().splitlines() if line.startswith("run "))
    user = 200_123 if os.geteuid() == 0 else os.geteuid()
    for words in (
        "--network none", "--read-only", "--cap-drop ALL", "--security-opt no-new-privileges",
        f"--user {user}:{user}", "--memory 536870912 --memory-swap 536870912", "--pids-limit 64", "--cpus 1",
        "--ipc private", "--runtime runsc", "--pull never", f"{tmp_path}/s:/app/shared:rw",
        f"{tmp_path}/u:/app/uploads:ro", f"{tmp_path}/l:/opt/layers/0:ro", "--ulimit fsize=33554432",
        "/tmp:rw,nosuid,nodev,mode=1777,size=67108864",
    ):  # fmt: skip
        assert words in run, words
    # The attempt leaves nothing behind.
    assert "rm --force nekro-" in engine.read_text()


async def test_container_driver_names_its_missing_requirements(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    capability = await describe(SandboxSettings(driver="container"))
    assert "no container engine (docker or podman) on PATH" in capability.reasons[0]


async def test_missing_container_image_is_named_with_the_command_to_get_it(
    engine: Path, tmp_path: Path
) -> None:
    docker = tmp_path / "bin" / "docker"
    docker.write_text("#!/bin/sh\ncase $1 in image) exit 1;; esac\n")
    capability = await describe(SandboxSettings(driver="container", container_image="some/image:1"))
    assert not capability.ok
    assert "docker pull some/image:1" in capability.reasons[0]


SUPERVISOR = """
import asyncio, os, sys
sys.path.insert(0, {tests!r})
from pathlib import Path
from broker_config.settings import SandboxSettings
from nekro.sandbox.drivers.supervised import LandlockDriver
from sandbox_lab import lab

async def main():
    driver = LandlockDriver(SandboxSettings(driver="landlock"))
    async with lab(Path({root!r}), use=driver, name={name!r}) as box:
        box.handlers["started"] = lambda: print("started", flush=True)
        await box.run("import time\\nstarted()\\ntime.sleep(60)", chat_key="killed")

asyncio.run(main())
"""


@pytest.mark.extended
async def test_landlock_processes_end_with_a_killed_service(fenced: Lab) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root mode, where the code's host user tells its processes from others")
    program = SUPERVISOR.format(
        tests=str(Path(__file__).parent), root=str(fenced.areas.root), name=fenced.name
    )
    service = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )
    assert service.stdout is not None
    try:
        assert service.stdout.readline() == b"started\n"
    finally:
        os.kill(service.pid, signal.SIGKILL)
        service.wait(WAIT_SECONDS)
        service.stdout.close()
    user = fenced.user("killed")
    wait_until(lambda: host_processes(user) == [], what="the processes of the killed service to end")
    sweep_homes()
    assert not list(Path(tempfile.gettempdir()).glob(f"nekro-box-{service.pid}-*"))


def test_directories_of_killed_services_are_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    me = own_id()
    here = f"ns{pid_namespace()}"
    kept = {"nekro-box-x", f"other-4194999-1-{here}-abc", "nekro-box-4194999-1-ns1-abc"}
    reused = f"nekro-box-{me.pid}-{me.started + 1}-{here}-abc"
    for name in (f"nekro-box-4194999-1-{here}-abc", reused, *kept):
        (tmp_path / name).mkdir()
    mine = make_home()
    sweep_homes()
    assert {path.name for path in tmp_path.iterdir()} == {mine.name, *kept}


class TestServiceId:
    def test_round_trip(self) -> None:
        assert ServiceId.parse(str(own_id())) == own_id()

    @pytest.mark.parametrize("text", ["", "4194999", "a/b/c/d/e", "a/b/c/1", "a/b/c/1/2/3", "<no value>"])
    def test_id_of_another_version_or_program_has_no_owner(self, text: str) -> None:
        assert ServiceId.parse(text) is None

    @pytest.mark.parametrize(
        ("changes", "still_runs", "is_gone"),
        [
            ({}, True, False),
            ({"pid": 4_194_999}, True, True),
            ({"started": 1}, True, True),
            ({"namespace": "1", "pid": 4_194_999}, False, False),
            ({"host": "elsewhere", "boot": "another", "pid": 4_194_999}, False, False),
            ({"boot": "another"}, False, True),
            ({"boot": "another"}, True, False),
        ],
        ids=[
            "this service", "ended", "id given again", "another container", "another host", "before a boot",
            "another host of this name",
        ],
    )  # fmt: skip
    def test_only_a_certainly_ended_service_counts_as_ended(
        self, changes: dict[str, Any], still_runs: bool, is_gone: bool
    ) -> None:
        assert replace(own_id(), **changes).is_gone(still_runs=still_runs) is is_gone
