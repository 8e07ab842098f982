"""Attacks on the seams between guards, filter, sweeps and limits (L16)."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from sandbox_lab import answer, as_other_user, lab

from sandbox import Limit, StopType
from sandbox.drivers.bwrap import BwrapDriver

SMALL = {"shared_bytes": 4 << 20, "max_file_bytes": 1 << 20, "shared_files": 500}


@pytest.fixture(scope="module", params=["own", "other"], ids=["own_user", "ordinary_user"])
def mode(request: pytest.FixtureRequest, bwrap_driver: BwrapDriver) -> str:
    """As root with control groups where there are any; as an ordinary user by looks alone."""
    if request.param == "other":
        request.getfixturevalue("other_user")
    return str(request.param)


def carry_out(code: str, mode: str, **settings: Any) -> dict[str, Any]:
    request = {"code": code, "settings": settings}
    return asyncio.run(answer(request)) if mode == "own" else as_other_user(request)


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
#: Each in a child of its own, which works in the directory and has no descriptor of it.
HOLD_AS_CWD = """if not os.fork():
        os.chdir('shared/d')
        time.sleep(30)
        os._exit(0)
    while not any(os.readlink(f'/proc/{pid}/cwd').endswith('/d') for pid in os.listdir('/proc')
                  if pid.isdigit() and int(pid) > 2):
        time.sleep(0.001)"""
#: A program that copies itself to new memory, goes on there and unmaps its text. Where there is nothing
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
    while 'program' in open(f'/proc/{child}/maps').read() or '700000' not in open(f'/proc/{child}/maps').read():
        time.sleep(0.001)
    os.unlink('shared/program')
time.sleep(30)
"""


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
async def test_attack_L16_whatever_keeps_a_removed_name_on_disk_counts(tmp_path: Path, code: str) -> None:
    async with lab(tmp_path, **SMALL) as box:
        result = await box.run(code)
    assert (result.stop_type, result.limit) == (StopType.ERROR, Limit.DISK), result


#: The process's first thread ends; what its other threads do in the network namespace must still be found.
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
