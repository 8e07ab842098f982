"""The uploads of a chat stay within their quota and are deleted after their retention."""

from __future__ import annotations

import base64
import fcntl
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from file_server import FileServer, file_server

from broker_config.settings import RetentionSettings
from nekro_agent.errors import UploadQuotaError
from nekro_agent.files.file_system import FileSystem
from nekro_agent.files.uploads import UploadArea, remove_expired
from nekro_agent.runtime import UploadPolicy
from nekro_agent.testing import InMemoryRuntime
from nekro_agent.tools.common_util import copy_to_upload_dir, download_file, download_file_from_bytes
from workers.ops.sweeps import UploadSweep

__all__ = ["file_server"]

MIB = 1 << 20
POLICY = UploadPolicy(chat_bytes=4 * MIB, chat_names=20)
CHAT = "test-chat"
NEVER = 0.0


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[InMemoryRuntime]:
    async with InMemoryRuntime(
        data_dir=tmp_path / "data", uploads=POLICY, downloads=FileServer.policy
    ) as world:
        yield world


@pytest.fixture
def fs(world: InMemoryRuntime) -> FileSystem:
    return world.context().fs


def sizes(area: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in area.rglob("*") if path.is_file()}


def chunked(size: int) -> Callable[[BaseHTTPRequestHandler], None]:
    """An answer that does not announce its size."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.protocol_version = "HTTP/1.0"
        handler.send_response(200)
        handler.end_headers()
        handler.wfile.write(b"x" * size)

    return answer


async def test_a_sparse_file_that_is_renamed_and_sent_again_ends_at_the_quota(
    world: InMemoryRuntime, fs: FileSystem
) -> None:
    """The attack found: 60 sends of one sparse file put 1,920 MiB into the uploads."""
    ctx = world.context()
    with (fs.shared_path / "f0").open("wb") as file:
        file.truncate(MIB)
    for number in range(4):
        await ctx.send_file(f"/app/shared/f{number}")
        (fs.shared_path / f"f{number}").rename(fs.shared_path / f"f{number + 1}")
    with pytest.raises(
        UploadQuotaError, match=r"4194304 of 4194304 bytes.*NEKRO_UPLOADS__CHAT_BYTES"
    ) as caught:
        await ctx.send_file("/app/shared/f4")
    assert (caught.value.name, caught.value.size_bytes, caught.value.used_bytes) == ("f4", MIB, 4 * MIB)
    assert sizes(fs.upload_path) == {f"f{number}": MIB for number in range(4)}
    assert len(world.messages.sent) == 4
    # It counts by its apparent size, and takes no more disk than before.
    assert sum(path.stat().st_blocks * 512 for path in fs.upload_path.iterdir()) < MIB


CONTENT = b"y" * (2 * MIB)
Write = Callable[[InMemoryRuntime, FileServer, Path], Awaitable[object]]


def _local(tmp_path: Path) -> Path:
    path = tmp_path / "content"
    path.write_bytes(CONTENT)
    return path


def _linked(tmp_path: Path, area: Path) -> Path:
    link = tmp_path / "link"
    if not link.is_symlink():
        link.symlink_to(area)
    return link


WRITERS: dict[str, Write] = {
    "bytes": lambda world, _s, _p: world.context().fs.mixed_forward_file(CONTENT),
    "data url": lambda world, _s, _p: world.context().fs.mixed_forward_file(
        "data:;base64," + base64.b64encode(CONTENT).decode()
    ),
    "url": lambda world, server, _p: world.context().fs.mixed_forward_file(server.add("/f", CONTENT)),
    "url of unknown size": lambda world, server, _p: world.context().fs.mixed_forward_file(
        server.answer_with("/u", chunked(len(CONTENT)))
    ),
    "sent url": lambda world, server, _p: world.context().send_file(server.add("/f", CONTENT)),
    "download_file": lambda _w, server, _p: download_file(
        server.add("/f", CONTENT), from_chat_key=CHAT, retry_count=0
    ),
    "download_file to a path": lambda world, server, _p: download_file(
        server.add("/f", CONTENT), world.context().fs.upload_path / "f", retry_count=0
    ),
    "download_file_from_bytes": lambda _w, _s, _p: download_file_from_bytes(CONTENT, from_chat_key=CHAT),
    "download_file_from_bytes to a path": lambda world, _s, _p: download_file_from_bytes(
        CONTENT, world.context().fs.upload_path / "f"
    ),
    "download_file to a directory": lambda world, server, _p: download_file(
        server.add("/f", CONTENT), world.context().fs.upload_path / "d" / "f", retry_count=0
    ),
    "download_file_from_bytes to a directory": lambda world, _s, _p: download_file_from_bytes(
        CONTENT, world.context().fs.upload_path / "d" / "f"
    ),
    "download_file over another spelling": lambda world, server, path: download_file(
        server.add("/f", CONTENT), _linked(path, world.context().fs.upload_path) / "f", retry_count=0
    ),
    "copy_to_upload_dir": lambda _w, _s, path: copy_to_upload_dir(_local(path), from_chat_key=CHAT),
}


@pytest.mark.parametrize("writer", WRITERS)
async def test_every_writer_respects_the_quota_and_leaves_nothing_when_refused(
    world: InMemoryRuntime, file_server: FileServer, tmp_path: Path, writer: str
) -> None:
    area = world.context().fs.upload_path
    # Files that plugin code writes directly count for the next writer.
    (area / "own").write_bytes(b"z" * (2 * MIB + 1))
    with pytest.raises(UploadQuotaError):
        await WRITERS[writer](world, file_server, tmp_path)
    assert list(sizes(area)) == ["own"]
    os.truncate(area / "own", MIB)
    await WRITERS[writer](world, file_server, tmp_path)
    assert sorted(sizes(area).values()) == [MIB, 2 * MIB]


async def test_a_file_may_be_replaced_without_room_for_another(fs: FileSystem) -> None:
    for content in (b"a", b"b"):
        await fs.mixed_forward_file(content * (3 * MIB), file_name="f")
    assert (fs.upload_path / "f").read_bytes()[:1] == b"b" and list(sizes(fs.upload_path)) == ["f"]


async def test_many_small_files_end_at_the_quota(fs: FileSystem) -> None:
    (fs.upload_path / "d").mkdir()
    for number in range(POLICY.chat_names - 1):
        await fs.mixed_forward_file(b"x", file_name=str(number))
    with pytest.raises(UploadQuotaError, match=r"20 of 20 names of files"):
        await fs.mixed_forward_file(b"x", file_name="more")
    await fs.mixed_forward_file(b"y", file_name="0")


def test_names_of_255_bytes_are_stored(fs: FileSystem) -> None:
    UploadArea(fs.upload_path).put("x" * 255, b"x")
    assert list(sizes(fs.upload_path)) == ["x" * 255]


_WRITE_FROM_ANOTHER_PROCESS = """
import sys, threading
from pathlib import Path
from nekro_agent.errors import UploadQuotaError
from nekro_agent.runtime import UploadPolicy
from nekro_agent.files.uploads import UploadArea

