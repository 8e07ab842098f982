"""Read and parse ``/proc`` and control group files; all parsers of these files are here.

Sandboxed code chooses names that the kernel prints there: of files, sockets and threads. So every
file is read as bytes and split at ``b"\\n"`` only, and a field is found by its position counted
from the side that the kernel writes. A line without the documented form raises ``FormatError``;
the only exception is ``net/unix``, where a name may contain a newline (see ``unix_sockets``).

Source: proc(5), unix(7), cgroups(7), ``fs/proc`` and ``net/unix/af_unix.c`` of Linux.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

__all__ = [
    "FormatError",
    "Mount",
    "ProcessStat",
    "counter",
    "deleted_mappings",
    "descriptors_in_flight",
    "field_of",
    "kibibytes",
    "lines_of",
    "memberships",
    "mount_id",
    "mounts",
    "number",
    "process_stat",
    "read",
    "resident_pages",
    "unix_sockets",
    "words",
]

#: More than a path of 4096 bytes needs with each byte escaped as four.
LONGEST_LINE_BYTES: Final = 64 << 10
_MOST_BYTES: Final = 16 << 20
_CHUNK_BYTES: Final = 64 << 10
_DELETED: Final = b" (deleted)"
_UNIX_HEADER: Final = b"Num       RefCount Protocol Flags    Type St Inode Path"
#: Address, reference count, protocol, flags, type, state, inode number; then a name, if any, after a space.
_UNIX_LINE: Final = re.compile(
    rb"[0-9A-Fa-f]{8,16}: [0-9A-F]{8} [0-9A-F]{8} [0-9A-F]{8} [0-9A-F]{4} [0-9A-F]{2} +([0-9]{1,20})(?: |\Z)"
)
_MAPPING: Final = re.compile(
    rb"[0-9a-f]+-[0-9a-f]+ [-r][-w][-x][-ps] [0-9a-f]+ ([0-9a-f]+:[0-9a-f]+) ([0-9]{1,20})(?: |\Z)"
)
_ESCAPE: Final = re.compile(rb"\\([0-7]{3})")
#: Indexes after the name in ``stat``: the state is the third field, the start time the 22nd.
_STATE, _PARENT, _STARTED, _STAT_WORDS = 0, 1, 19, 22


class FormatError(ValueError):
    """A kernel file does not have the form that its manual page describes."""


@dataclass(frozen=True, kw_only=True)
class ProcessStat:
    """Fields of ``/proc/PID/stat``."""

    #: One letter; ``Z`` is a zombie, which may still have threads that run.
    state: str
    parent: int
    #: Clock ticks since boot.
    started: int


@dataclass(frozen=True, kw_only=True)
class Mount:
    """One line of ``mountinfo``; paths may contain any byte except NUL."""

    id: int
    #: ``major:minor`` in decimal, of the file system and not of a subvolume.
    device: str
    root: bytes
    point: bytes
    kind: str
    options: tuple[str, ...]


def read(path: str | Path) -> bytes:
    """Return the content of one file.

    Raises:
        OSError: it cannot be read; ``ESRCH`` and ``ENOENT`` mean that its process has ended.
        FormatError: it has more than 16 MiB, more than any file that is read with this.
    """
    return b"".join(_chunks(path, _MOST_BYTES))


def lines_of(path: str | Path) -> Iterator[bytes]:
    """Yield the lines of a file of any size, with a bounded amount of memory.

    Raises:
        OSError: as ``read``.
        FormatError: a line has more than 64 KiB.
    """
    rest = b""
    for chunk in _chunks(path, None):
        *complete, rest = (rest + chunk).split(b"\n")
        yield from complete
        if len(rest) > LONGEST_LINE_BYTES:
            raise FormatError(f"a line has more than {LONGEST_LINE_BYTES} bytes")
    if rest:
        yield rest


def process_stat(data: bytes) -> ProcessStat:
    """Parse ``/proc/PID/stat``; the process's name in parentheses may contain any byte."""
    fields = data.rpartition(b") ")[2].split()
    if len(fields) < _STAT_WORDS or not re.fullmatch(rb"[A-Za-z]", fields[_STATE]):
        raise FormatError("stat does not end in the fields of a process")
    return ProcessStat(
        state=fields[_STATE].decode(), parent=_decimal(fields[_PARENT]), started=_decimal(fields[_STARTED])
    )


def resident_pages(data: bytes) -> int:
    """Return the resident pages of ``statm``; 0 when the process has released its memory."""
    fields = data.split()
    if len(fields) < 2:
        raise FormatError("statm has fewer than two numbers")
    return _decimal(fields[1])


def field_of(data: bytes, name: bytes) -> bytes:
    """Return the value of the one line ``name:`` of ``status``, ``smaps_rollup`` or ``fdinfo``.

    Raises:
        FormatError: there is none, or more than one.
    """
    begin = b"\n" + name + b":"
    text = b"\n" + data
    count = text.count(begin)
    if count != 1:
        raise FormatError(f"{count} lines are named {name.decode('ascii')}, not one")
    return text.partition(begin)[2].partition(b"\n")[0].strip()


