"""``/app/shared`` on images: limited by the kernel, kept over restarts and crashes, deleted when idle."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from sandbox_lab import REPOSITORY, Lab, lab
from waiting import wait_until

from broker_config.settings import SandboxSettings
from nekro.sandbox.drivers.bwrap import BwrapDriver
from nekro.sandbox.images import (
    _check_local,
    check_images,
    drop_idle,
    is_bounded,
    mount_and_hold,
)
from nekro.sandbox.models import Limit, StopType
from nekro_agent.errors import SandboxUnavailableError

SETTINGS = {"shared_storage": "image", "shared_bytes": 16 << 20, "shared_files": 500}
SMALL = SandboxSettings(shared_storage="image", shared_bytes=16 << 20, shared_files=500)


@pytest.fixture(scope="session")
def images() -> None:
    """Needs root, loop devices and the tools of ext4."""
    try:
        check_images(SandboxSettings(shared_storage="image"), None)
    except SandboxUnavailableError as exc:
        pytest.skip(str(exc))


@pytest.fixture
def root(tmp_path: Path, images: None) -> Iterator[Path]:
    """A data directory; every mount below it is unmounted at the end."""
    yield tmp_path
    for line in Path("/proc/self/mountinfo").read_text().split("\n"):
        if line and line.split(" ")[4].startswith(f"{tmp_path}/"):
            subprocess.run(["umount", "--lazy", line.split(" ")[4]], check=False)


@pytest.fixture
async def imaged(root: Path, bwrap_driver: BwrapDriver) -> AsyncIterator[Lab]:
    async with lab(root, **SETTINGS, max_file_bytes=1 << 20) as box:
        yield box


def image_of(directory: Path) -> Path:
    return directory.parent.with_name(f"{directory.parent.name}-images") / f"{directory.name}.img"


FILL = "for number in range(99):\n    open(f'shared/{number}', 'wb').write(b'x' * (1 << 20))"
NAMES = "for number in range(9999):\n    open(f'shared/{number}', 'wb').close()"
DIRECTORIES = "import os\nfor number in range(9999):\n    os.mkdir(f'shared/{number}')"
UNLINKED = """
import os
held = []
for number in range(99):
    held.append(os.open('shared/u', os.O_CREAT | os.O_WRONLY))
    os.unlink('shared/u')
    os.write(held[-1], b'x' * (1 << 20)) == 1 << 20 or os.write(held[-1], b'x')
"""
IN_FLIGHT_WITHIN = """
import os, socket
outer = socket.socketpair()
for _ in range(9):
    ours, theirs = socket.socketpair()
    for number in range(10):
        fd = os.open('shared/u', os.O_CREAT | os.O_WRONLY)
        os.unlink('shared/u')
        os.write(fd, b'x' * (1 << 20)) == 1 << 20 or os.write(fd, b'x')
        socket.send_fds(ours, [b'x'], [fd])
        os.close(fd)
    socket.send_fds(outer[0], [b'x'], [theirs.fileno()])
    ours.close()
    theirs.close()
"""
RESERVED = """
import os
for number in range(99):
    os.posix_fallocate(os.open(f'shared/{number}', os.O_CREAT | os.O_RDWR), 0, 1 << 20)
"""
MAPPED_HOLES = """
import mmap, os
for number in range(99):
    fd = os.open(f'shared/{number}', os.O_CREAT | os.O_RDWR)
    os.truncate(fd, 1 << 20)
    area = mmap.mmap(fd, 1 << 20)
    for page in range(0, 1 << 20, 4096):
        area[page] = 1
