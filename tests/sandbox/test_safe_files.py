"""Host-side file access below directories that sandboxed code writes (F of the attack list)."""

from __future__ import annotations

import asyncio
import ctypes
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path

import pytest
from sandbox_lab import PREAMBLE, Lab

from nekro_agent.errors import InvalidValueError
from nekro_agent.files import safe_files, safe_paths

MOST = 1 << 20


@pytest.fixture(params=["openat2", "walk"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways to open a path; the second is for kernels and containers without the system call."""
    if request.param == "openat2" and not safe_paths.has_openat2():
        pytest.skip("openat2 is missing or denied here")
    monkeypatch.setattr(safe_paths, "has_openat2", lambda: request.param == "openat2")
    return str(request.param)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A directory with a file two levels down, beside a secret."""
    shared = tmp_path / "shared"
    (shared / "a" / "b").mkdir(parents=True)
    (shared / "a" / "b" / "file.txt").write_text("public")
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "file.txt").write_text("SECRET")
    return shared


def read(root: Path | int, path: str) -> bytes:
    return safe_files.read_file(root, path, max_bytes=MOST)


def test_regular_file_is_read_by_path_and_by_descriptor(root: Path, way: str) -> None:
    assert read(root, "a/b/file.txt") == b"public"
    assert read(root, "./a//b/./file.txt") == b"public"
    fd = os.open(root, os.O_RDONLY)
    try:
        assert read(fd, "a/b/file.txt") == b"public"
    finally:
        os.close(fd)


def test_missing_file_is_not_found(root: Path, way: str) -> None:
    with pytest.raises(FileNotFoundError):
        read(root, "a/none.txt")


CORPUS = [
    "..", "../secret/file.txt", "a/../../secret/file.txt", "a/b/../../../secret/file.txt",
    "./../secret/file.txt", "a/..", "/etc/passwd", "//etc/passwd", "/", "", ".", "./",
    "a/b/file.txt\0.png", "\0", "../" * 50 + "etc/passwd", "/".join(["d"] * 300),
    "a/b/file.txt/../../../../secret/file.txt",
]  # fmt: skip


@pytest.mark.parametrize("path", CORPUS)
def test_attack_F1_path_that_leads_out_is_refused_before_it_is_opened(path: str) -> None:
    with pytest.raises(InvalidValueError, match="is refused"):
        safe_files.split_path(path)


@pytest.mark.parametrize(
    "path", ["．．/secret/file.txt", "‥/secret", "..%2fsecret", "a\\..\\..\\secret", "~/x", "x" * 300]
)
def test_attack_F1_unusual_path_inside_names_no_file(root: Path, way: str, path: str) -> None:
    with pytest.raises((FileNotFoundError, InvalidValueError)):
        read(root, path)


def link_to(target: str | Path) -> Callable[[Path], object]:
    return lambda path: path.symlink_to(target)


LINKS: dict[str, Callable[[Path], object]] = {
    "absolute": lambda path: path.symlink_to(path.parent.parent / "secret" / "file.txt"),
    "relative": link_to("../secret/file.txt"),
    "inside": link_to("a/b/file.txt"),
    "to proc": link_to("/proc/self/root/etc/passwd"),
    "dangling": link_to("nowhere"),
    "to itself": link_to("x"),
}


@pytest.mark.parametrize("kind", LINKS)
def test_attack_F2_link_is_refused(root: Path, way: str, kind: str) -> None:
    LINKS[kind](root / "x")
    with pytest.raises(InvalidValueError, match="link"):
        read(root, "x")


@pytest.mark.parametrize("target", ["../secret", "/proc/self/root", "a"])
def test_attack_F2_directory_link_in_the_path_is_refused(root: Path, way: str, target: str) -> None:
    (root / "d").symlink_to(target)
    with pytest.raises(InvalidValueError):
        read(root, "d/file.txt")


SWAP = """
RENAME_EXCHANGE = 2
os.symlink({secret!r}, "/app/shared/link")
os.symlink({secret!r} + "/file.txt", "/app/shared/plainlink")
os.makedirs("/app/shared/d", exist_ok=True)
for path in ("/app/shared/d/file.txt", "/app/shared/plain"):
    open(path, "w").write("public")
started()
while True:
    for _ in range(100):
        _libc.renameat2(-100, b"/app/shared/d", -100, b"/app/shared/link", RENAME_EXCHANGE)
        _libc.renameat2(-100, b"/app/shared/plain", -100, b"/app/shared/plainlink", RENAME_EXCHANGE)
"""


@pytest.mark.extended
async def test_attack_F3_swap_race_from_inside_leaks_nothing(box: Lab, way: str, tmp_path: Path) -> None:
    """Code in a real sandbox swaps directory and file for links while the host reads 20,000 times."""
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "file.txt").write_text("SECRET")
    outcomes = {"public": 0, "refused": 0}

    def race() -> None:
        for number in range(20_000):
            try:
                data = read(box.shared(), ("d/file.txt", "plain")[number % 2])
            except (InvalidValueError, OSError):
                outcomes["refused"] += 1
            else:
                assert data == b"public"
                outcomes["public"] += 1

    async def started() -> None:
        await asyncio.to_thread(race)
        box.manager.stop("race")

    box.handlers["started"] = started
    code = PREAMBLE + SWAP.format(secret=str(secret)).replace(
        "started()\n", "import threading\nthreading.Thread(target=started).start()\n"
    )
    await box.run(code, run_id="race")
    assert sum(outcomes.values()) == 20_000
    # Without both outcomes there was no race.
    assert outcomes["public"] > 0
    assert outcomes["refused"] > 0


