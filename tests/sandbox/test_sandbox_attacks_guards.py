"""Attacks on the guards themselves: their input, their timing, and their leftovers."""

from __future__ import annotations

import asyncio
import os
import stat
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
from sandbox_lab import Lab, answer, as_other_user, lab, method

from broker_config.settings import SandboxSettings
from nekro.sandbox.driver import IsolationCheck
from nekro.sandbox.drivers.bwrap import BwrapDriver
from nekro.sandbox.drivers.supervised import LandlockDriver
from nekro.sandbox.guest.confine import LEAST_LANDLOCK, landlock_version
from nekro.sandbox.limits.quota import Quota
from nekro.sandbox.models import Limit, StopType, StubCall, StubResult
from nekro_agent.files import safe_files

SMALL = {"shared_bytes": 16 << 20, "max_file_bytes": 1 << 20, "shared_files": 500}
#: Separators of ``str.splitlines`` and ``str.split``, a forged mapping, and bytes that are not text.
NAMES = {
    "newline": r"a\nb",
    "carriage return": r"a\rb",
    "U+2028": r"a\u2028b",
    "U+2029": r"a\u2029b",
    "next line": r"a\x85b",
    "vertical tab": r"a\x0bb",
    "form feed": r"a\x0cb",
    "file separator": r"a\x1cb",
    "group separator": r"a\x1db",
    "record separator": r"a\x1eb",
    "invalid utf-8": r"a\udcffb",
    "spaces": r"a   b (deleted) c",
    "imitated suffix": r"a (deleted)",
    "forged mapping": r"x\n7f0000000000-7f0000001000 rw-p 00000000 00:00 7 zzz (deleted)",
    "empty words": r"\n\n \n",
}


def carry_out(request: dict[str, Any], mode: str) -> dict[str, Any]:
    return asyncio.run(answer(request)) if mode == "own" else as_other_user(request)


@pytest.fixture(params=["own", "other"], ids=["own_user", "ordinary_user"])
def mode(request: pytest.FixtureRequest, bwrap_driver: BwrapDriver) -> str:
    """As root with control groups where available; as an ordinary user by polling alone."""
    if request.param == "other":
        request.getfixturevalue("other_user")
    return str(request.param)


MAPS_NAME = """
import mmap, os, time
for number in range(40):
    name = b'shared/' + NAME.encode('utf-8', 'surrogateescape')
    fd = os.open(name, os.O_CREAT | os.O_RDWR)
    os.write(fd, b'x' * (1 << 20))
    os.unlink(name)
    globals()[f'held{number}'] = mmap.mmap(fd, 4096)
    os.close(fd)
    if number == 0:
        time.sleep(0.3)
os.closerange(4, 256)
time.sleep(30)
"""


async def stops(tmp_path: Path, codes: dict[str, str]) -> dict[str, tuple[StopType, Limit | None]]:
    """Run several codes concurrently, each in its own chat; returns how each ended."""
    places = asyncio.Semaphore(5)

    async def run(box: Lab, name: str, code: str) -> tuple[str, tuple[StopType, Limit | None]]:
        async with places:
            result = await box.run(code, chat_key=str(list(codes).index(name)))
        return name, (result.stop_type, result.limit)

    async with lab(tmp_path, **SMALL) as box:
        return dict(await asyncio.gather(*(run(box, name, code) for name, code in codes.items())))


@pytest.mark.extended
async def test_attack_L13_name_of_a_mapped_file_does_not_blind_the_disk_guard(tmp_path: Path) -> None:
    codes = {what: f"NAME = '{name}'" + MAPS_NAME for what, name in NAMES.items()}
    assert await stops(tmp_path, codes) == dict.fromkeys(codes, (StopType.ERROR, Limit.DISK))


SOCKET_NAME = """
import os, socket, time
name = NAME.encode('utf-8', 'surrogateescape')
bound = []
for prefix in (b'\\0', b'/tmp/'):
    bound.append(socket.socket(socket.AF_UNIX))
    bound[-1].bind(prefix + name)
time.sleep(0.3)
print('alive', flush=True)
"""
SOCKETS = {
    **NAMES,
    "forged socket": r"\n0000000000000000: 00000002 00000000 00010000 0001 01 1 ",
    "broken line": r"\n0000000000000000: 00000002 00000000 00010000 0001 01 99999999999999999999999 x",
    "no number": r"\n0: 0 0 0 0 0 x y",
}


