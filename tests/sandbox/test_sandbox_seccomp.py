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

from sandbox.seccomp import AUDIT_ARCH, RET_ALLOW, RET_ERRNO, RET_KILL_PROCESS, build_filter
from sandbox.syscalls import DENIED, NUMBERS

ARCHITECTURES = sorted(AUDIT_ARCH)
#: SHA-256 of the programs: a change here is a change of the wall, and must be meant.
GOLDEN = {
    ("aarch64", False): "c45cf775f91cc10044a7e6ee409a4de2ae4d19409a5d093823a05ae6c0a47b21",
    ("aarch64", True): "c5d3235a4e7ae52cef52fa04815f86748d185593c5bd53e5c7684279c4249196",
    ("x86_64", False): "19c9d151fc3a899f745f9ca98d50b866dad12e90fdccb94ae2d685cd15b8fb8b",
    ("x86_64", True): "45a8ffdf68cf34022569aa356c64202880e7e08f80d4af0fa2fe7ea6e9a4f520",
}


def simulate(program: bytes, *, machine: str, number: int, arguments: tuple[int, ...] = ()) -> int:
    """Run a classic BPF program on one ``struct seccomp_data`` and return its verdict."""
    words = (*arguments, *(0,) * (6 - len(arguments)))
    data = struct.pack("<IIQ6Q", number, AUDIT_ARCH[machine], 0, *words)
    instructions = list(struct.iter_unpack("<HBBI", program))
    accumulator = position = 0
    while True:
        code, if_true, if_false, operand = instructions[position]
        position += 1
        if code == 0x20:
            (accumulator,) = struct.unpack_from("<I", data, operand)
        elif code == 0x54:
            accumulator &= operand
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
def test_filter_is_byte_for_byte_the_known_one(machine: str, strict: bool) -> None:
    program = build_filter(machine, strict_memory=strict)
    assert len(program) // 8 < 4096  # what the kernel takes
    assert hashlib.sha256(program).hexdigest() == GOLDEN[machine, strict]


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_every_denied_call_is_refused_and_others_are_allowed(machine: str) -> None:
    for name in DENIED:
        if name in NUMBERS[machine]:
            assert verdict(machine, name) == denied(errno.EPERM), name
    program = build_filter(machine, strict_memory=True)
    named = set(NUMBERS[machine].values())
    allowed = [n for n in range(600) if n not in named]
    assert {simulate(program, machine=machine, number=n) for n in allowed} == {RET_ALLOW}


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_another_architecture_kills(machine: str) -> None:
    program = build_filter(machine, strict_memory=False)
    other = next(name for name in ARCHITECTURES if name != machine)
    assert simulate(program, machine=other, number=0) == RET_KILL_PROCESS


def test_x32_numbers_kill() -> None:
    program = build_filter("x86_64", strict_memory=False)
    assert simulate(program, machine="x86_64", number=0x40000000 | 39) == RET_KILL_PROCESS


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_sockets_are_unix_ones_only(machine: str) -> None:
    for call in ("socket", "socketpair"):
        assert verdict(machine, call, socket.AF_UNIX, 1) == RET_ALLOW
        for family in (0, socket.AF_INET, socket.AF_INET6, 16, 17, 38, 40, (1 << 32) | 40):
            assert verdict(machine, call, family, 1) == denied(errno.EAFNOSUPPORT), family


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_families_of_the_builder_and_of_no_network_at_all(machine: str) -> None:
    number = NUMBERS[machine]["socket"]
    loopback = build_filter(machine, strict_memory=False, families=(socket.AF_UNIX, socket.AF_INET))
    none = build_filter(machine, strict_memory=False, families=())
    for family, expected in ((socket.AF_UNIX, RET_ALLOW), (socket.AF_INET, RET_ALLOW), (40, denied(97))):
        assert simulate(loopback, machine=machine, number=number, arguments=(family,)) == expected
        assert simulate(none, machine=machine, number=number, arguments=(family,)) == denied(97)


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_namespaces_by_clone_and_the_calls_with_hidden_arguments(machine: str) -> None:
    assert verdict(machine, "clone", 17) == RET_ALLOW
    for bit in (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000):
        assert verdict(machine, "clone", bit | 17) == denied(errno.EPERM), hex(bit)
    assert verdict(machine, "clone3") == denied(errno.ENOSYS)
    assert verdict(machine, "openat2") == denied(errno.ENOSYS)


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_terminal_injection_by_ioctl(machine: str) -> None:
    assert verdict(machine, "ioctl", 0, 0x5401) == RET_ALLOW
    for request in (0x5412, 0x541C, (7 << 32) | 0x5412):
        assert verdict(machine, "ioctl", 0, request) == denied(errno.EPERM)


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_set_id_bits_on_every_way_to_a_mode(machine: str) -> None:
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
def test_memory_that_nobody_counts_is_denied_in_strict_filters_only(machine: str) -> None:
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
def test_numbers_are_those_of_the_kernels_headers(machine: str) -> None:
    header = next((path for path in HEADERS[machine] if path.exists()), None)
    if header is None:
        pytest.skip("the kernel's C headers are not installed")
    known = dict(re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", header.read_text()))
    checked = {name: number for name, number in NUMBERS[machine].items() if name in known}
    assert len(checked) > 60
    assert {name: int(known[name]) for name in checked} == checked


def test_this_machine_has_a_filter() -> None:
    if platform.machine() not in AUDIT_ARCH:
        pytest.skip(f"no filter for {platform.machine()}")
    assert build_filter(strict_memory=True)
