"""Fuzz the reader of ``/proc``: ``python tests/sandbox/fuzz_proc.py [--inputs N] [--seed N]``.

Each input is a generated or changed kernel file with names that attackers chose. A parser may return or
raise ``FormatError``; any other result, and an input over its budget of processor time, is printed and
exits with 1. Names must not affect other lines: a well-formed line is found whatever else the file has.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from typing import Final

import fuzz_loop

from nekro.sandbox.limits import proc_files

SEPARATORS: Final = [b"\n", b"\r", b"\x0b", b"\x0c", b"\x1c", b"\x85", b"\xe2\x80\xa8", b" ", b"\t", b"\0"]
PIECES: Final = [
    *SEPARATORS, b" (deleted)", b"\xff", b":", b"-", b"0", b"9" * 30, b"scm_fds:\t3\n", b"Pss:  1 kB\n",
    b"Uid:", b") Z 1", b"\\012", b" - ", b"cgroup2", b"kB", b"00:00", b"\n0: 0 0 0 0 0 1 x", b"memory,", b"a",
    b"\\777",
]  # fmt: skip
MAPPING: Final = b"7f0000000000-7f0000001000 rw-s 00000000 08:01 %d                 /app/shared/%s"
SOCKET: Final = b"0000000000000000: 00000002 00000000 00010000 0001 01 %5d @%s\n"
HEADER: Final = b"Num       RefCount Protocol Flags    Type St Inode Path\n"
STAT: Final = b"7 (%s) S 1 7 7 0 -1 4194304 1 2 3 4 5 6 7 8 20 0 1 0 99 1000 10 184 1 1 1 0 0 0 0"
MOUNT: Final = b"36 35 98:0 / %s rw,noatime shared:1 - cgroup cgroup rw,memory\n"


def junk(chance: random.Random) -> bytes:
    """Return bytes of a few pieces."""
    return b"".join(chance.choices(PIECES, k=chance.randrange(8)))


def spoil(data: bytes, chance: random.Random) -> bytes:
    """Change a file at one position, or return it unchanged."""
    at = chance.randrange(len(data) + 1)
    kind = chance.randrange(4)
    if kind == 0:
        return data[:at] + junk(chance) + data[at:]
    if kind == 1:
        return data[:at] + data[at + chance.randrange(1, 9) :]
    return data[:at] if kind == 2 else data


def fuzz_maps(chance: random.Random) -> None:
    name = junk(chance).replace(b"\n", b"\\012")  # as the kernel does
    found = proc_files.deleted_mappings([MAPPING % (7, name + b" (deleted)")], {"08:01"})
    assert found == {7}, name
    spoiled = spoil(MAPPING % (8, name), chance)
    tolerant(lambda data: proc_files.deleted_mappings(data.split(b"\n"), {"08:01"}), spoiled)


def fuzz_unix(chance: random.Random) -> None:
    data = HEADER + b"".join(SOCKET % (number, junk(chance)) for number in (11, 22, 33))
    assert {11, 22, 33} <= proc_files.unix_sockets(data.split(b"\n")), data
    tolerant(lambda data: proc_files.unix_sockets(data.split(b"\n")), spoil(data, chance))


def fuzz_stat(chance: random.Random) -> None:
    name = junk(chance)
    found = proc_files.process_stat(STAT % name)
    assert (found.parent, found.started) == (1, 99), name
    tolerant(proc_files.process_stat, spoil(STAT % name, chance))


def fuzz_fields(chance: random.Random) -> None:
    data = spoil(b"Rss:  9 kB\nPss:  5 kB\nUid:\t1\t1\nscm_fds: 4\nmnt_id:\t3\n", chance)
    for parse in (proc_files.descriptors_in_flight, proc_files.mount_id):
        tolerant(parse, data)
    tolerant(lambda data: proc_files.kibibytes(data, b"Pss"), data)
    tolerant(lambda data: proc_files.field_of(data, b"Uid"), data)


def fuzz_mounts(chance: random.Random) -> None:
    escaped = b"".join(b"\\%03o" % byte if byte in b" \t\n\\" else bytes([byte]) for byte in junk(chance))
    mounts = list(proc_files.mounts(MOUNT % (b"/" + escaped)))
    assert [mount.device for mount in mounts] == ["98:0"], escaped
    tolerant(lambda data: list(proc_files.mounts(data)), spoil(MOUNT % escaped, chance))


def fuzz_groups(chance: random.Random) -> None:
    tolerant(proc_files.memberships, spoil(b"4:memory,cpu:/a\n0::/b\n", chance))
    tolerant(proc_files.number, spoil(b"123\n", chance))
    tolerant(proc_files.resident_pages, spoil(b"10 5 3 1 0 4 0\n", chance))
    tolerant(lambda data: proc_files.counter(data, b"oom_kill"), spoil(b"low 0\noom_kill 2\n", chance))


def tolerant(parse: Callable[[bytes], object], data: bytes) -> None:
    """Parse; the documented error is not a failure."""
    try:
        parse(data)
    except proc_files.FormatError:
        return


CHECKS: Final = (fuzz_maps, fuzz_unix, fuzz_stat, fuzz_fields, fuzz_mounts, fuzz_groups)


if __name__ == "__main__":
    sys.exit(fuzz_loop.main("proc", CHECKS, description="Fuzz the reader of /proc."))
