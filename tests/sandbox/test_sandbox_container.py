"""The container driver on a real engine: a running one, else a private daemon of the test.

The image is built from this machine's Python; nothing is downloaded.
"""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import uuid
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sandbox_attempts import FILES, KERNEL, NETWORK
from sandbox_lab import Lab, lab
from test_sandbox_interrupted import SAME, Attempts
from waiting import WAIT_SECONDS, wait_until

from broker_config.settings import SandboxSettings
from nekro.sandbox.drivers.container import ContainerDriver
from nekro.sandbox.drivers.selection import describe
from nekro.sandbox.leftovers import own_id
from nekro.sandbox.models import Limit, StopType

pytestmark = pytest.mark.slow

PYTHON = Path("/usr/bin/python3")


def docker(*arguments: str, data: bytes | None = None) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(["docker", *arguments], capture_output=True, check=False, input=data)


def engine_answers() -> bool:
    return shutil.which("docker") is not None and docker("info").returncode == 0


@pytest.fixture(scope="module")
def engine() -> Iterator[None]:
    """A container engine: the machine's, or a daemon started for these tests."""
    if engine_answers():
        yield
        return
    if os.geteuid() != 0 or not all(map(shutil.which, ("docker", "dockerd", "containerd", "runc"))):
        pytest.skip("no container engine answers, and none can be started (root and Debian's docker.io)")
    with tempfile.TemporaryDirectory(prefix="nekro-engine-") as base:
        with open(f"{base}/log", "wb") as log:
            daemon = subprocess.Popen(
                [
                    "dockerd", "--data-root", f"{base}/data", "--exec-root", f"{base}/exec",
                    "--pidfile", f"{base}/pid", "--host", f"unix://{base}/sock",
                    "--storage-driver", "overlay2", "--iptables=false", "--bridge=none",
                ],
                stdout=log,
                stderr=log,
            )  # fmt: skip
        os.environ["DOCKER_HOST"] = f"unix://{base}/sock"
        try:
            wait_until(lambda: engine_answers() or daemon.poll() is not None, what="the engine to answer")
            if daemon.poll() is not None:
                pytest.skip(f"no container engine can run here: {Path(base, 'log').read_text()[-300:]}")
            yield
        finally:
            daemon.terminate()
            daemon.wait(WAIT_SECONDS)
            del os.environ["DOCKER_HOST"]


@pytest.fixture(scope="module")
def image(engine: None) -> Iterator[str]:
    """An image that contains this machine's Python and its libraries."""
    if not PYTHON.exists():
        pytest.skip("needs a system Python to make an image of")
    real = PYTHON.resolve()
    standard = Path("/usr/lib") / real.name
    wanted = {real, *_linked(real)}
    for extension in (standard / "lib-dynload").glob("*.so"):
        wanted |= _linked(extension)
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for path in sorted(wanted):
            archive.add(path.resolve(), arcname=str(path).lstrip("/"))
        archive.add(standard, arcname=str(standard).lstrip("/"))
        link = tarfile.TarInfo("usr/bin/python3")
        link.type, link.linkname = tarfile.SYMTYPE, real.name
        archive.addfile(link)
    name = f"nekro-test-{uuid.uuid4().hex}"
    made = docker("import", "-", name, data=buffer.getvalue())
    assert made.returncode == 0, made.stderr
    yield name
    docker("image", "rm", "--force", name)


def _linked(path: Path) -> set[Path]:
    words = subprocess.run(["ldd", path], capture_output=True, text=True, check=False).stdout.split()
    return {Path(word) for word in words if word.startswith("/")}


@pytest.fixture
async def contained(image: str, tmp_path: Path) -> AsyncIterator[Lab]:
    settings: dict[str, Any] = {"driver": "container", "container_image": image}
    driver = ContainerDriver(SandboxSettings(**settings))
    async with lab(tmp_path, use=driver, **settings) as box:
        yield box


async def test_container_is_described_and_proven(image: str) -> None:
    capability = await describe(SandboxSettings(driver="container", container_image=image))
    assert capability.ok, capability.reasons


async def test_container_runs_code_with_methods_and_files(contained: Lab) -> None:
    (contained.areas.uploads_dir("chat") / "in.txt").write_text("upload")
    result = await contained.run(
        "import os\nprint(os.getcwd(), open('uploads/in.txt').read(), echo(1))\n"
        "open('/app/shared/out.txt', 'w').write('x')"
    )
    assert (result.stop_type, result.output) == (StopType.NORMAL, "/app/shared upload ((1,), {})\n")
    assert (contained.shared() / "out.txt").stat().st_uid != 0


