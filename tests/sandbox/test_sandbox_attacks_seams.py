"""Attacks on the boundaries between guards, filter, sweeps and limits (K23, K24, L16, L17)."""

from __future__ import annotations

import asyncio
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from sandbox_attempts import Attempts, assert_refused
from sandbox_lab import EPILOGUE, PREAMBLE, Lab, answer, as_other_user, lab
from waiting import WAIT_SECONDS

from nekro.sandbox.leftovers import end_orphans, own_id, sweep_homes
from nekro.sandbox.models import Limit, StopType

SMALL = {"shared_bytes": 4 << 20, "max_file_bytes": 1 << 20, "shared_files": 500}


@pytest.fixture(scope="module", params=["own", "other"], ids=["own_user", "ordinary_user"])
def mode(request: pytest.FixtureRequest, found_by_driver: dict[str, object]) -> str:
    """As root with control groups where available; as an ordinary user by polling alone."""
    if request.param == "other":
        request.getfixturevalue("other_user")
    return str(request.param)


def carry_out(code: str, mode: str, **settings: Any) -> dict[str, Any]:
    request = {"code": code, "settings": settings}
    return asyncio.run(answer(request)) if mode == "own" else as_other_user(request)


def attempts(code: str, mode: str) -> Attempts:
    result = carry_out(PREAMBLE + code + EPILOGUE, mode)
    assert result["reports"], result
    found: Attempts = json.loads(result["reports"][0])
    return found


#: Readable but not writable socket options; 3 is the channel, whose other end the service holds.
SOCKET_QUESTIONS = """
sockets = {"channel": socket.fromfd(3, socket.AF_UNIX, socket.SOCK_STREAM), "own": socket.socketpair()[0]}
names = {31: "PEERSEC", 55: "MEMINFO", 56: "NAPI_ID", 57: "COOKIE", 59: "PEERGROUPS", 71: "NETNS_COOKIE",
         77: "PEERPIDFD"}
for where, asked in sockets.items():
    for number, name in names.items():
        attempt(f"{where} {name}", lambda: asked.getsockopt(socket.SOL_SOCKET, number, 64))
    attempt(f"{where} another level", lambda: asked.getsockopt(0, 1, 64))
"""


def test_attack_K23_no_handle_on_the_service_and_no_number_of_the_host_from_a_socket(mode: str) -> None:
    """``SO_PEERPIDFD`` of the channel had created a descriptor of the service's process inside."""
    assert_refused(attempts(SOCKET_QUESTIONS, mode), by={"ENOPROTOOPT"})


#: The filter reads the low word of a 64-bit argument; so does the kernel, for each of these.
HIGH_WORDS = """
HIGH, HERE = 1 << 32, -100
own, theirs = socket.socketpair()
open("/app/shared/mode", "w").close()
calls = {
    "clone with a user namespace": (56, HIGH | 0x10000011, 0, 0, 0, 0),
    "clone with a network namespace": (56, HIGH | 0x40000011, 0, 0, 0, 0),
    "ioctl TIOCSTI": (16, 0, HIGH | 0x5412, 0),
    "ioctl of a file system": (16, own.fileno(), HIGH | 0x80111500, 0),
    "fcntl F_NOTIFY": (72, 0, HIGH | 1026, 0),
    "fcntl F_SETLEASE": (72, 0, HIGH | 1024, 1),
    "fcntl F_OFD_SETLK": (72, 0, HIGH | 37, 0),
    "prctl SET_DUMPABLE": (157, HIGH | 4, 0),
    "prctl SET_SECCOMP": (157, HIGH | 22, 2, 0),
    "prctl SET_MM": (157, HIGH | 35, 1, 0),
    "arch_prctl": (158, HIGH | 0x5001, 0),
    "socket AF_INET": (41, HIGH | 2, 1, 0),
    "socket AF_NETLINK": (41, HIGH | 16, 3, 0),
    "socket AF_VSOCK": (41, HIGH | 40, 1, 0),
    "chmod with set-uid": (90, b"/app/shared/mode", HIGH | 0o4755),
    "open with set-uid": (2, b"/app/shared/other", HIGH | 0o101, HIGH | 0o4755),
    "openat of a nameless file with set-uid": (257, HERE, b"/app/shared", HIGH | 0o20200002, HIGH | 0o4755),
    "mmap of huge pages": (9, 0, 4096, 3, HIGH | 0x40022, -1, 0),
    "madvise HWPOISON": (28, 0, 4096, HIGH | 100),
    "futex with priority": (202, 0, HIGH | 6, 0),
    "memfd of huge pages": (319, b"x", HIGH | 4),
    "setsockopt of a filter": (54, own.fileno(), HIGH | 1, HIGH | 26, 0, 0),
    "getsockopt of a process": (55, 3, HIGH | 1, HIGH | 77, 0, 0),
    "preadv2 of the page cache": (327, 0, 0, 0, 0, 0, HIGH | 8),
    "sendto out of band": (44, own.fileno(), b"x", 1, HIGH | 1, 0, 0),
    "ptrace by a number of 64 bits": (HIGH | 101, 0, 0, 0, 0),
}
for label, arguments in calls.items():
    attempt(label, lambda: syscall(*arguments))
"""