area, me = UploadArea(Path(sys.argv[1]), UploadPolicy(chat_bytes=4 << 20, chat_names=20)), sys.argv[2]
stored = []

def work(thread):
    for number in range(4):
        try:
            area.put(f"{me}-{thread}-{number}", bytes(1 << 19))
            stored.append(1)
        except UploadQuotaError:
            pass

print("ready", flush=True)
sys.stdin.readline()
threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(len(stored))
"""


def test_concurrent_writers_of_two_processes_fill_the_quota_exactly(fs: FileSystem) -> None:
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", _WRITE_FROM_ANOTHER_PROCESS, str(fs.upload_path), name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for name in "ab"
    ]
    for writer in writers:
        assert writer.stdout is not None and writer.stdout.readline() == "ready\n"
    stored = sum(int(writer.communicate("go\n")[0]) for writer in writers)
    assert stored == 8 and sum(sizes(fs.upload_path).values()) == 4 * MIB


def test_a_file_that_grows_during_its_copy_does_not_exceed_its_reservation(
    fs: FileSystem, tmp_path: Path
) -> None:
    source, stop = tmp_path / "log", threading.Event()
    source.write_bytes(b"x" * MIB)

    def grow() -> None:
        with source.open("ab") as file:
            while not stop.is_set():
                file.write(b"x" * MIB)
                file.flush()
                file.truncate(MIB)
                file.seek(0, os.SEEK_END)

    writer = threading.Thread(target=grow)
    writer.start()
    try:
        for _ in range(30):
            with source.open("rb") as file:
                UploadArea(fs.upload_path, replace(POLICY, chat_bytes=3 * MIB)).put("log", file)
            assert sizes(fs.upload_path)["log"] <= 2 * MIB
    finally:
        stop.set()
        writer.join()


def test_a_lock_held_by_sandboxed_code_blocks_no_writer(fs: FileSystem) -> None:
    """``flock`` works on a read-only bind mount."""
    fd = os.open(fs.upload_path, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        UploadArea(fs.upload_path).put("f", b"x")
    finally:
        os.close(fd)


def test_the_error_survives_its_transfer_through_celery() -> None:
    data = {"size_bytes": 1, "used_bytes": 2, "limit_bytes": 3, "used_names": 4, "limit_names": 5}
    error = UploadQuotaError(name="f", **data)
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), vars(copy)) == (UploadQuotaError, str(error), {"name": "f", **data})


def test_a_private_copy_of_a_sparse_file_takes_no_more_disk_than_the_file(fs: FileSystem) -> None:
    with (fs.shared_path / "sparse").open("wb") as file:
        file.write(b"begin")
        file.truncate(32 * MIB)
    copy = fs.get_file("/app/shared/sparse")
    info = copy.stat()
    assert info.st_size == 32 * MIB and info.st_blocks * 512 <= MIB
    assert copy.read_bytes()[:6] == b"begin\0"


# -- retention ----------------------------------------------------------------------------


def younger_than(path: Path) -> Callable[[Path], None]:
    """Write files whose change time is later than that of ``path``; the kernel's clock advances in ticks."""

    def write(other: Path) -> None:
        while not other.exists() or other.stat().st_ctime <= path.lstat().st_ctime:
            other.write_text("new")

    return write