async def test_container_ends_runs_like_the_other_drivers(contained: Lab) -> None:
    for code, stop, limit in (
        ("exit(9)", StopType.MANUAL, None),
        ("import os; os.kill(os.getpid(), 9)", StopType.ERROR, None),
        ("agent()\nreport(1)", StopType.AGENT, None),
        ("import os; os.write(3, b'garbage' * 10)\nwhile True: pass", StopType.SECURITY, None),
        ("held = []\nwhile True: held.append(b'x' * (32 << 20))", StopType.ERROR, Limit.MEMORY),
    ):
        result = await contained.run(code)
        assert (result.stop_type, result.limit) == (stop, limit), (code, result)
    endless = await contained.run("while True: pass", wall_seconds=1)
    assert (endless.stop_type, endless.limit) == (StopType.TIMEOUT, Limit.WALL)
    assert contained.reports == []


@pytest.mark.parametrize("what", ["descriptors", "random", "sqlite attached"])
async def test_container_runs_a_killed_program_again(contained: Lab, what: str) -> None:
    first, again = Attempts(contained, "undisturbed"), Attempts(contained, "killed")
    result = await first.run(SAME[what])
    assert result is not None and result.error is None, result
    assert await again.run(SAME[what], kill=len(first.calls)) is None
    ended = await again.run(SAME[what])
    assert ended is not None and (ended.output, ended.error) == (result.output, None)
    assert again.calls == first.calls and again.files() == first.files()


async def test_container_refuses_the_attacks(contained: Lab) -> None:
    fields = {
        "host_secret": "/etc/hostname.secret", "other_chat": "/other", "port": "9", "socket_path": "/nope",
        "abstract": "nope", "outside": "1000000",
    }  # fmt: skip
    for group in (FILES, NETWORK, KERNEL):
        code = group
        for field, value in fields.items():
            code = code.replace("{" + field + "}", value)
        attempts = await contained.attempts(code)
        harmless = ("N6", "N7", "N8", "K8", "K9", "K10 status", "K5", "F10 ", "F8 mkdir has", "F8 plain has")
        done = {
            label: outcome
            for label, outcome in attempts.items()
            if outcome[0] == "done" and not label.startswith(harmless)
        }
        assert done == {}


async def test_container_leaves_nothing_behind(contained: Lab) -> None:
    before = set(Path(tempfile.gettempdir()).glob(f"nekro-box-{os.getpid()}-*"))
    for code in ("print(1)", "1/0", "while True: print('x' * 9999)"):
        await contained.run(code)
    assert docker("ps", "--all", "--quiet", "--filter", "label=nekro.service").stdout == b""
    assert set(Path(tempfile.gettempdir()).glob(f"nekro-box-{os.getpid()}-*")) == before


async def test_container_of_another_service_is_never_removed(image: str) -> None:
    """Services on other hosts or in containers may share an engine, where a process id identifies nothing."""
    mine = own_id()
    owners = {
        "alive": mine,
        "ended": replace(mine, pid=4_194_999),
        "elsewhere": replace(mine, namespace="1", pid=4_194_999),
        "remote": replace(mine, host="another", boot="another", pid=4_194_999),
    }
    made = {}
    for name, owner in owners.items():
        created = docker("create", "--label", f"nekro.service={owner}", image, "/usr/bin/python3")
        assert created.returncode == 0, created.stderr
        made[name] = created.stdout.decode().strip()
    try:
        await describe(SandboxSettings(driver="container", container_image=image))
        left = docker("ps", "--all", "--quiet", "--no-trunc").stdout.decode().split()
        assert {name for name, container in made.items() if container in left} == {
            "alive",
            "elsewhere",
            "remote",
        }
    finally:
        docker("rm", "--force", *made.values())


SERVICE = """
import asyncio, sys
sys.path.insert(0, {tests!r})
from pathlib import Path
from broker_config.settings import SandboxSettings
from nekro.sandbox.drivers.container import ContainerDriver
from sandbox_lab import lab

async def main():
    settings = dict(driver="container", container_image={image!r})
    async with lab(Path({root!r}), use=ContainerDriver(SandboxSettings(**settings)), **settings) as box:
        box.handlers["started"] = lambda: print("started", flush=True)
        await box.run("started()\\nwhile True: pass")

asyncio.run(main())
"""


async def test_container_ends_with_a_killed_service(image: str, tmp_path: Path) -> None:
    program = SERVICE.format(tests=str(Path(__file__).parent), image=image, root=str(tmp_path))
    service = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert service.stdout is not None
    assert service.stdout.readline() == b"started\n"
    service.kill()
    service.wait(WAIT_SECONDS)
    service.stdout.close()
    running = ("ps", "--quiet", "--filter", "label=nekro.service")
    wait_until(lambda: docker(*running).stdout == b"", what="the container to end")
    # The next service removes stopped containers that were not removed.
    await describe(SandboxSettings(driver="container", container_image=image))
    assert docker("ps", "--all", "--quiet", "--filter", "label=nekro.service").stdout == b""