def plant_sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


def plant_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        directory = os.open(path.parent, os.O_RDONLY)
        # Through /proc, because a socket's path has at most 107 bytes.
        sock.bind(f"/proc/self/fd/{directory}/{path.name}")
        os.close(directory)


PLANTED: dict[str, Callable[[Path], object]] = {
    "fifo": os.mkfifo,
    "socket": plant_socket,
    "directory": lambda path: path.mkdir(),
    "sparse": plant_sparse,
    "hard link": lambda path: os.link(path.parent / "a" / "b" / "file.txt", path),
    "device": lambda path: os.mknod(path, 0o600 | 0o20000, os.makedev(1, 5)),
}


@pytest.mark.parametrize("kind", PLANTED)
def test_attack_F4_special_file_is_refused_at_once(root: Path, way: str, kind: str) -> None:
    try:
        PLANTED[kind](root / "x")
    except PermissionError:
        pytest.skip("needs root to make a device")
    with pytest.raises(InvalidValueError):
        read(root, "x")


def test_attack_F4_file_that_grows_while_it_is_read_is_refused(root: Path) -> None:
    path = root / "grows"
    path.write_bytes(b"x")
    stop = threading.Event()

    def grow() -> None:
        with path.open("ab") as file:
            while not stop.is_set() and file.tell() < 64 << 20:
                file.write(b"x" * 65536)
                file.flush()

    thread = threading.Thread(target=grow)
    with safe_files.open_file(root, "grows") as file:
        thread.start()
        try:
            with pytest.raises(InvalidValueError, match="more than"):
                for _ in safe_files._capped(file, MOST, "grows"):
                    while path.stat().st_size < 8 << 20:
                        time.sleep(0)
        finally:
            stop.set()
            thread.join()


def test_file_of_exactly_the_limit_is_read(root: Path) -> None:
    (root / "full").write_bytes(b"x" * 100)
    assert len(safe_files.read_file(root, "full", max_bytes=100)) == 100
    with pytest.raises(InvalidValueError, match="more than 99 bytes"):
        safe_files.read_file(root, "full", max_bytes=99)


def test_copy_out_creates_a_private_file_or_nothing(root: Path, tmp_path: Path) -> None:
    target = tmp_path / "copy"
    assert safe_files.copy_out(root, "a/b/file.txt", destination=target, max_bytes=MOST) == 6
    assert target.read_text() == "public"
    assert target.stat().st_mode & 0o777 == 0o600
    with pytest.raises(FileExistsError):
        safe_files.copy_out(root, "a/b/file.txt", destination=target, max_bytes=MOST)
    with pytest.raises(InvalidValueError):
        safe_files.copy_out(root, "a/b/file.txt", destination=tmp_path / "none", max_bytes=3)
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("planted", ["link", "dangling", "file", "fifo"])
def test_attack_F5_planted_entry_is_never_written_through(root: Path, way: str, planted: str) -> None:
    secret = root.parent / "secret" / "file.txt"
    ways: dict[str, Callable[[Path], object]] = {
        "link": link_to(secret),
        "dangling": link_to(root.parent / "made"),
        "file": lambda path: path.write_text("old"),
        "fifo": os.mkfifo,
    }
    ways[planted](root / "x")
    with pytest.raises(FileExistsError):
        safe_files.create_file(root, "x", b"data")
    assert secret.read_text() == "SECRET"
    assert not (root.parent / "made").exists()


def test_attack_F6_delivery_below_a_planted_directory_link_is_refused(root: Path, way: str) -> None:
    (root / "out").symlink_to(root.parent / "secret")
    with pytest.raises(InvalidValueError):
        safe_files.create_file(root, "out/new.txt", b"data")
    assert [path.name for path in (root.parent / "secret").iterdir()] == ["file.txt"]