def test_old_files_are_deleted_and_links_not_followed(world: InMemoryRuntime, tmp_path: Path) -> None:
    root, area = world.runtime.data_dir, world.areas.uploads_dir(CHAT)
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "keep").write_text("x")
    (area / "d" / "empty").mkdir(parents=True)
    (area / "d" / "old").write_text("old")
    (area / "mixed").mkdir()
    (area / "to a directory").symlink_to(outside)
    (area / "to a file").symlink_to(outside / "keep")
    (root / "uploads" / "chat").symlink_to(outside)
    (area / "last").write_text("old")
    os.utime(area / "last", (2**31, 2**31))  # a program can set this one
    younger_than(area / "last")(area / "mixed" / "new")
    before = (area / "mixed" / "new").stat().st_ctime
    assert remove_expired(root, before=None, unfinished_before=before, limit=100) == 0
    assert remove_expired(root, before=before, unfinished_before=NEVER, limit=2) == 2
    assert remove_expired(root, before=before, unfinished_before=NEVER, limit=100) >= 4
    assert [path.relative_to(area).as_posix() for path in area.rglob("*")] == ["mixed", "mixed/new"]
    assert (outside / "keep").is_file()


def test_leftovers_of_a_killed_writer_are_deleted_even_where_files_are_kept(world: InMemoryRuntime) -> None:
    area = world.areas.uploads_dir(CHAT)
    left = [area / f".{'0a' * 8}.part", area / f".{'0b' * 8}.download"]
    for path in (area / ".hidden.part", *left):
        path.write_text("x")
    younger_than(left[-1])(area / "new")
    before = (area / "new").stat().st_ctime
    assert remove_expired(world.runtime.data_dir, before=None, unfinished_before=before, limit=100) == 2
    assert sorted(sizes(area)) == [".hidden.part", "new"]


@pytest.mark.parametrize(("days", "left"), [(0, ["f"]), (30, ["f"]), (1e-9, [])])
async def test_the_sweep_keeps_files_for_the_configured_time(
    world: InMemoryRuntime, days: float, left: list[str]
) -> None:
    area = world.areas.uploads_dir(CHAT)
    (area / "f").write_text("x")
    younger_than(area / "f")(world.runtime.data_dir / "later")
    sweep = UploadSweep(RetentionSettings(uploads_days=days), data_dir=world.runtime.data_dir)
    pause = await sweep.sweep()
    assert sorted(sizes(area)) == left
    assert pause is not None and 0 < pause <= 3600
    (area / "later").write_text("x")
    await sweep.sweep()
    assert (area / "later").exists()  # not due again


async def test_a_missing_uploads_directory_is_no_error(tmp_path: Path) -> None:
    settings: Any = RetentionSettings(uploads_days=1)
    assert await UploadSweep(settings, data_dir=tmp_path / "none").sweep()
