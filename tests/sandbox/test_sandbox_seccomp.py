"""The seccomp filter as a program: simulated call by call, on both architectures, and its exact bytes."""

from __future__ import annotations

import errno
import hashlib
import platform
import re
import socket
import struct
from pathlib import Path

import pytest

from nekro.sandbox.filter.calls import ALLOWED, FORK_SERVER, NUMBERS, PROGRAMS, REFUSED, UNSUPPORTED
from nekro.sandbox.filter.seccomp import (
    AUDIT_ARCH,
    RET_ALLOW,
    RET_ERRNO,
    RET_KILL_PROCESS,
    build_filter,
    waiting_filter,
)

ARCHITECTURES = sorted(AUDIT_ARCH)
#: SHA-256 of the programs: a change here changes the isolation, and must be intended.
GOLDEN = {
    ("aarch64", False): "3337a7be3b819ce28966abe63086c6a91dedca5e79791339a10316f25b1b8eff",
    ("aarch64", True): "ce257f02ad5cdd5eac34b18fb93caecd2a731259100981b0beb61ce809583ac1",
    ("x86_64", False): "0d3e3c286d7c4cbb0ba491cae6bf26e1b343db2cee77f8d0ac5e1cbdfb7033b3",
    ("x86_64", True): "09eec99ae166210197ac2016571fe615a42b660ac3221a9f49c16c8fd21942ef",
}


def simulate(
    program: bytes,
    *,
    machine: str,
    number: int,
    arguments: tuple[int, ...] = (),
    trace: list[int] | None = None,
) -> int:
    """Run a classic BPF program on one ``struct seccomp_data`` and return its verdict.

    Args:
        trace: receives the position of each executed instruction; None records nothing.
    """
    words = (*arguments, *(0,) * (6 - len(arguments)))
    data = struct.pack("<IIQ6Q", number, AUDIT_ARCH[machine], 0, *words)
    instructions = list(struct.iter_unpack("<HBBI", program))
    accumulator = position = 0
    while True:
        code, if_true, if_false, operand = instructions[position]
        if trace is not None:
            trace.append(position)
        position += 1
        if code == 0x20:
            (accumulator,) = struct.unpack_from("<I", data, operand)
        elif code == 0x54:
            accumulator &= operand
        elif code == 0x05:
            position += operand
        elif code == 0x06:
            return int(operand)
        elif code in (0x15, 0x35, 0x45):
            taken = {
                0x15: accumulator == operand,
                0x35: accumulator >= operand,
                0x45: bool(accumulator & operand),
            }
            position += if_true if taken[code] else if_false
        else:
            pytest.fail(f"instruction {code:#x} is not of this filter")


def verdict(machine: str, name: str, *arguments: int, strict_memory: bool = False) -> int:
    program = build_filter(machine, strict_memory=strict_memory)
    return simulate(program, machine=machine, number=NUMBERS[machine][name], arguments=arguments)


def denied(number: int) -> int:
    return RET_ERRNO | number


@pytest.mark.parametrize(("machine", "strict"), sorted(GOLDEN))
def test_filter_equals_the_reviewed_bytes(machine: str, strict: bool) -> None:
    program = build_filter(machine, strict_memory=strict)
    assert len(program) // 8 < 4096  # the kernel's maximum
    assert hashlib.sha256(program).hexdigest() == GOLDEN[machine, strict]


@pytest.mark.parametrize("machine", ARCHITECTURES)
@pytest.mark.parametrize("strict", [False, True])
def test_unlisted_number_returns_enosys(machine: str, strict: bool) -> None:
    """Including calls of later kernels: the highest number today is 469."""
    program = build_filter(machine, strict_memory=strict, strict_processes=strict)
    named = set(NUMBERS[machine].values())
    others = [number for number in (*range(2048), 0x3FFFFFFF) if number not in named]
    answers = {simulate(program, machine=machine, number=number) for number in others}
    assert answers == {denied(errno.ENOSYS)}


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_old_privileged_calls_return_eperm_and_extended_attributes_enotsup(machine: str) -> None:
    for names, number in ((REFUSED, errno.EPERM), (UNSUPPORTED, errno.EOPNOTSUPP)):
        for name in names & NUMBERS[machine].keys():
            assert verdict(machine, name) == denied(number), name