@pytest.mark.extended
async def test_attack_L13_name_of_a_socket_does_not_blind_the_guards(tmp_path: Path) -> None:
    """Only the check of the sockets' names can then count what exceeds the quota."""
    codes = {what: f"NAME = '{name.replace('/', '_')}'" + SOCKET_NAME + BIG for what, name in SOCKETS.items()}
    assert await stops(tmp_path, codes) == dict.fromkeys(codes, (StopType.ERROR, Limit.DISK))


BIG = """
held = []
for number in range(40):
    held.append(os.open('shared/u', os.O_CREAT | os.O_WRONLY))
    os.write(held[-1], b'x' * (1 << 20))
    os.unlink('shared/u')
time.sleep(30)
"""
MEMORY_BOMB = """
import os, time
def grow():
    for _ in range(8):
        if os.fork() == 0:
            held = bytearray(b'x') * (60 << 20)
            time.sleep(20)
            os._exit(0)
    time.sleep(20)
"""


@pytest.mark.extended
@pytest.mark.parametrize("trick", ["socket", "mapping", "comm", "undumpable"])
def test_attack_L13_crafted_proc_files_do_not_blind_the_memory_guard(
    bwrap_driver: BwrapDriver, request: pytest.FixtureRequest, trick: str
) -> None:
    """As an ordinary user, whose memory the kernel does not limit."""
    mode = "other" if os.geteuid() == 0 else "own"
    if mode == "other":
        request.getfixturevalue("other_user")
    tricks = {
        "socket": f"NAME = {NAMES['U+2028']!r}" + SOCKET_NAME,
        "mapping": "import mmap, os\nname = 'shared/a\\u2028\\x85b'\n"
        "fd = os.open(name, os.O_CREAT | os.O_RDWR)\nos.write(fd, b'x' * 4096)\n"
        "held = mmap.mmap(fd, 4096)\nos.unlink(name)\n",
        "comm": "import ctypes\nctypes.CDLL(None).prctl(15, b') Z 1 1\\n\\xff\\x85', 0, 0, 0)\n",
        "undumpable": "import ctypes\nctypes.CDLL(None).prctl(4, 0, 0, 0, 0)\n",
    }
    code = MEMORY_BOMB + tricks[trick] + "\ngrow()"
    result = carry_out({"code": code, "settings": {"memory_bytes": 128 << 20}}, mode)
    assert result["stop"] == "ERROR"
    assert result["limit"] in ("memory", "guard"), result


#: The first thread of a process ends while others live; /proc/PID is empty of details then.
WITHOUT_FIRST_THREAD = """
import ctypes, os, threading, time
def work():
    time.sleep(0.3)
    {work}
    time.sleep(30)
threading.Thread(target=work).start()
ctypes.CDLL(None).syscall(60, 0)
"""


def test_attack_L13_memory_of_a_process_without_its_first_thread_counts(mode: str, x86_64: None) -> None:
    work = "global held; held = bytearray(b'x') * (100 << 20)"
    code = "import os\nos.fork() and os.wait()\n" + WITHOUT_FIRST_THREAD.format(work=work)
    result = carry_out({"code": code, "settings": {"memory_bytes": 64 << 20}}, mode)
    assert (result["stop"], result["limit"]) == ("ERROR", "memory"), result


async def test_attack_L13_files_of_a_process_without_its_first_thread_count(
    tmp_path: Path, x86_64: None
) -> None:
    work = BIG.strip().replace("\n", "\n    ")
    async with lab(tmp_path, **SMALL) as box:
        result = await box.run(WITHOUT_FIRST_THREAD.format(work=work))
    assert (result.stop_type, result.limit) == (StopType.ERROR, Limit.DISK), result


async def test_attack_L13_imitated_suffix_and_renamed_mapping_count_once(tmp_path: Path) -> None:
    """A file with a forged deleted suffix is charged, and another name of a file is not an evasion."""
    code = """
import mmap, os, time
maps = []
for number in range(3):
    name = f'shared/{number} (deleted)'
    fd = os.open(name, os.O_CREAT | os.O_RDWR)
    os.write(fd, b'x' * 4096)
    maps.append(mmap.mmap(fd, 4096))
time.sleep(0.5)
print('fits')
"""
    async with lab(tmp_path, **SMALL) as box:
        result = await box.run(code)
    assert (result.stop_type, result.output) == (StopType.NORMAL, "fits\n"), result