def kibibytes(data: bytes, name: bytes) -> int:
    """Return a size of ``status`` or ``smaps_rollup`` in bytes."""
    value, separator, unit = field_of(data, name).partition(b" ")
    if not separator or unit != b"kB":
        raise FormatError(f"{name.decode('ascii')} is not a number of kB")
    return _decimal(value) << 10


def descriptors_in_flight(data: bytes) -> int:
    """Return the number of descriptors in flight in a socket, from its ``fdinfo``; 0 for other kinds."""
    return 0 if b"\nscm_fds:" not in data else _decimal(field_of(data, b"scm_fds"))


def mount_id(data: bytes) -> int:
    """Return the mount of an open file, from its ``fdinfo``."""
    return _decimal(field_of(data, b"mnt_id"))


def deleted_mappings(lines: Iterable[bytes], devices: Collection[str]) -> set[int]:
    """Return the inode numbers of unlinked files on ``devices`` that are mapped, from ``maps``.

    The kernel escapes newlines in names. A file whose name ends in `` (deleted)`` counts too, which
    affects only the code that created it.

    Args:
        devices: as ``maps`` writes them: ``major:minor`` in hexadecimal, two digits at least.
    """
    found = set()
    for line in lines:
        match = _MAPPING.match(line)
        if match is None:
            raise FormatError("a line of maps does not begin with a mapping")
        if line.endswith(_DELETED) and match[1].decode() in devices:
            found.add(int(match[2]))
    return found


def unix_sockets(lines: Iterable[bytes]) -> set[int]:
    """Return the inode numbers of Unix sockets, from ``net/unix``; 0 is a connection not yet accepted.

    A name is printed unescaped, newlines included, so a name can forge whole lines. It cannot hide
    one: the kernel ends each line with a newline. So every socket is found, forged numbers may be
    found too, and a line that is not a socket is a part of a name.

    Raises:
        FormatError: the header, or the first line after it, does not have the known form: then this
            is another format, and no line of it can be trusted.
    """
    remaining = iter(lines)
    if next(remaining, b"").rstrip() != _UNIX_HEADER:
        raise FormatError("net/unix has an unknown header")
    found = set()
    for number_of_line, line in enumerate(remaining):
        match = _UNIX_LINE.match(line)
        if match is not None:
            found.add(int(match[1]))
        elif number_of_line == 0:
            raise FormatError("the first line of net/unix is not a socket")
    return found


def memberships(data: bytes) -> dict[str, str]:
    """Map controller (``""`` for version 2) to the group's path, from ``/proc/PID/cgroup``."""
    paths: dict[str, str] = {}
    for line in _lines(data):
        fields = line.split(b":", 2)
        if len(fields) != 3:
            raise FormatError("a line of cgroup has fewer than three fields")
        paths.update(dict.fromkeys(_text(fields[1]).split(","), _text(fields[2])))
    return paths


def mounts(data: bytes) -> Iterator[Mount]:
    """Yield the mounts of ``mountinfo``; the kernel escapes separators of fields and lines."""
    for line in _lines(data):
        before, separator, after = line.partition(b" - ")
        fields, rest = before.split(b" "), after.split(b" ", 2)
        if not separator or len(fields) < 6 or len(rest) != 3:
            raise FormatError("a line of mountinfo has too few fields")
        yield Mount(
            id=_decimal(fields[0]),
            device=_text(fields[2]),
            root=_unescaped(fields[3]),
            point=_unescaped(fields[4]),
            kind=_text(rest[0]),
            options=tuple(_text(rest[2]).split(",")),
        )


def number(data: bytes) -> int:
    """Return the one number of a control group's file."""
    return _decimal(data.strip())


def words(data: bytes) -> list[bytes]:
    """Return the words of a control group's list, such as controllers or process ids."""
    return data.split()


def counter(data: bytes, name: bytes) -> int:
    """Return one counter of a control group's file of ``name value`` lines; 0 when it is missing."""
    for line in _lines(data):
        key, _, value = line.partition(b" ")
        if key == name:
            return _decimal(value)
    return 0


def _chunks(path: str | Path, most_bytes: int | None) -> Iterator[bytes]:
    total = 0
    # By descriptor: a file object takes longer to make than these files take to read.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        while chunk := os.read(descriptor, _CHUNK_BYTES):
            total += len(chunk)
            if most_bytes is not None and total > most_bytes:
                raise FormatError(f"a file of the kernel has more than {most_bytes} bytes")
            yield chunk
    finally:
        os.close(descriptor)


def _lines(data: bytes) -> list[bytes]:
    return [line for line in data.split(b"\n") if line]


def _decimal(word: bytes) -> int:
    # int() alone accepts signs, spaces and underscores.
    if not word.isdigit() or len(word) > 20:
        raise FormatError(f"{word[:40]!r} is not a number")
    return int(word)


def _text(word: bytes) -> str:
    return word.decode("utf-8", "surrogateescape")


def _unescaped(path: bytes) -> bytes:
    return _ESCAPE.sub(lambda match: bytes([int(match[1], 8) & 0xFF]), path)