def test_delivered_file_is_complete_and_belongs_to_the_directorys_owner(root: Path, way: str) -> None:
    if os.geteuid() == 0:
        os.chown(root, 12345, 12345)
    assert safe_files.create_file(root, "new/deep/file.bin", BytesIO(b"x" * 3_000_000)) == "new/deep/file.bin"
    made = root / "new" / "deep" / "file.bin"
    assert made.stat().st_size == 3_000_000
    assert made.stat().st_uid == made.parent.stat().st_uid == root.stat().st_uid


def test_attack_F11_unusual_names_are_listed_and_read_safely(root: Path, way: str) -> None:
    names = [b"new\nline", b"a" * 255, b"\xff\xfe", b"-rf", b" ", "größe".encode(), b"\x1b[2J"]
    for name in names:
        (Path(os.fsdecode(os.path.join(os.fsencode(root), name)))).write_bytes(name)
    (root / "link").symlink_to("a")
    os.mkfifo(root / "fifo")
    entries = {entry.path: entry for entry in safe_files.list_files(root, max_entries=1000)}
    assert set(entries) == {*map(os.fsdecode, names), "a/b/file.txt"}
    for name in names:
        assert read(root, os.fsdecode(name)) == name
        assert entries[os.fsdecode(name)].size_bytes == len(name)


def test_listing_stops_at_its_limit(root: Path) -> None:
    for number in range(50):
        (root / f"f{number}").touch()
    assert sum(1 for _ in safe_files.walk(root, max_entries=10)) == 10
    assert safe_files.measure(root, max_entries=10)[1] == 10


def test_measure_counts_disk_blocks_not_length(root: Path) -> None:
    plant_sparse(root / "sparse")
    used_bytes, names = safe_files.measure(root, max_entries=100)
    assert used_bytes < 1 << 20
    assert names == 4


def test_emptying_removes_everything_and_follows_no_link(root: Path, tmp_path: Path) -> None:
    (root / "link").symlink_to(tmp_path / "secret")
    (root / "a" / "up").symlink_to("../..")
    os.mkfifo(root / "fifo")
    assert safe_files.empty_directory(root) == 6
    assert list(root.iterdir()) == []
    assert (tmp_path / "secret" / "file.txt").read_text() == "SECRET"


def test_remove_file_removes_the_link_not_its_target(root: Path, tmp_path: Path) -> None:
    (root / "link").symlink_to(tmp_path / "secret" / "file.txt")
    safe_files.remove_file(root, "link")
    assert (tmp_path / "secret" / "file.txt").exists()
    (root / "d").symlink_to(tmp_path / "secret")
    with pytest.raises(InvalidValueError):
        safe_files.remove_file(root, "d/file.txt")


@pytest.mark.root
def test_ownership_is_changed_without_following_links(root: Path, tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root to give files away")
    (root / "link").symlink_to(tmp_path / "secret" / "file.txt")
    safe_files.take_ownership(root, uid=12345, gid=12345, max_entries=100)
    assert (tmp_path / "secret" / "file.txt").stat().st_uid == 0
    assert {node.info.st_uid for node in safe_files.walk(root, max_entries=100)} == {12345}


@pytest.fixture
def planted_modules(box: Lab) -> Iterator[Lab]:
    """A shared directory full of names of importable modules."""
    for name in (
        "json.py",
        "sitecustomize.py",
        "usercustomize.py",
        "os.py",
        "evil.pth",
        "__init__.py",
        "socket.py",
    ):
        (box.shared() / name).write_text("import sys; print('PLANTED')\nraise SystemExit(7)\n")
    yield box


async def test_attack_F12_planted_modules_are_not_imported(planted_modules: Lab) -> None:
    code = """
import json, os, socket, subprocess, sys
open('/app/shared/json2.py', 'w')
print('/app' in sys.path, '/app/shared' in sys.path, '' in sys.path)
command = [sys.executable, '-c', 'import json; print(json.__file__)']
print(subprocess.run(command, capture_output=True, text=True, cwd='/tmp').stdout)
"""
    for _ in range(2):
        result = await planted_modules.run(code)
        assert "PLANTED" not in result.output
        assert result.output.startswith("False False False\n/")


async def test_attack_F2_links_created_inside_are_refused_outside(box: Lab, way: str) -> None:
    code = """
import os
os.symlink('/etc/passwd', 'shared/absolute')
os.symlink('../../../../etc', 'shared/directory')
open('shared/real', 'w').write('x')
os.link('shared/real', 'shared/hard')
"""
    await box.run(code)
    for path in ("absolute", "directory/passwd", "hard", "real"):
        with pytest.raises(InvalidValueError):
            read(box.shared(), path)


def test_renameat2_exists_for_the_race() -> None:
    assert hasattr(ctypes.CDLL(None), "renameat2")
