"""Code exchanges files and directories for links while the host copies them or changes their owner."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from file_server import FileServer, file_server

from nekro.sandbox.programs import _give_home
from nekro_agent import runtime
from nekro_agent.downloads.download import fetch
from nekro_agent.errors import InvalidValueError
from nekro_agent.files import file_system as files
from nekro_agent.files.areas import OwnFile, copy_in
from nekro_agent.files.file_system import FileSystem
from nekro_agent.files.uploads import UploadArea
from nekro_agent.services.agent.creator import ContentSegment
from nekro_agent.testing import InMemoryRuntime
from nekro_agent.tools.common_util import calculate_file_md5, copy_to_upload_dir, download_file_from_bytes

__all__ = ["file_server"]

SECRET = "the host's own"
LOCAL = ("127.0.0.0/8",)


@pytest.fixture
async def fs(tmp_path: Path) -> AsyncIterator[FileSystem]:
    async with InMemoryRuntime(data_dir=tmp_path / "data") as world:
        yield world.context(plugin_key="Ada.sample").fs


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "etc" / "note.txt"
    path.parent.mkdir()
    path.write_text(SECRET)
    return path


def swap_before_copy(monkeypatch: pytest.MonkeyPatch, victim: Path, target: Path) -> list[str]:
    """Replace ``victim`` by a link to ``target`` right before the host copies; returns the result."""
    swaps: list[str] = []
    put, add = UploadArea.put, UploadArea.add

    def swap() -> None:
        victim.rename(victim.with_name("aside"))
        victim.symlink_to(target)
        swaps.append(victim.name)

    def swapped(*args: Any) -> None:
        swap()
        copy_in(*args)

    def swapped_put(area: UploadArea, *args: Any) -> None:
        swap()
        put(area, *args)

    def swapped_add(area: UploadArea, *args: Any) -> str:
        swap()
        return add(area, *args)

    monkeypatch.setattr(files, "copy_in", swapped)
    monkeypatch.setattr(UploadArea, "put", swapped_put)
    monkeypatch.setattr(UploadArea, "add", swapped_add)
    return swaps


def delivered(fs: FileSystem) -> list[str]:
    """Texts of all regular files that the code or the chat can read."""
    areas = (fs.shared_path, fs.upload_path)
    return [
        path.read_text()
        for area in areas
        for path in area.iterdir()
        if path.is_file() and not path.is_symlink()
    ]


@pytest.mark.parametrize("deliver", ["bring_to_uploads", "mixed_forward_file"])
async def test_file_given_by_its_host_path_cannot_be_exchanged(
    fs: FileSystem, secret: Path, monkeypatch: pytest.MonkeyPatch, deliver: str
) -> None:
    """The host path of the shared area is visible in mountinfo."""
    live = fs.shared_path / "note.txt"
    live.write_text("mine")
    swaps = swap_before_copy(monkeypatch, live, secret)
    await getattr(fs, deliver)(str(live), "other.txt")
    assert swaps == ["note.txt"]
    assert SECRET not in delivered(fs)


@pytest.mark.parametrize("deliver", ["bring_to_uploads", "mixed_forward_file"])
async def test_file_given_with_parent_references_cannot_be_exchanged(
    fs: FileSystem, secret: Path, monkeypatch: pytest.MonkeyPatch, deliver: str
) -> None:
    (fs.shared_path / "note.txt").write_text("mine")
    (fs.shared_path / "d").mkdir()
    (secret.parent / "below").mkdir()
    swaps = swap_before_copy(monkeypatch, fs.shared_path / "d", secret.parent / "below")
    await getattr(fs, deliver)(f"{fs.shared_path}/d/../note.txt", "other.txt")
    assert swaps == ["d"]
    assert SECRET not in delivered(fs)


async def test_target_of_a_plugins_own_link_cannot_be_exchanged(
    fs: FileSystem, secret: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plugin may keep a link into the shared area; the path is resolved once and opened without links."""
    live = fs.shared_path / "note.txt"
    live.write_text("mine")
    link = runtime.current().areas.plugin_dir("Ada.sample") / "link.txt"
    link.symlink_to(live)
    opened = OwnFile.open

    def swapped(found: OwnFile) -> Any:
        live.unlink()
        live.symlink_to(secret)
        return opened(found)

    monkeypatch.setattr(OwnFile, "open", swapped)
    with pytest.raises(InvalidValueError, match="over a link"):
        await fs.mixed_forward_file(link, "other.txt")
    assert SECRET not in delivered(fs)


