"""Host paths that sandboxed code can learn: the kernel names the root of every bound directory.

No user or root mode changes that: ``/proc/self/mountinfo`` shows the place of a bound directory in its file
system. Nothing there may identify its owner, so the complete list is fixed here.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from broker_config.settings import DatabaseSettings, SandboxSettings
from nekro.sandbox.drivers.bwrap import BwrapDriver
from nekro.sandbox.manager import SandboxManager
from nekro.sandbox.models import RunRequest, StopType, StubCall, StubResult
from nekro_agent.errors import SandboxUnavailableError
from storage.engine import Database
from storage.files.areas import DataAreas, UploadAreas
from storage.migrate import upgrade

CHAT = "onebot_v11-group_4711"
#: Everything in /proc about this process and pid 1 that may contain a path.
LOOK = """
import os
for pid in ("self", "1"):
    for name in ("mountinfo", "mounts", "mountstats", "cmdline", "environ", "maps", "cgroup"):
        try:
            text = open(f"/proc/{pid}/{name}", errors="replace").read()
        except OSError:
            continue
        print(f"== {pid} {name}\\n{text}")
    for link in ("cwd", "root", "exe"):
        try:
            print(link, os.readlink(f"/proc/{pid}/{link}"))
        except OSError:
            continue
"""
_MOUNT = re.compile(r"^\d+ \d+ \d+:\d+ (?P<root>\S+) (?P<point>/\S*) .* - (?P<kind>\S+) ", re.MULTILINE)
#: File systems that exist for one sandbox only or contain no host path.
_OWN = {"tmpfs", "proc", "devtmpfs"}


@pytest.fixture
def data_dir() -> Iterator[Path]:
    """A data directory with a recognisable path, closed to other users like a real one."""
    with tempfile.TemporaryDirectory(prefix="nekro-paths-") as name:
        (Path(name) / "data").mkdir(mode=0o700)
        yield Path(name) / "data"


async def seen(data_dir: Path) -> str:
    """Run ``LOOK`` as the code of a chat of a real fleet and return what it printed."""
    database_settings = DatabaseSettings()
    await upgrade(database_settings, data_dir)
    database = Database(database_settings, data_dir)
    async with database.begin() as tx:
        chat = await tx.chats.ensure(CHAT)
    await database.dispose()
    settings = SandboxSettings(output_keep_bytes=1 << 20)
    names = UploadAreas(database_settings, data_dir, key="k" * 64)
    driver = BwrapDriver(settings)
    manager = SandboxManager(settings, DataAreas(data_dir, uploads=names), driver=driver)
    await manager.start()
    request = RunRequest(
        run_id="run", chat_key=CHAT, container_key=chat.container_key, code=LOOK, methods=(), dispatch=refuse
    )
    try:
        result = await manager.run(request)
    except SandboxUnavailableError as exc:
        pytest.skip(str(exc))
    finally:
        await manager.close()
        names.dispose()
    assert result.stop_type is StopType.NORMAL, result
    return result.output


async def refuse(call: StubCall) -> StubResult:
    raise AssertionError(f"no method was granted: {call}")


def bound(text: str) -> dict[str, str]:
    """Map mount points to the path within their file system, for mounts of the host's disks."""
    mounts = _MOUNT.finditer(text.partition("== self mountinfo")[2].partition("==")[0])
    return {mount["point"]: mount["root"] for mount in mounts if mount["kind"] not in _OWN}


def within_its_file_system(path: Path) -> str:
    """Convert a host path to the kernel's form: relative to the root of its file system."""
    mount = path
    while not os.path.ismount(mount):
        mount = mount.parent
    return str(Path("/") / path.relative_to(mount))


async def test_code_learns_only_two_random_ids_and_their_location(data_dir: Path) -> None:
    text = await seen(data_dir)
    assert CHAT not in text and "4711" not in text
    paths = bound(text)
    lies_at = within_its_file_system(data_dir)
    assert re.fullmatch(re.escape(lies_at) + "/sandboxes/sandbox_[0-9a-f]{32}", paths.pop("/app/shared"))
    assert re.fullmatch(re.escape(lies_at) + "/uploads/~[0-9a-f]{32}", paths.pop("/app/uploads"))
    # The rest are paths of the system under their own names; an interpreter elsewhere shows its location, and
    # so does the layer of packages, which lies in an environment of Python.
    for point in ("/opt/python", "/opt/layers/0"):
        paths.pop(point, None)
    assert all(root == within_its_file_system(Path(point)) for point, root in paths.items()), paths
    assert {Path(point).parts[1] for point in paths} <= {"usr", "bin", "sbin", "lib", "lib32", "lib64", "etc"}
    # Nothing else in /proc contains more than the list of mounts.
    rest = re.sub(re.escape(lies_at) + r"/(sandboxes/sandbox_|uploads/~)[0-9a-f]{32}", "", text)
    assert str(data_dir) not in rest and "nekro-paths-" not in rest


async def test_data_directory_with_its_own_file_system_shows_no_path(data_dir: Path) -> None:
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "nosuid,nodev,size=64m", "tmpfs", str(data_dir)],
        capture_output=True,
        text=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip(f"needs the right to mount a file system: {mounted.stderr.strip()}")
    try:
        data_dir.chmod(0o700)
        text = await seen(data_dir)
        assert "nekro-paths-" not in text
        assert re.search(r" /sandboxes/sandbox_[0-9a-f]{32} /app/shared ", text)
        assert re.search(r" /uploads/~[0-9a-f]{32} /app/uploads ", text)
    finally:
        subprocess.run(["umount", str(data_dir)], check=True)