#: Arguments with which an argument-filtered call is permitted; all other calls need none.
GOOD_ARGUMENTS = {
    "socket": (socket.AF_UNIX,),
    "socketpair": (socket.AF_UNIX,),
    "setsockopt": (3, socket.SOL_SOCKET, socket.SO_REUSEADDR),
    "getsockopt": (3, socket.SOL_SOCKET, socket.SO_ERROR),
    "ioctl": (1, 0x5401),
    "prctl": (15,),
    "arch_prctl": (0x1002,),
    "fadvise64": (3, 0, 0, 2),
}


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_every_listed_call_is_permitted_with_ordinary_arguments(machine: str) -> None:
    for name in ALLOWED & NUMBERS[machine].keys():
        assert verdict(machine, name, *GOOD_ARGUMENTS.get(name, ())) == RET_ALLOW, name


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_every_name_has_a_number_where_the_architecture_has_the_call(machine: str) -> None:
    names = ALLOWED | REFUSED | UNSUPPORTED | set(PROGRAMS) | set(FORK_SERVER)
    absent = names - NUMBERS[machine].keys()
    assert NUMBERS[machine].keys() <= names
    # The generic table lacks calls that were replaced by forms with a directory or flags.
    assert absent == (set() if machine == "x86_64" else OLD_FORMS)


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_fork_server_may_make_sandboxes_and_nothing_else_besides(machine: str) -> None:
    program = build_filter(machine, strict_memory=False, also=FORK_SERVER)
    numbers = NUMBERS[machine]

    def of(name: str) -> int:
        return simulate(program, machine=machine, number=numbers[name])

    assert {of(name) for name in FORK_SERVER} == {RET_ALLOW}
    assert {of(name) for name in (REFUSED & numbers.keys()) - set(FORK_SERVER)} == {denied(errno.EPERM)}
    for unlisted in (250, 280, 321, 425, 438, 440):  # keys, BPF, io_uring, memory and descriptors of others
        if unlisted not in numbers.values():
            assert simulate(program, machine=machine, number=unlisted) == denied(errno.ENOSYS)


def test_process_that_waits_may_do_nothing_else() -> None:
    machine = platform.machine()
    allowed = {
        name
        for name, number in NUMBERS[machine].items()
        if simulate(waiting_filter(), machine=machine, number=number) == RET_ALLOW
    }
    assert allowed <= {
        "pause", "ppoll", "rt_sigreturn", "restart_syscall", "futex", "write", "exit_group",
    }  # fmt: skip


OLD_FORMS = {
    "inotify_init",
    "access", "alarm", "arch_prctl", "chmod", "chown", "creat", "dup2", "epoll_create", "epoll_wait",
    "eventfd", "fork", "futimesat", "getdents", "getpgrp", "lchown", "link", "lstat", "mkdir", "mknod",
    "open", "pause", "pipe", "poll", "readlink", "rename", "rmdir", "select", "signalfd", "stat",
    "symlink", "time", "unlink", "utime", "utimes", "vfork",
}  # fmt: skip


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_no_call_takes_more_than_a_few_instructions(machine: str) -> None:
    """The filter is a search tree: the path to any verdict is short, whatever the number."""
    program = build_filter(machine, strict_memory=True)
    longest = max(
        steps_of(program, machine=machine, number=number) for number in {*NUMBERS[machine].values(), 4095}
    )
    assert longest < 50


def steps_of(program: bytes, *, machine: str, number: int) -> int:
    """Count the instructions up to the verdict, with arguments that no list contains."""
    steps: list[int] = []
    simulate(program, machine=machine, number=number, arguments=(0x7FFFFFF,) * 6, trace=steps)
    return len(steps)


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_another_architecture_kills(machine: str) -> None:
    program = build_filter(machine, strict_memory=False)
    other = next(name for name in ARCHITECTURES if name != machine)
    assert simulate(program, machine=other, number=0) == RET_KILL_PROCESS