"""


@pytest.mark.parametrize(
    "code",
    [FILL, NAMES, DIRECTORIES, UNLINKED, IN_FLIGHT_WITHIN, RESERVED],
    ids=["bytes", "names", "directories", "unlinked files", "in flight within", "reserved"],
)
async def test_attack_disk_use_of_an_area_is_limited_by_the_kernel(imaged: Lab, code: str) -> None:
    result = await imaged.run(code)
    assert (result.stop_type, result.limit) == (StopType.ERROR, Limit.DISK), result
    assert "[Errno 28]" in (result.error or "")
    size = image_of(imaged.shared()).stat()
    assert size.st_blocks * 512 <= size.st_size == (16 << 20) + (4 << 20)
    # The next run finds the files of the first one, and can delete some.
    tidy = "import os, shutil\nfor name in os.listdir('shared'):\n    path = f'shared/{name}'\n"
    tidy += "    shutil.rmtree(path) if os.path.isdir(path) else os.unlink(path)\n"
    after = await imaged.run(tidy + "open('shared/new', 'w').write('fits')")
    assert after.stop_type is StopType.NORMAL, after
    assert (imaged.shared() / "new").read_text() == "fits"


async def test_attack_holes_filled_through_a_mapping_end_the_run_and_not_the_service(imaged: Lab) -> None:
    """A mapped page without a free block is a SIGBUS of the code."""
    result = await imaged.run(MAPPED_HOLES)
    assert (result.stop_type, result.exit_code) == (StopType.ERROR, 128 + 7), result
    assert (await imaged.run("print('next')")).output == "next\n"


async def test_area_is_mounted_without_setuid_and_devices(imaged: Lab) -> None:
    await imaged.run("")
    flags = os.statvfs(imaged.shared()).f_flag
    assert flags & os.ST_NOSUID
    assert flags & os.ST_NODEV
    assert is_bounded(imaged.shared(), imaged.settings)


async def test_files_outlive_the_service_and_its_mount(root: Path, bwrap_driver: BwrapDriver) -> None:
    async with lab(root, name="kept", **SETTINGS) as box:
        await box.run("open('shared/kept', 'w').write('first')")
        directory = box.shared()
    assert (directory / "kept").read_text() == "first"  # plugins can still access it
    subprocess.run(["umount", str(directory)], check=True)  # as after a reboot
    async with lab(root, name="kept", **SETTINGS) as box:
        assert (await box.run("print(open('shared/kept').read())")).output == "first\n"


async def test_concurrent_services_share_one_file_system(root: Path, bwrap_driver: BwrapDriver) -> None:
    async with AsyncExitStack() as stack:
        boxes = [await stack.enter_async_context(lab(root, name="both", **SETTINGS)) for _ in range(3)]
        codes = [f"open('shared/{number}', 'w').write('x' * 100_000)" for number in range(3)]
        results = await asyncio.gather(*(box.run(code) for box, code in zip(boxes, codes, strict=True)))
        assert [result.stop_type for result in results] == [StopType.NORMAL] * 3, results
        directory = boxes[0].shared()
    mounts = [line for line in Path("/proc/self/mountinfo").read_text().split("\n") if str(directory) in line]
    assert len(mounts) == 1
    assert sorted(path.name for path in directory.iterdir()) == ["0", "1", "2"]


def test_image_that_was_not_unmounted_is_recovered(root: Path) -> None:
    """The copy is what a host finds after a power loss: dirty, with a journal."""
    directory = root / "sandboxes" / "one"
    directory.mkdir(parents=True)
    hold = mount_and_hold(directory, SMALL)
    (directory / "file").write_text("x" * 50_000)
    fd = os.open(directory, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)
    os.sync()
    other = root / "sandboxes" / "two"
    other.mkdir()
    subprocess.run(["cp", str(image_of(directory)), str(image_of(other))], check=True)
    mount_and_hold(other, SMALL).release()
    assert (other / "file").read_text() == "x" * 50_000
    hold.release()


def loop_devices(image: Path) -> str:
    return subprocess.run(
        ["losetup", "--associated", image], capture_output=True, text=True, check=True
    ).stdout


def test_invalid_image_is_refused_with_the_fix(root: Path) -> None:
    directory = root / "sandboxes" / "one"
    directory.mkdir(parents=True)
    mount_and_hold(directory, SMALL).release()
    subprocess.run(["umount", str(directory)], check=True)
    # Until the kernel has detached the loop device, a mount would use what it holds of the old content.
    wait_until(lambda: not loop_devices(image_of(directory)), what="the loop device to be detached")
    image_of(directory).write_bytes(b"\0" * (1 << 20))
    with pytest.raises(SandboxUnavailableError, match="delete the image if it is damaged"):
        mount_and_hold(directory, SMALL)


def test_service_killed_while_formatting_blocks_nothing(root: Path) -> None:
    directory = root / "sandboxes" / "one"
    directory.mkdir(parents=True)
    image = image_of(directory)
    image.parent.mkdir()
    image.with_suffix(".new").write_bytes(b"half an image")
    mount_and_hold(directory, SMALL).release()
    assert is_bounded(directory, SMALL)


def test_idle_area_is_deleted_and_one_in_use_is_not(root: Path) -> None:
    parent = root / "sandboxes"
    for name in ("held", "idle", "unmounted"):
        (parent / name).mkdir(parents=True)
    hold = mount_and_hold(parent / "held", SMALL)
    for name in ("idle", "unmounted"):
        mount_and_hold(parent / name, SMALL).release()
        (parent / name / "file").write_text("x")
    subprocess.run(["umount", str(parent / "unmounted")], check=True)
    assert drop_idle(parent, idle_seconds=3600) == 0
    assert drop_idle(parent, idle_seconds=-10) == 2
    assert [path.stem for path in (root / "sandboxes-images").glob("*.img")] == ["held"]
    assert os.listdir(parent / "idle") == []
    hold.release()
    assert drop_idle(parent, idle_seconds=-10) == 1


def test_area_held_by_a_service_in_another_mount_namespace_is_kept(root: Path) -> None:
    directory = root / "sandboxes" / "one"
    directory.mkdir(parents=True)
    mount_and_hold(directory, SMALL).release()
    code = (
        "import sys\nfrom pathlib import Path\nfrom nekro.sandbox.shared import Hold\n"
        "hold = Hold(Path(sys.argv[1]))\nprint('held', flush=True)\nsys.stdin.read()"
    )
    with subprocess.Popen(
        ["unshare", "--mount", sys.executable, "-c", code, str(directory)],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        assert drop_idle(root / "sandboxes", idle_seconds=-10) == 0
        assert is_bounded(directory, SMALL)
        holder.kill()
    assert drop_idle(root / "sandboxes", idle_seconds=-10) == 1


def test_earlier_files_of_plugins_are_moved_in_without_following_links(root: Path) -> None:
    directory = root / "sandboxes" / "one"
    secret = root / "secret"
    secret.write_text("the host's")
    directory.mkdir(parents=True)
    mount_and_hold(directory, SMALL).release()
    (directory / "link").symlink_to(secret)  # as code can plant it
    subprocess.run(["umount", str(directory)], check=True)
    (directory / "link").write_text("a plugin's")
    (directory / "deep").mkdir()
    (directory / "deep" / "file").write_text("deep")
    mount_and_hold(directory, SMALL).release()
    assert secret.read_text() == "the host's"
    assert (directory / "link").read_text() == "a plugin's"
    assert (directory / "deep" / "file").read_text() == "deep"


def test_file_system_writable_by_other_hosts_is_refused() -> None:
    with pytest.raises(SandboxUnavailableError, match="other hosts may write"):
        _check_local(Path("/proc"))