@pytest.mark.usefixtures("x86_64")
def test_attack_K24_high_words_of_arguments_pass_no_filter(mode: str) -> None:
    """None of them reaches the kernel's implementation, which would return EFAULT or EBADF."""
    by = {"EPERM", "EINVAL", "ENOSYS", "ENOMEM", "ENOTTY", "EAFNOSUPPORT", "ENOPROTOOPT", "ENOTSUP"}
    assert_refused(attempts(HIGH_WORDS, mode), by=by)


FIRST_PROCESS = """
attempt("memory of the first process", lambda: os.open("/proc/1/mem", os.O_RDWR))
attempt("its priority for the killer", lambda: open("/proc/1/oom_score_adj", "w").write("-1000"))
attempt("its dump", lambda: open("/proc/1/coredump_filter", "w").write("7f"))
attempt("its descriptors", lambda: syscall(438, 1, 3, 0))
attempt("its trace", lambda: syscall(101, 16, 1, 0, 0))
attempt("its memory by another call", lambda: syscall(311, 1, 0, 0, 0, 0, 0))
"""


@pytest.mark.usefixtures("x86_64")
def test_attack_K24_code_does_not_reach_into_the_first_process(mode: str) -> None:
    """The kernel's clean-up, and the service's descriptor of the sandbox, depend on that process."""
    assert_refused(attempts(FIRST_PROCESS, mode))


REMOVED_DIRECTORIES = """
import os, time
held = []
for _ in range(50):
    os.mkdir('shared/d')
    names = ['shared/d/%03d' % number + 'n' * 240 for number in range(400)]
    for name in names:
        os.symlink('x', name)
    HOLD
    for name in names:
        os.unlink(name)
    os.rmdir('shared/d')
time.sleep(30)
"""
HOLD_OPEN = "held.append(os.open('shared/d', os.O_PATH))"
#: Each in its own child, which works in the directory without a descriptor of it.
HOLD_AS_CWD = """works, begins = os.pipe()
    if not os.fork():
        os.chdir('shared/d')
        os.write(begins, b'x')
        os.closerange(3, 256)
        time.sleep(600)
        os._exit(0)
    os.read(works, 1)
    os.close(works)
    os.close(begins)"""
#: A program that copies itself to new memory, continues there and unmaps its text. With nothing
#: mapped and nothing open, the process alone keeps the file, 1 MiB each.
UNMAPPED_PROGRAMS = """
import os, struct, time
back = bytes.fromhex("48c7c00b000000" "48c7c700004000" "48c7c600100000" "0f05" "48c7c022000000" "0f05" "ebf5")
begin = bytes.fromhex("48c7c009000000" "48c7c700007000" "48c7c600100000" "48c7c207000000" "49c7c232000000"
                      "49c7c0ffffffff" "4d31c9" "0f05")
jump = bytes.fromhex("48c7c700007000" "48c7c1") + struct.pack("<i", len(back))
jump += bytes.fromhex("f3a4" "48c7c000007000" "ffe0")
code = begin + b"\\x48\\x8d\\x35" + struct.pack("<i", len(jump)) + jump + back
base, size = 0x400000, 120 + len(code)
image = b"\\x7fELF\\2\\1\\1" + bytes(9)
image += struct.pack("<HHIQQQIHHHHHH", 2, 62, 1, base + 120, 64, 0, 0, 64, 56, 1, 0, 0, 0)
image += struct.pack("<IIQQQQQQ", 1, 5, 0, base, base, size, size, 0x1000) + code
for _ in range(20):
    with open('shared/program', 'wb') as file:
        file.write(image.ljust((1 << 20) - 4096, b'x'))
    os.chmod('shared/program', 0o755)
    child = os.fork()
    if not child:
        os.closerange(3, 256)
        os.execv('/app/shared/program', ['p'])
    maps = 'program'
    while 'program' in maps or '700000' not in maps:
        maps = open(f'/proc/{child}/maps').read()
    os.unlink('shared/program')
time.sleep(30)
"""