def test_x32_numbers_kill() -> None:
    program = build_filter("x86_64", strict_memory=False)
    assert simulate(program, machine="x86_64", number=0x40000000 | 39) == RET_KILL_PROCESS


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_only_unix_sockets_are_permitted(machine: str) -> None:
    for call in ("socket", "socketpair"):
        assert verdict(machine, call, socket.AF_UNIX, 1) == RET_ALLOW
        for family in (0, socket.AF_INET, socket.AF_INET6, 16, 17, 38, 40, (1 << 32) | 40):
            assert verdict(machine, call, family, 1) == denied(errno.EAFNOSUPPORT), family


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_families_are_those_of_the_builder_or_of_no_network(machine: str) -> None:
    number = NUMBERS[machine]["socket"]
    loopback = build_filter(machine, strict_memory=False, families=(socket.AF_UNIX, socket.AF_INET))
    none = build_filter(machine, strict_memory=False, families=())
    for family, expected in ((socket.AF_UNIX, RET_ALLOW), (socket.AF_INET, RET_ALLOW), (40, denied(97))):
        assert simulate(loopback, machine=machine, number=number, arguments=(family,)) == expected
        assert simulate(none, machine=machine, number=number, arguments=(family,)) == denied(97)


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_new_namespaces_by_clone_and_calls_with_hidden_arguments_are_denied(machine: str) -> None:
    assert verdict(machine, "clone", 17) == RET_ALLOW
    for flags in (0x3D0F00, 0x4111, 0x1200011, 0x7D0F00):  # glibc's thread, vfork and fork; musl's thread
        assert verdict(machine, "clone", flags) == RET_ALLOW, hex(flags)
    namespaces = (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000)
    for bit in (*namespaces, 0x1000, 0x2000, 0x8000, 0x80000000):  # and PIDFD, PTRACE, PARENT, IO
        assert verdict(machine, "clone", bit | 17) == denied(errno.EPERM), hex(bit)
    assert not {"clone3", "openat2"} & ALLOWED


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_terminal_injection_by_ioctl_is_denied(machine: str) -> None:
    for request in (0x5401, 0x5413, 0x541B, 0x5421, 0x5451):
        assert verdict(machine, "ioctl", 0, request) == RET_ALLOW
    for request in (0x5412, 0x541C, (7 << 32) | 0x5412):
        assert verdict(machine, "ioctl", 0, request) == denied(errno.EPERM)
    # SIOCATMARK, SIOCGIFCONF, FS_IOC_FIEMAP, FS_IOC_SETFLAGS, TIOCSWINSZ
    for request in (0x8905, 0x8912, 0xC020660B, 0x40086602, 0x5414):
        assert verdict(machine, "ioctl", 0, request) == denied(errno.ENOTTY), hex(request)


CASES = {
    "fcntl": [
        ((3, 5), RET_ALLOW),  # F_GETLK, F_SETLK and F_SETLKW: sqlite
        ((3, 7), RET_ALLOW),
        *(((3, command), errno.EINVAL) for command in (8, 10, 36, 38, 1024, 1025, 1026, 1036)),
    ],
    "futex": [
        *(((0, op), RET_ALLOW) for op in (0, 1, 128, 129, 131, 132, 137, 138, 265, 393)),
        *(((0, op), errno.ENOSYS) for op in (2, 6, 7, 8, 11, 12, 13, 134, 135, 139, 140, 141, 512)),
    ],
    "prctl": [
        *(((option,), RET_ALLOW) for option in (1, 8, 15, 24, 38, 47)),
        # SET_DUMPABLE, SET_SECCOMP, TASK_PERF_EVENTS, SET_MM, SET_CHILD_SUBREAPER, SET_VMA
        *(((option,), errno.EINVAL) for option in (4, 22, 31, 32, 35, 36, 41, 59, 0x53564D41)),
    ],
    "madvise": [
        *(((0, 0, advice), RET_ALLOW) for advice in (0, 3, 4, 8, 14, 17, 102)),
        *(((0, 0, advice), errno.EINVAL) for advice in (12, 21, 25, 100, 101)),
    ],
    # Dropping pages of a shared file from the cache: returns success without an effect.
    "fadvise64": [((3, 0, 0, 2), RET_ALLOW), ((3, 0, 0, 4), 0)],
    "preadv2": [((3, 0, 1, 0, 0, 0), RET_ALLOW), ((3, 0, 1, 0, 0, 8), errno.EOPNOTSUPP)],
    "pwritev2": [((3, 0, 1, 0, 0, 0x10), RET_ALLOW), ((3, 0, 1, 0, 0, 8), errno.EOPNOTSUPP)],
    "memfd_create": [((0, 1), RET_ALLOW), ((0, 4), errno.EINVAL), ((0, 5 | 21 << 26), errno.EINVAL)],
    "mmap": [((0, 0, 0, 0x22), RET_ALLOW), ((0, 0, 0, 0x40022), errno.ENOMEM)],
    "sendto": [((3, 0, 0, 0x4000), RET_ALLOW), ((3, 0, 0, 1), errno.EOPNOTSUPP)],
    "recvfrom": [((3, 0, 0, 2), RET_ALLOW), ((3, 0, 0, 1), errno.EOPNOTSUPP)],
    "sendmsg": [((3, 0, 0x4000), RET_ALLOW), ((3, 0, 0x4001), errno.EOPNOTSUPP)],
    "recvmsg": [((3, 0, 0x40000000), RET_ALLOW), ((3, 0, 3), errno.EOPNOTSUPP)],
    "setsockopt": [
        ((3, 1, 2), RET_ALLOW),
        ((3, 6, 1), RET_ALLOW),
        *(((3, 1, option), errno.ENOPROTOOPT) for option in (10, 26, 27, 50, 51)),
        *(((3, level, 2), errno.ENOPROTOOPT) for level in (0, 41, 263, 283)),
    ],
}


