"""The seccomp filter of a sandbox, generated as classic BPF.

Isolation of the network and of the kernel rests on it as much as on the namespaces: a
network namespace leaves ``AF_VSOCK`` and netlink open, and nothing else stops a setuid file
in a directory that the host sees too. The filter denies by name and allows the rest; it
pins the architecture, so a number always means the call that the table says.

Source: seccomp(2), and ``Documentation/userspace-api/seccomp_filter.rst`` of the kernel.
"""

from __future__ import annotations

import errno
import os
import platform
import socket
import struct
from collections.abc import Sequence
from typing import Final

from nekro_agent.errors import SandboxUnavailableError
from sandbox.syscalls import DENIED, NUMBERS, OWN_PROCESS_ONLY, WHOLE_USERS

__all__ = ["build_filter", "filter_fd", "supported_architectures"]

AUDIT_ARCH: Final = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
#: On x86_64, numbers from here on enter by the x32 ABI, which would slip past the table.
X32_BIT: Final = 0x40000000

RET_KILL_PROCESS: Final = 0x80000000
RET_ERRNO: Final = 0x00050000
RET_ALLOW: Final = 0x7FFF0000

_LOAD_WORD: Final = 0x20
_AND: Final = 0x54
_JUMP_EQUAL: Final = 0x15
_JUMP_AT_LEAST: Final = 0x35
_JUMP_ANY_BIT: Final = 0x45
_RETURN: Final = 0x06

#: Offsets in ``struct seccomp_data``; of each 64-bit argument the low word is read.
_OFFSET_NUMBER: Final = 0
_OFFSET_ARCH: Final = 4
_OFFSET_ARGUMENTS: Final = 16

#: NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID and NEWNET of ``clone(2)``.
_NAMESPACE_FLAGS: Final = 0x7E020000
_TERMINAL_INJECTION: Final = (0x5412, 0x541C)  # TIOCSTI, TIOCLINUX
_SET_ID_BITS: Final = 0o6000
#: O_CREAT and the bit that tells O_TMPFILE from O_DIRECTORY.
_CREATES: Final = 0o100 | 0o20000000
_SET_PIPE_SIZE: Final = 1031  # F_SETPIPE_SZ
_MAP_TYPE_AND_ANONYMOUS: Final = 0x2F
_MAP_SHARED_ANONYMOUS: Final = (0x21, 0x23)

_Program = list[bytes]


def supported_architectures() -> tuple[str, ...]:
    """Return the machine names that a filter can be built for."""
    return tuple(AUDIT_ARCH)


def build_filter(
    machine: str | None = None,
    *,
    strict_memory: bool,
    families: Sequence[int] = (socket.AF_UNIX,),
    strict_processes: bool = False,
) -> bytes:
    """Return the filter program, ready for ``bwrap --seccomp`` or ``prctl(PR_SET_SECCOMP)``.

    Args:
        machine: as ``platform.machine()`` says it; None means this machine.
        strict_memory: also deny memory that no process's resident set shows (memfd, shared
            anonymous pages, larger buffers of pipes and sockets). Needed where no cgroup bounds
            memory: the watchdog that stands in for it would not see that memory.
        families: address families of sockets that may be made; the network namespace decides
            what they reach.
        strict_processes: also deny what changes other processes of the same user (their limits,
            priority, processors). Needed where no process namespace keeps those out of sight: the
            service itself may be one of them.

    Raises:
        SandboxUnavailableError: the tables lack this architecture.
    """
    machine = machine or platform.machine()
    numbers = NUMBERS.get(machine)
    if numbers is None:
        raise SandboxUnavailableError(
            f"no seccomp filter for {machine}; use {' or '.join(AUDIT_ARCH)}, or sandbox.driver=container"
        )
    program = _pin_architecture(machine)
    rules = [
        # clone3's flags are behind a pointer: ENOSYS makes the C library use clone.
        ("clone3", [_deny(errno.ENOSYS)]),
        # openat2 hides its mode behind a pointer likewise.
        ("openat2", [_deny(errno.ENOSYS)]),
        ("clone", _deny_bits(0, _NAMESPACE_FLAGS)),
        ("socket", _allow_only(0, families, errno.EAFNOSUPPORT)),
        ("socketpair", _allow_only(0, [socket.AF_UNIX], errno.EAFNOSUPPORT)),
        ("ioctl", _deny_values(1, _TERMINAL_INJECTION, errno.EPERM)),
        ("chmod", _deny_bits(1, _SET_ID_BITS)),
        ("fchmod", _deny_bits(1, _SET_ID_BITS)),
        ("fchmodat", _deny_bits(2, _SET_ID_BITS)),
        ("fchmodat2", _deny_bits(2, _SET_ID_BITS)),
        ("creat", _deny_bits(1, _SET_ID_BITS)),
        ("open", _deny_creating_set_id(flags=1, mode=2)),
        ("openat", _deny_creating_set_id(flags=2, mode=3)),
    ]
    if strict_memory:
        rules.append(("memfd_create", [_deny(errno.ENOSYS)]))
        rules.append(("mmap", _deny_shared_anonymous(3)))
        # Buffers of the usual size can be counted by counting pipes and sockets.
        rules.append(("fcntl", _deny_values(1, [_SET_PIPE_SIZE], errno.EPERM)))
        rules.append(("setsockopt", _deny_values(2, [socket.SO_SNDBUF], errno.EPERM)))
    if strict_processes:
        rules += [(name, _allow_only(0, [0], errno.EPERM)) for name in OWN_PROCESS_ONLY]
        rules += [(name, [_deny(errno.EPERM)]) for name in WHOLE_USERS]
    rules += [(name, [_deny(errno.EPERM)]) for name in DENIED]
    for name, body in rules:
        if name in numbers:
            program += _for_call(numbers[name], body)
    return b"".join([*program, _instruction(_RETURN, RET_ALLOW)])