@pytest.mark.extended
@pytest.mark.parametrize(
    "code",
    [
        REMOVED_DIRECTORIES.replace("HOLD", HOLD_OPEN),
        REMOVED_DIRECTORIES.replace("HOLD", HOLD_AS_CWD),
        UNMAPPED_PROGRAMS,
    ],
    ids=["open directories", "directories that children work in", "programs that have unmapped themselves"],
)
@pytest.mark.usefixtures("x86_64")
async def test_attack_L16_deleted_files_that_stay_on_disk_count(tmp_path: Path, code: str) -> None:
    async with lab(tmp_path, **SMALL) as box:
        result = await box.run(code)
    assert (result.stop_type, result.limit) == (StopType.ERROR, Limit.DISK), result


#: The process's first thread ends; sockets of its other threads in the network namespace must be found.
NESTED_SOCKETS_OF_A_THREAD = """
import ctypes, os, socket, threading, time
def work():
    kept = socket.socketpair()
    for _ in range(4):
        ours, theirs = socket.socketpair()
        for number in range(2):
            fd = os.open('/app/shared/u', os.O_CREAT | os.O_WRONLY)
            os.write(fd, b'x' * (1 << 20))
            os.unlink('/app/shared/u')
            socket.send_fds(ours, [b'x'], [fd])
            os.close(fd)
        socket.send_fds(kept[0], [b'x'], [theirs.fileno()])
        ours.close()
        theirs.close()
    time.sleep(30)
threading.Thread(target=work).start()
ctypes.CDLL(None).syscall(60, 0)
"""


@pytest.mark.usefixtures("x86_64")
def test_attack_L16_process_without_its_first_thread_hides_no_sockets(mode: str) -> None:
    result = carry_out(NESTED_SOCKETS_OF_A_THREAD, mode, **{**SMALL, "shared_bytes": 16 << 20})
    assert (result["stop"], result["limit"]) == ("ERROR", "disk"), result


FORGED_MARK = """
import subprocess, time
subprocess.Popen(['/bin/sleep', '30'], env={{'NEKRO_SANDBOX_LAUNCH': {mark!r}}})
marked()
time.sleep(30)
"""


def forged_marks() -> dict[str, str]:
    own = own_id()
    here = f"{own.host}/{own.boot}/{own.namespace}"
    return {
        "a number of 5000 digits": f"{here}/{'9' * 5000}/1",
        "a start of 5000 digits": f"{here}/1/{'9' * 5000}",
        "digits of another script": f"{here}/²/1",
        "a service that lives": f"{own} 0",
        "words": "a b c",
    }


@pytest.mark.parametrize("kind", forged_marks())
async def test_attack_L17_forged_launch_mark_neither_stops_a_start_nor_a_run(box: Lab, kind: str) -> None:
    """Code gives its own process the mark by which the next service on the host finds orphans."""
    marked = asyncio.Event()
    box.handlers["marked"] = marked.set
    run = asyncio.create_task(box.run(FORGED_MARK.format(mark=forged_marks()[kind])))
    try:
        await asyncio.wait_for(marked.wait(), WAIT_SECONDS)
        # It may find real orphans: other tests kill services on this host.
        await asyncio.to_thread(end_orphans)
        assert not run.done()
    finally:
        run.cancel()
        await asyncio.gather(run, return_exceptions=True)


@pytest.mark.parametrize(
    "name", ["²-1-ns1-x", f"1-{'9' * 200}-ns1-x", "1-1-ns1", "-1-1-ns1-x", "1_0-1-ns1-x"]
)
def test_attack_L17_planted_names_in_the_temporary_directory_do_not_prevent_a_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Every user of the host can create such a name in ``/tmp``."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    planted = tmp_path / f"nekro-box-{name}"
    planted.mkdir()
    sweep_homes()
    assert planted.exists()