@pytest.mark.parametrize("machine", ARCHITECTURES)
@pytest.mark.parametrize("name", sorted(CASES))
def test_calls_with_many_operations_permit_those_that_programs_need(machine: str, name: str) -> None:
    for arguments, expected in CASES[name]:
        wanted = expected if expected == RET_ALLOW else denied(expected)
        assert verdict(machine, name, *arguments) == wanted, arguments


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_set_id_bits_are_denied_in_every_call_that_sets_a_mode(machine: str) -> None:
    where = {"chmod": 1, "fchmod": 1, "creat": 1, "fchmodat": 2, "fchmodat2": 2}
    for name, index in where.items():
        if name in NUMBERS[machine]:
            for mode, expected in (
                (0o777, RET_ALLOW),
                (0o1777, RET_ALLOW),
                (0o4755, denied(1)),
                (0o2755, denied(1)),
            ):
                arguments = [0] * index + [mode]
                assert verdict(machine, name, *arguments) == expected, (name, oct(mode))
    for name, flags_at in {"open": 1, "openat": 2}.items():
        if name in NUMBERS[machine]:
            for flags, expected in ((0o100, denied(1)), (0o20200000, denied(1)), (0o200000, RET_ALLOW)):
                arguments = [0] * flags_at + [flags, 0o4755]
                assert verdict(machine, name, *arguments) == expected, (name, oct(flags))


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_memory_outside_of_resident_sets_is_denied_in_strict_filters_only(machine: str) -> None:
    shared, private, file_backed = 0x21, 0x22, 0x01
    refused = denied(errno.ENOMEM)
    cases = {
        shared: refused,
        0x23: refused,
        shared | 0x4000: refused,
        private: RET_ALLOW,
        file_backed: RET_ALLOW,
    }
    for flags, expected in cases.items():
        assert verdict(machine, "mmap", 0, 0, 0, flags, strict_memory=True) == expected, hex(flags)
    assert verdict(machine, "memfd_create", strict_memory=True) == denied(errno.ENOSYS)
    larger_pipe, larger_buffer = (3, 1031, 1 << 20), (3, socket.SOL_SOCKET, socket.SO_SNDBUF)
    assert verdict(machine, "fcntl", *larger_pipe, strict_memory=True) == denied(errno.EPERM)
    assert verdict(machine, "setsockopt", *larger_buffer, strict_memory=True) == denied(errno.EPERM)
    assert verdict(machine, "fcntl", 3, 1, strict_memory=True) == RET_ALLOW
    assert verdict(machine, "fcntl", *larger_pipe) == RET_ALLOW
    assert verdict(machine, "mmap", 0, 0, 0, shared) == RET_ALLOW
    assert verdict(machine, "memfd_create") == RET_ALLOW


HEADERS = {
    "x86_64": [Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"), Path("/usr/include/asm/unistd_64.h")],
    "aarch64": [Path("/usr/include/asm-generic/unistd.h")],
}


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_numbers_equal_those_of_the_kernels_headers(machine: str) -> None:
    header = next((path for path in HEADERS[machine] if path.exists()), None)
    if header is None:
        pytest.skip("the kernel's C headers are not installed")
    known = dict(re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", header.read_text()))
    known.setdefault("newfstatat", known.get("fstatat", ""))
    # Headers of Linux 6.1, and some older ones: missing calls are newer than the headers.
    newest = max(int(number) for number in known.values() if number)
    missing = {name for name, number in NUMBERS[machine].items() if name not in known and number <= newest}
    assert missing == set()
    checked = {name: number for name, number in NUMBERS[machine].items() if name in known}
    assert {name: int(known[name]) for name in checked} == checked


def test_this_machine_has_a_filter() -> None:
    if platform.machine() not in AUDIT_ARCH:
        pytest.skip(f"no filter for {platform.machine()}")
    assert build_filter(strict_memory=True)