def filter_fd(program: bytes) -> int:
    """Return a descriptor from which the program can be read once; the caller closes it."""
    fd = os.memfd_create("seccomp", os.MFD_CLOEXEC)
    os.write(fd, program)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def _instruction(code: int, operand: int, *, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, operand)


def _deny(number: int) -> bytes:
    return _instruction(_RETURN, RET_ERRNO | number)


def _load_argument(index: int) -> bytes:
    return _instruction(_LOAD_WORD, _OFFSET_ARGUMENTS + 8 * index)


def _pin_architecture(machine: str) -> _Program:
    program = [
        _instruction(_LOAD_WORD, _OFFSET_ARCH),
        _instruction(_JUMP_EQUAL, AUDIT_ARCH[machine], if_true=1),
        _instruction(_RETURN, RET_KILL_PROCESS),
        _instruction(_LOAD_WORD, _OFFSET_NUMBER),
    ]
    if machine == "x86_64":
        program += [
            _instruction(_JUMP_AT_LEAST, X32_BIT, if_false=1),
            _instruction(_RETURN, RET_KILL_PROCESS),
        ]
    return program


def _for_call(number: int, body: _Program) -> _Program:
    """Run ``body`` for that call only; every path through a body ends in a return."""
    return [_instruction(_JUMP_EQUAL, number, if_false=len(body)), *body]


def _deny_bits(argument: int, bits: int) -> _Program:
    return [
        _load_argument(argument),
        _instruction(_JUMP_ANY_BIT, bits, if_false=1),
        _deny(errno.EPERM),
        _instruction(_RETURN, RET_ALLOW),
    ]


def _deny_values(argument: int, values: Sequence[int], number: int) -> _Program:
    tests = [
        _instruction(_JUMP_EQUAL, value, if_true=len(values) - index) for index, value in enumerate(values)
    ]
    return [_load_argument(argument), *tests, _instruction(_RETURN, RET_ALLOW), _deny(number)]


def _allow_only(argument: int, values: Sequence[int], number: int) -> _Program:
    tests = [
        _instruction(_JUMP_EQUAL, value, if_true=len(values) - index) for index, value in enumerate(values)
    ]
    return [_load_argument(argument), *tests, _deny(number), _instruction(_RETURN, RET_ALLOW)]


def _deny_creating_set_id(*, flags: int, mode: int) -> _Program:
    return [
        _load_argument(flags),
        _instruction(_JUMP_ANY_BIT, _CREATES, if_false=3),
        _load_argument(mode),
        _instruction(_JUMP_ANY_BIT, _SET_ID_BITS, if_false=1),
        _deny(errno.EPERM),
        _instruction(_RETURN, RET_ALLOW),
    ]


def _deny_shared_anonymous(argument: int) -> _Program:
    shared, shared_validate = _MAP_SHARED_ANONYMOUS
    return [
        _load_argument(argument),
        _instruction(_AND, _MAP_TYPE_AND_ANONYMOUS),
        _instruction(_JUMP_EQUAL, shared, if_true=2),
        _instruction(_JUMP_EQUAL, shared_validate, if_true=1),
        _instruction(_RETURN, RET_ALLOW),
        _deny(errno.ENOMEM),
    ]