async def test_data_directory_behind_a_link_is_protected_equally(
    tmp_path: Path, secret: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "data").symlink_to(tmp_path / "real")
    async with InMemoryRuntime(data_dir=tmp_path / "data") as world:
        fs = world.context(plugin_key="Ada.sample").fs
        live = fs.shared_path.resolve() / "note.txt"
        live.write_text("mine")
        swaps = swap_before_copy(monkeypatch, live, secret)
        for deliver in (fs.bring_to_uploads, fs.mixed_forward_file):
            await deliver(str(live), "other.txt")
            assert swaps.pop() == "note.txt" and SECRET not in delivered(fs)
            live.unlink()
            live.write_text("mine")
            (live.with_name("aside")).unlink()


@pytest.fixture
def outside(fs: FileSystem, tmp_path: Path) -> Path:
    """A directory of the host that code reaches by a link ``/app/shared/out``."""
    directory = tmp_path / "outside"
    directory.mkdir()
    (fs.shared_path / "out").symlink_to(directory)
    return directory


async def test_no_download_follows_a_planted_directory_link(
    fs: FileSystem, outside: Path, file_server: FileServer
) -> None:
    url = file_server.add("/f", b"planted")
    for target in (fs.shared_path / "out" / "f", fs.shared_path / "out" / "new" / "f"):
        with pytest.raises(InvalidValueError, match="is refused"):
            await fetch(url, target, allow_private=LOCAL)
        with pytest.raises(InvalidValueError, match="is refused"):
            await download_file_from_bytes(b"planted", target)
    assert list(outside.iterdir()) == []
    found = await fetch(url, fs.shared_path / "new" / "f", allow_private=LOCAL)
    assert found.path == fs.shared_path / "new" / "f" and found.path.read_bytes() == b"planted"
    await download_file_from_bytes(b"bytes", found.path)
    assert [path.name for path in found.path.parent.iterdir()] == [
        "f"
    ] and found.path.read_bytes() == b"bytes"


async def test_a_directory_that_is_exchanged_during_a_download_changes_nothing_outside(
    fs: FileSystem, outside: Path, file_server: FileServer
) -> None:
    target = fs.shared_path / "d" / "f"

    def exchange(done_bytes: int, whole_bytes: int | None) -> None:
        if not target.parent.is_symlink():
            target.parent.rename(fs.shared_path / "aside")
            target.parent.symlink_to(outside)

    url = file_server.add("/f", b"planted")
    await fetch(url, target, allow_private=LOCAL, progress=exchange)
    assert list(outside.iterdir()) == []
    assert (fs.shared_path / "aside" / "f").read_bytes() == b"planted"


async def test_no_read_of_a_path_in_the_area_follows_a_planted_link(fs: FileSystem, outside: Path) -> None:
    (outside / "a.png").write_bytes(b"\x89PNG of the host")
    (fs.shared_path / "a.png").symlink_to(outside / "a.png")
    for path in (fs.shared_path / "out" / "a.png", fs.shared_path / "a.png"):
        with pytest.raises(InvalidValueError, match="over a link"):
            ContentSegment.image_content_from_path(path)
        with pytest.raises(InvalidValueError, match="over a link"):
            await copy_to_upload_dir(path, from_chat_key=fs.chat_key)
        with pytest.raises(InvalidValueError, match="over a link"):
            calculate_file_md5(path)
    assert list(fs.upload_path.iterdir()) == []


RENAME_EXCHANGE = 2


@pytest.mark.root
def test_a_home_is_given_away_without_what_its_program_links_to(tmp_path: Path, secret: Path) -> None:
    """A program that still runs exchanges a directory of its home for a link, thousands of times a second."""
    if os.geteuid() != 0:
        pytest.skip("needs root to give files away")
    home = tmp_path / "home"
    (home / "d").mkdir(parents=True)
    (home / "d" / secret.name).write_text("mine")
    (home / "link").symlink_to(secret.parent)
    names = [os.fsencode(home / name) for name in ("d", "link")]
    exchange = ctypes.CDLL(None).renameat2
    stop = threading.Event()

    def swap() -> None:
        while not stop.is_set():
            exchange(-100, names[0], -100, names[1], RENAME_EXCHANGE)

    thread = threading.Thread(target=swap)
    thread.start()
    try:
        for number in range(2_000):
            _give_home(home, 12345 + number % 2)
            assert secret.stat().st_uid == secret.parent.stat().st_uid == 0
    finally:
        stop.set()
        thread.join()


@pytest.mark.root
def test_a_home_that_was_given_away_in_part_is_given_away(tmp_path: Path, secret: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root to give files away")
    home = tmp_path / "home"
    (home / "d" / "e").mkdir(parents=True)
    (home / "d" / "e" / "file").touch()
    (home / "link").symlink_to(secret)
    os.chown(home / "d", 12346, 12346)
    home.chmod(0o700)
    _give_home(home, 12346)
    owned = (home, *home.rglob("*"))
    assert len(owned) == 5 and {path.lstat().st_uid for path in owned} == {12346}
    assert home.stat().st_mode & 0o777 == 0o711
    assert secret.stat().st_uid == 0