ROLLING = """
import os, time
held = [os.open(f'shared/{n}', os.O_CREAT | os.O_WRONLY) for n in range(40)]
for number, fd in enumerate(held):
    os.unlink(f'shared/{number}')
if os.fork() == 0:
    for fd in held:
        os.write(fd, b'x' * (1 << 20))
    # Each process lives for a moment only, and hands on what it holds by a fork.
    while True:
        try:
            if os.fork():
                os._exit(0)
        except OSError:  # an ordinary user's limit counts the processes of all their sandboxes
            pass
os.closerange(4, 256)
time.sleep(30)
"""


async def test_attack_L14_files_passed_between_processes_do_not_escape(tmp_path: Path) -> None:
    async with lab(tmp_path, **SMALL) as box:
        result = await box.run(ROLLING)
    assert result.stop_type is StopType.ERROR
    assert result.limit in (Limit.DISK, Limit.GUARD), result


@pytest.mark.parametrize("chosen", [BwrapDriver, LandlockDriver])
async def test_attack_L14_slow_listing_does_not_hide_files_passed_between_processes(
    chosen: type[BwrapDriver | LandlockDriver], bwrap_driver: BwrapDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of the processes has ended when a busy host comes to look at it."""
    if chosen is LandlockDriver and landlock_version() < LEAST_LANDLOCK:
        pytest.skip(f"the kernel's Landlock is version {landlock_version()}, {LEAST_LANDLOCK} is needed")
    list_names = os.listdir

    def list_slowly(path: str = ".") -> list[str]:
        found = list_names(path)
        if path == "/proc":
            time.sleep(0.02)
        return found

    monkeypatch.setattr(os, "listdir", list_slowly)
    driver = chosen(SandboxSettings(**SMALL, driver=chosen.name))
    driver.__dict__["_cgroups"] = (None, IsolationCheck(name="groups", ok=False, detail="left out"))
    with tempfile.TemporaryDirectory(prefix="nekro-test-") as open_dir:
        os.chmod(open_dir, 0o755)  # Landlock leaves the paths of the host
        async with lab(Path(open_dir), use=driver, **SMALL) as box:
            result = await box.run(ROLLING)
    assert result.stop_type is StopType.ERROR
    assert result.limit in (Limit.DISK, Limit.GUARD), result


#: Names change as fast as the kernel allows, so that a listed name is gone when it is examined.
RENAMED_FILES = """
import os, time
names = []
for number in range(40):
    with open(f'shared/f{number}', 'wb') as file:
        file.write(b'x' * (1 << 20))
    names.append(f'shared/f{number}')
    if number == 2:
        for _ in range(4):
            if os.fork() == 0:
                import glob
                while True:
                    for name in os.listdir('shared'):
                        try:
                            os.rename(f'shared/{name}', f'shared/{os.urandom(4).hex()}')
                        except OSError:
                            pass
time.sleep(30)
"""
RENAMED_DIRECTORIES = """
import os, time
path = 'shared'
for depth in range(20):
    path += '/a'
    os.mkdir(path)
home = os.open(path, os.O_RDONLY)
for depth in range(6):
    top = 'shared' + '/a' * (3 * depth)
    if os.fork() == 0:
        while True:
            try:
                os.rename(top + '/a', top + '/b')
                os.rename(top + '/b', top + '/a')
            except OSError:
                pass
for number in range(40):
    fd = os.open(f'f{number}', os.O_CREAT | os.O_WRONLY, dir_fd=home)
    os.write(fd, b'x' * (1 << 20))
    os.close(fd)
time.sleep(30)
"""


@pytest.mark.parametrize("code", [RENAMED_FILES, RENAMED_DIRECTORIES], ids=["files", "directories"])
async def test_attack_L14_storm_of_renames_does_not_hide_files(tmp_path: Path, code: str) -> None:
    async with lab(tmp_path, **SMALL) as box:
        result = await box.run(code)
        used = Quota.at_start(box.shared(), box.settings).most_bytes
    assert result.stop_type is StopType.ERROR
    assert result.limit in (Limit.DISK, Limit.GUARD), result
    assert used == 16 << 20


@pytest.mark.extended
async def test_attack_L14_fork_storm_does_not_starve_the_disk_guard(tmp_path: Path) -> None:
    code = """
import os, time
for _ in range(20):
    if os.fork() == 0:
        while True:
            try:
                if os.fork() == 0:
                    os._exit(0)
                os.wait()
            except OSError:
                pass
for number in range(60):
    with open(f'shared/f{number}', 'wb') as file:
        file.write(b'x' * (1 << 20))
time.sleep(30)
"""
    async with lab(tmp_path, **SMALL) as box:
        result = await box.run(code)
    assert result.stop_type is StopType.ERROR
    assert result.limit in (Limit.DISK, Limit.GUARD), result


async def test_attack_L14_files_that_grow_after_they_were_counted_count_again(tmp_path: Path) -> None:
    code = """
import os, time
files = [os.open(f'shared/{n}', os.O_CREAT | os.O_WRONLY) for n in range(40)]
time.sleep(0.3)
for round in range(16):
    for fd in files:
        os.write(fd, b'x' * (64 << 10))
    time.sleep(0.05)
time.sleep(30)
"""
    async with lab(tmp_path, **SMALL) as box:
        result = await box.run(code)
    assert (result.stop_type, result.limit) == (StopType.ERROR, Limit.DISK), result


@pytest.mark.extended
async def test_attack_L14_an_expensive_look_does_not_extend_the_pause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thousands of mappings slow down each check; files written meanwhile still count."""
    code = (
        """
import mmap, os, time
fd = os.open('shared/' + 'n' * 200, os.O_CREAT | os.O_RDWR)
os.write(fd, b'x' * 8192)
os.unlink('shared/' + 'n' * 200)
held = []
try:
    while len(held) < 30000:
        # Alternating protection keeps the kernel from merging them.
        held.append(mmap.mmap(fd, 4096, prot=1 + len(held) % 2 * 2))
except OSError:
    pass
"""
        + BIG
    )
    monkeypatch.setattr("nekro.sandbox.limits.enforcement.MAX_OPEN_FILES", 30100)
    async with lab(tmp_path, **SMALL) as box:
        result = await box.run(code)
    assert result.stop_type is StopType.ERROR
    assert result.limit in (Limit.DISK, Limit.GUARD), result


async def test_attack_L14_nested_sockets_in_transit_are_found(tmp_path: Path) -> None:
    """The files are in transit in a socket that is in transit in a socket that is in transit in a socket."""
    code = """
import os, socket, time
outer = socket.socketpair()
for _ in range(3):
    chain = [socket.socketpair() for _ in range(3)]
    for number in range(12):
        fd = os.open('shared/u', os.O_CREAT | os.O_WRONLY)
        os.write(fd, b'x' * (1 << 20))
        os.unlink('shared/u')
        socket.send_fds(chain[0][0], [b'x'], [fd])
        os.close(fd)
    for (ours, theirs), (above, _) in zip(chain, chain[1:]):
        socket.send_fds(above, [b'x'], [theirs.fileno()])
        ours.close(), theirs.close()
    socket.send_fds(outer[0], [b'x'], [chain[-1][1].fileno()])
    chain[-1][0].close(), chain[-1][1].close()
time.sleep(30)
"""
    async with lab(tmp_path, **SMALL) as box:
        result = await box.run(code)
    assert (result.stop_type, result.limit) == (StopType.ERROR, Limit.DISK), result


DIRECTORIES = """
import os, time
for number in range(100_000):
    os.mkdir(f'shared/{tag}{number}')
"""


@pytest.mark.extended
async def test_attack_L15_tens_of_thousands_of_directories_are_removed_after_each_run(tmp_path: Path) -> None:
    async with lab(tmp_path, shared_files=500) as box:
        (box.shared() / "old").mkdir()
        (box.shared() / "old" / "file").write_bytes(b"kept")
        for tag in ("first", "second"):
            result = await box.run(f"tag = '{tag}'\n" + DIRECTORIES.replace("{tag}", "{tag}"))
            assert (result.stop_type, result.limit) == (StopType.ERROR, Limit.DISK), result
            _, names = safe_files.measure(box.shared(), max_entries=1_000_000)
            assert names <= 500
        assert (box.shared() / "old" / "file").read_bytes() == b"kept"


TREES = {
    "deep": "'/'.join(['d'] * 31)",
    "longest names": "'n' * 255 + '/' + 'm' * 255",
    "no utf-8": "b'\\xff\\xfe\\n'.decode('utf-8', 'surrogateescape') * 20",
    "closed": "'closed'",
}


@pytest.mark.extended
@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
async def test_attack_L15_trees_of_any_shape_are_cut_back_below_the_quota(tmp_path: Path, tree: str) -> None:
    code = f"""
import os
for number in range(900):
    top = 'shared/' + os.urandom(8).hex()
    path = top + '/' + {tree}
    os.makedirs(path)
    os.chmod(path, 0o500)
    os.chmod(top, 0)
"""
    async with lab(tmp_path, shared_files=500) as box:
        for _ in range(2):
            result = await box.run(code)
            assert (result.stop_type, result.limit) == (StopType.ERROR, Limit.DISK), result
            _, names = safe_files.measure(box.shared(), max_entries=1_000_000)
            assert names <= 500
            assert not Quota.at_start(box.shared(), box.settings).exceeded()


@pytest.mark.extended
async def test_attack_L15_cutting_back_follows_no_link_and_removes_no_older_file(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_bytes(b"kept")
    code = """
import os
os.makedirs('shared/new')
os.symlink('/app/uploads', 'shared/new/link')
open('shared/old/added', 'w').close()
for number in range(2000):
    os.mkdir(f'shared/new/{number}')
"""
    async with lab(tmp_path / "areas", shared_files=500) as box:
        old = box.shared() / "old"
        old.mkdir()
        (old / "file").write_bytes(b"kept")
        if os.geteuid() == 0:
            os.chown(old, box.user(), box.user())
        (box.shared() / "link").symlink_to(outside)
        result = await box.run(code)
        assert (result.stop_type, result.limit) == (StopType.ERROR, Limit.DISK), result
        assert (old / "file").read_bytes() == b"kept"
        assert (outside / "file").read_bytes() == b"kept"


@pytest.mark.skipif(landlock_version() < LEAST_LANDLOCK, reason="this kernel's Landlock is too old")
async def test_attack_L13_a_process_with_an_unreadable_name_ends_with_its_run(passable_dir: Path) -> None:
    """Without a process namespace, the host finds the processes by ``/proc/PID/stat``."""
    code = """
import ctypes, os, time
if os.fork() == 0:
    ctypes.CDLL(None).prctl(15, b'\\xff) Z 0\\n', 0, 0, 0)
    os.setsid()
    if os.fork():
        os._exit(0)
    while True:
        open('shared/alive', 'a').write('x')
        time.sleep(0.001)
while not os.path.exists('shared/alive'):
    pass
"""
    async with lab(passable_dir, driver="landlock") as box:
        result = await box.run(code)
        assert result.stop_type is StopType.NORMAL, result
        alive = box.shared() / "alive"
        size = alive.stat().st_size
        await box.run("")
        assert alive.stat().st_size == size


async def test_attack_L13_output_that_is_not_text_does_not_stop_its_guard(box: Lab) -> None:
    code = "import os\nwhile True:\n    os.write(1, b'\\xff\\x85\\xe2\\x80\\xa8\\x1b[' * 8192)"
    result = await box.run(code)
    assert (result.stop_type, result.limit) == (StopType.ERROR, Limit.OUTPUT)


async def test_attack_L14_a_plugin_that_blocks_the_loop_does_not_unguard_a_run(tmp_path: Path) -> None:
    """Checks run while the loop is blocked, and the supervisor notices missing ones."""
    started = asyncio.Event()

    async def hold(call: StubCall) -> StubResult:
        started.set()
        # On the loop's own thread, until another one has ended the run.
        sandbox = next(iter(box.manager._running.values()))._sandbox
        while sandbox.alive:
            pass
        raise AssertionError("unreachable")

    async with lab(tmp_path, **SMALL) as box:
        code = "import os\nif os.fork():\n    hold()\nimport time\n" + BIG
        result = await box.run(code, dispatch=hold, methods=[method("hold")])
    assert (result.stop_type, result.limit) == (StopType.ERROR, Limit.DISK), result


def test_every_kind_of_entry_is_counted_and_removed_by_a_cut(tmp_path: Path) -> None:
    """Files, directories, links and sockets."""
    import socket

    quota = Quota(root=tmp_path, most_bytes=1 << 30, most_names=1)
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "f").touch()
    (tmp_path / "l").symlink_to("d")
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(tmp_path / "s"))
    assert stat.S_ISSOCK((tmp_path / "s").stat().st_mode)
    assert quota.exceeded()
    quota.cut_back(since=0)
    assert not quota.exceeded()
