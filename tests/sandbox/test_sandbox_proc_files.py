"""The reader of ``/proc`` on files whose names attackers chose."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path

import pytest

from nekro.sandbox.guest.confine import children_of
from nekro.sandbox.limits import proc_files
from nekro.sandbox.limits.cgroups import find_cgroups
from nekro.sandbox.limits.proc_files import FormatError

SEPARATORS = ["\n", "\r", "\x0b", "\x0c", "\x1c", "\x1d", "\x1e", "\x85", "\u2028", "\u2029", "\udcff"]
MAPPING = b"7f0000000000-7f0000001000 rw-s 00000000 08:01 %d                 /app/shared/%s"


@pytest.mark.parametrize("separator", SEPARATORS, ids=ascii)
def test_sockets_are_found_whatever_their_names_contain(separator: str) -> None:
    """A name may forge lines, but can hide none."""
    forged = "0000000000000000: 00000002 00000000 00010000 0001 01 77777 x"
    name = b"\0" + os.fsencode(f"{os.getpid()}{separator}{forged}{separator}")[:100]
    with socket.socket(socket.AF_UNIX) as first, socket.socket(socket.AF_UNIX) as second:
        first.bind(name)
        second.bind(b"\0plain-%d" % os.getpid())
        found = proc_files.unix_sockets(proc_files.lines_of("/proc/self/net/unix"))
        assert {os.fstat(end.fileno()).st_ino for end in (first, second)} <= found


def test_an_unknown_format_of_sockets_is_refused() -> None:
    header = b"Num       RefCount Protocol Flags    Type St Inode Path"
    for lines in ([], [b""], [b"Num RefCount"], [header, b"0: 1"], [header, b""]):
        with pytest.raises(FormatError):
            proc_files.unix_sockets(lines)
    assert proc_files.unix_sockets([header]) == set()


@pytest.mark.parametrize(
    "separator", [s.encode("utf-8", "surrogateescape") for s in SEPARATORS[1:]], ids=repr
)
def test_deleted_mappings_are_found_whatever_their_names_were(separator: bytes) -> None:
    lines = [MAPPING % (7, b"a" + separator + b"b (deleted)"), MAPPING % (8, b"a" + separator + b"b")]
    assert proc_files.deleted_mappings(lines, {"08:01"}) == {7}
    assert proc_files.deleted_mappings(lines, {"08:02"}) == set()


def test_a_broken_mapping_is_refused() -> None:
    for line in (b"", b"b (deleted)", b"7f-7f rw-s 0 08:01", b"7f-80 rwxs 0 08:01 -7 x"):
        with pytest.raises(FormatError):
            proc_files.deleted_mappings([line], {"08:01"})


def test_a_thread_name_of_any_bytes_does_not_hide_its_process() -> None:
    data = proc_files.read(f"/proc/{os.getpid()}/stat")
    expected = proc_files.process_stat(data)
    begin, end = data.index(b"("), data.rindex(b")")
    for name in (b") Z 1 1\n", b"\xff\x85", b"a) b) ", b"\n\n"):
        assert proc_files.process_stat(data[: begin + 1] + name + data[end:]) == expected


def test_children_of_a_process_are_found_whatever_their_names_are() -> None:
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(theirs)
        Path("/proc/self/comm").write_bytes(b"\xff) Z 1")
        os.read(ours, 1)
        os._exit(0)
    os.close(ours)
    try:
        while not proc_files.read(f"/proc/{child}/comm").startswith(b"\xff"):
            threading.Event().wait(0.01)
        assert child in children_of(os.getpid())
    finally:
        os.close(theirs)
        os.waitpid(child, 0)


def test_a_duplicate_or_missing_field_is_refused() -> None:
    for data in (b"", b"Uid:\t0\nUid:\t1\n", b"\tUid:\t0\n"):
        with pytest.raises(FormatError):
            proc_files.field_of(data, b"Uid")
    assert proc_files.field_of(b"Name:\ta\\nUid: 7\nUid:\t0\t0\n", b"Uid") == b"0\t0"


@pytest.mark.parametrize("word", [b"", b"-1", b"+1", b" 1", b"1_0", b"0x1", b"1" * 21, "\u0661".encode()])
def test_only_decimal_digits_are_a_number(word: bytes) -> None:
    with pytest.raises(FormatError):
        proc_files.counter(b"oom_kill " + word, b"oom_kill")


def test_mounts_with_escaped_names_are_read(tmp_path: Path) -> None:
    line = rb"36 35 98:0 / /mnt\012two\040words rw shared:1 - cgroup cgroup rw,memory" + b"\n"
    (mount,) = proc_files.mounts(line)
    assert (mount.point, mount.device, mount.options) == (b"/mnt\ntwo words", "98:0", ("rw", "memory"))


def test_a_long_line_is_refused_before_it_is_buffered(tmp_path: Path) -> None:
    path = tmp_path / "maps"
    path.write_bytes(b"x" * (1 << 20))
    with pytest.raises(FormatError):
        list(proc_files.lines_of(path))


def test_cgroup_files_in_another_form_are_refused(tmp_path: Path) -> None:
    from broker_config.settings import SandboxSettings

    (tmp_path / "mountinfo").write_bytes(b"nonsense\xff\n")
    (tmp_path / "cgroup").write_bytes(b"0::/\n")
    with pytest.raises(FormatError):
        find_cgroups(SandboxSettings(), proc=tmp_path)
