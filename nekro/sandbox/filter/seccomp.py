"""Build seccomp filters: of a sandbox, and of a process that only computes on what it has already opened.

Isolation of the network and of the kernel depends on a sandbox's filter as much as on the namespaces: a
network namespace leaves ``AF_VSOCK`` and netlink open, and nothing else prevents a setuid file in a directory
that the host sees too. The filter is an allow list: a call that ``nekro.sandbox.filter.calls`` does not name,
known today or added by a later kernel, fails with ENOSYS, which programs handle as an older kernel. It checks
the architecture, so a number always means the call in the table.

A filter is a program of classic BPF. The kernel runs it at each system call whose verdict depends on an
argument; it determines the calls that are always allowed once, when it loads the filter (Linux 5.11). A
search tree over call numbers keeps both short: about ten instructions to reach any call, instead of one per
listed call.

Source: seccomp(2), and ``Documentation/userspace-api/seccomp_filter.rst`` of the kernel."""

from __future__ import annotations

import errno
import os
import platform
import socket
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from nekro.sandbox.filter.calls import ALLOWED, NUMBERS, OWN_PROCESS_ONLY, REFUSED, UNSUPPORTED, WHOLE_USERS
from nekro_agent.errors import SandboxUnavailableError

__all__ = [
    "AUDIT_ARCH",
    "RET_ALLOW",
    "RET_ERRNO",
    "RET_KILL_PROCESS",
    "Program",
    "allow_if",
    "answer",
    "build_filter",
    "computing_filter",
    "filter_fd",
    "no_bits",
    "none_of",
    "one_of",
    "pinned_tree",
    "waiting_filter",
    "when_bits",
]


AUDIT_ARCH: Final = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
#: On x86_64, numbers from here on belong to the x32 ABI, which the table does not cover.
X32_BIT: Final = 0x40000000

RET_KILL_PROCESS: Final = 0x80000000

RET_ERRNO: Final = 0x00050000

RET_ALLOW: Final = 0x7FFF0000

_LOAD_WORD: Final = 0x20

_AND: Final = 0x54

_JUMP: Final = 0x05

_JUMP_EQUAL: Final = 0x15

_JUMP_AT_LEAST: Final = 0x35

_JUMP_ANY_BIT: Final = 0x45

_RETURN: Final = 0x06

#: Offsets in ``struct seccomp_data``; of each 64-bit argument the low word is read.
_OFFSET_NUMBER: Final = 0

_OFFSET_ARCH: Final = 4

_OFFSET_ARGUMENTS: Final = 16

_WHOLE_WORD: Final = 0xFFFFFFFF
#: Largest offset of a conditional jump.
_MAX_OFFSET: Final = 255

Program = tuple[bytes, ...]


def answer(number: int) -> Program:
    """Fail the call with this error number; with 0, it returns 0 and has no effect."""
    return (_instruction(_RETURN, RET_ERRNO | number),)


def allow_if(*checks: Program) -> Program:
    """Allow the call when every check passes."""
    return (*(step for check in checks for step in check), _instruction(_RETURN, RET_ALLOW))


def one_of(argument: int, values: Sequence[int], *, otherwise: int, mask: int = _WHOLE_WORD) -> Program:
    """Fail with ``otherwise`` unless the argument's bits in ``mask`` are one of the values."""
    count = len(values)
    tests = [_instruction(_JUMP_EQUAL, value, if_true=count - index) for index, value in enumerate(values)]
    return (*_load_argument(argument, mask), *tests, *answer(otherwise))


def none_of(argument: int, values: Sequence[int], *, otherwise: int, mask: int = _WHOLE_WORD) -> Program:
    """Fail with ``otherwise`` when the argument's bits in ``mask`` are one of the values (one at least)."""
    *others, last = values
    count = len(others)
    tests = [_instruction(_JUMP_EQUAL, value, if_true=count - index) for index, value in enumerate(others)]
    final = _instruction(_JUMP_EQUAL, last, if_false=1)
    return (*_load_argument(argument, mask), *tests, final, *answer(otherwise))


def no_bits(argument: int, bits: int, *, otherwise: int) -> Program:
    """Fail with ``otherwise`` when any of the bits is set."""
    test = _instruction(_JUMP_ANY_BIT, bits, if_false=1)
    return (*_load_argument(argument, _WHOLE_WORD), test, *answer(otherwise))


def when_bits(argument: int, bits: int, then: Program) -> Program:
    """Apply the check only when any of the bits is set."""
    test = _instruction(_JUMP_ANY_BIT, bits, if_false=len(then))
    return (*_load_argument(argument, _WHOLE_WORD), test, *then)


def pinned_tree(machine: str, bodies: Mapping[int, Program], *, otherwise: Program) -> bytes:
    """Return the whole program for one architecture; calls that enter by another one kill the process.

    Args:
        machine: a key of ``AUDIT_ARCH``.
        bodies: by call number, a program that ends in a return on every path.
        otherwise: program for every other number.
    """
    steps = [
        _instruction(_LOAD_WORD, _OFFSET_ARCH),
        _instruction(_JUMP_EQUAL, AUDIT_ARCH[machine], if_true=1),
        _instruction(_RETURN, RET_KILL_PROCESS),
        _instruction(_LOAD_WORD, _OFFSET_NUMBER),
    ]
    if machine == "x86_64":
        steps += [
            _instruction(_JUMP_AT_LEAST, X32_BIT, if_false=1),
            _instruction(_RETURN, RET_KILL_PROCESS),
        ]
    return b"".join([*steps, *_tree(_ranges(bodies, otherwise))])


def _ranges(bodies: Mapping[int, Program], otherwise: Program) -> list[tuple[int, Program]]:
    """Return the first number of every run of numbers with one answer, and that answer; from 0 on."""
    ranges: list[tuple[int, Program]] = []
    for number in range(max(bodies) + 2):
        body = bodies.get(number, otherwise)
        if not ranges or ranges[-1][1] != body:
            ranges.append((number, body))
    return ranges


def _tree(ranges: Sequence[tuple[int, Program]]) -> Program:
    if len(ranges) == 1:
        return ranges[0][1]
    middle = len(ranges) // 2
    first = ranges[middle][0]
    below, from_there = _tree(ranges[:middle]), _tree(ranges[middle:])
    if len(below) <= _MAX_OFFSET:
        return (_instruction(_JUMP_AT_LEAST, first, if_true=len(below)), *below, *from_there)
    far = _instruction(_JUMP, len(below))
    return (_instruction(_JUMP_AT_LEAST, first, if_false=1), far, *below, *from_there)


def _load_argument(index: int, mask: int) -> Program:
    load = _instruction(_LOAD_WORD, _OFFSET_ARGUMENTS + 8 * index)
    return (load,) if mask == _WHOLE_WORD else (load, _instruction(_AND, mask))


def _instruction(code: int, operand: int, *, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, operand)


_WORD: Final = 0xFFFFFFFF
#: The signal at a child's end, and the flags of fork, vfork, posix_spawn and threads: CHILD_SETTID, DETACHED,
#: CHILD_CLEARTID, PARENT_SETTID, SETTLS, SYSVSEM, THREAD, VFORK, SIGHAND, FILES, FS, VM. Not included: every
#: new namespace, PTRACE, PARENT, IO, PIDFD.
_CLONE_FLAGS: Final = 0x017D4FFF

_SET_ID_BITS: Final = 0o6000
#: O_CREAT, and the bit that O_TMPFILE has in addition to O_DIRECTORY.
_CREATES: Final = 0o100 | 0o20000000

_TERMINAL_INJECTION: Final = (0x5412, 0x541C)  # TIOCSTI, TIOCLINUX

_IOCTLS: Final = (
    0x5401, 0x802C542A,  # TCGETS, TCGETS2, for isatty
    0x540F, 0x5413,  # TIOCGPGRP, TIOCGWINSZ
    0x541B, 0x5421,  # FIONREAD, FIONBIO
    0x5450, 0x5451,  # FIONCLEX, FIOCLEX
)  # fmt: skip

_SET_PIPE_SIZE: Final = 1031  # F_SETPIPE_SZ
#: Duplicates, flags, record locks, and the size of pipes and seals of memory files. Not included: leases and
#: F_NOTIFY (which watch files of others), signals about descriptors, locks of open files.
_FCNTLS: Final = (*range(8), 1030, _SET_PIPE_SIZE, 1032, 1033, 1034)

#: WAIT, WAKE, REQUEUE, CMP_REQUEUE, WAKE_OP, WAIT_BITSET, WAKE_BITSET. Not included: priority inheritance.
_FUTEXES: Final = (0, 1, 3, 4, 5, 9, 10)

_FUTEX_OPTIONS: Final = 128 | 256  # FUTEX_PRIVATE_FLAG, FUTEX_CLOCK_REALTIME

#: PDEATHSIG, DUMPABLE (get), KEEPCAPS (for setpriv), NAME, SECCOMP (get), CAPBSET, SECUREBITS (get),
#: NO_NEW_PRIVS, CAP_AMBIENT. Not included: SET_DUMPABLE, which would hide a process from the watchdog,
#: SET_MM, SET_VMA, SET_SECCOMP.
_PRCTLS: Final = (1, 2, 3, 7, 8, 15, 16, 21, 23, 24, 27, 38, 39, 47)

_ARCH_PRCTLS: Final = (0x1002, 0x1003)  # ARCH_SET_FS, ARCH_GET_FS

#: NORMAL to DONTNEED, FREE, REMOVE, DONTFORK, DOFORK, HUGEPAGE to KEEPONFORK, COLD, POPULATE_*, GUARD_*.
#: Not included: MERGEABLE and PAGEOUT, which act on pages that others share, and HWPOISON.
_ADVICE: Final = (*range(5), 8, 9, 10, 11, *range(14, 21), 22, 23, 102, 103)
#: All but DONTNEED, which drops pages from the cache that others share.
_FILE_ADVICE: Final = (0, 1, 2, 3, 5)

_MAP_HUGE_PAGES: Final = 0x40000

_MAP_TYPE_AND_ANONYMOUS: Final = 0x2F

_MAP_SHARED_ANONYMOUS: Final = (0x21, 0x23)
#: CLOEXEC, ALLOW_SEALING, NOEXEC_SEAL, EXEC; without HUGETLB.
_MEMORY_FILE_FLAGS: Final = 0x1B

_READ_WITHOUT_WAITING: Final = 8  # RWF_NOWAIT: whether a page of a file is in the cache

_OUT_OF_BAND: Final = 1  # MSG_OOB
#: SOL_SOCKET and IPPROTO_TCP, and what programs set there: REUSEADDR and NODELAY to QUICKACK, TYPE, ERROR,
#: BROADCAST, SNDBUF, RCVBUF, KEEPALIVE, LINGER, REUSEPORT, PASSCRED, timeouts. Not included: socket filters.
_OPTION_LEVELS: Final = (1, 6)

_OPTIONS: Final = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 15, 16, 18, 20, 21, 66, 67)
#: Read-only options: TCP_INFO, PEERCRED, ACCEPTCONN, PROTOCOL, DOMAIN. Not included: PEERPIDFD, which opens
#: a descriptor of the process at the other end (of the bridge, the service), and COOKIE and NETNS_COOKIE,
#: which reveal counters of the host's sockets and namespaces.
_ANSWERS: Final = (11, 17, 30, 38, 39)


def build_filter(
    machine: str | None = None,
    *,
    strict_memory: bool,
    families: Sequence[int] = (socket.AF_UNIX,),
    strict_processes: bool = False,
    also: Iterable[str] = (),
) -> bytes:
    """Return the filter program, ready for ``bwrap --seccomp`` or ``prctl(PR_SET_SECCOMP)``.

    Args:
        machine: name that ``platform.machine()`` returns there; None means this machine.
        strict_memory: also deny memory that no process's resident set shows (memfd, shared
            anonymous pages, larger buffers of pipes and sockets). Needed where no cgroup bounds
            memory: the watchdog would not see that memory.
        families: allowed address families of sockets; the network namespace decides what they
            reach.
        strict_processes: also deny changes to other processes of the same user (their limits,
            priority, processors). Needed without a process namespace: the service itself may be
            one of those processes.
        also: more allowed calls, by name, whatever their arguments.

    Raises:
        SandboxUnavailableError: the tables lack this architecture.
    """
    machine = machine or platform.machine()
    numbers = NUMBERS.get(machine)
    if numbers is None:
        raise SandboxUnavailableError(
            f"no seccomp filter for {machine}; use {' or '.join(AUDIT_ARCH)}, or sandbox.driver=container"
        )
    rules = _always(ALLOWED, allow_if())
    rules |= _always(REFUSED, answer(errno.EPERM)) | _always(UNSUPPORTED, answer(errno.EOPNOTSUPP))
    rules |= _files() | _kernel_objects() | _sockets(families, strict_memory=strict_memory)
    rules |= _memory(strict=strict_memory)
    if strict_processes:
        rules |= _always(OWN_PROCESS_ONLY, allow_if(one_of(0, [0], otherwise=errno.EPERM)))
        rules |= _always(WHOLE_USERS, answer(errno.EPERM))
    rules |= _always(also, allow_if())
    bodies = {numbers[name]: body for name, body in rules.items() if name in numbers}
    return pinned_tree(machine, bodies, otherwise=answer(errno.ENOSYS))


def filter_fd(program: bytes) -> int:
    """Return a descriptor that contains the program, positioned at its start; the caller closes it."""
    fd = os.memfd_create("seccomp", os.MFD_CLOEXEC)
    os.write(fd, program)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def _always(names: Iterable[str], body: Program) -> dict[str, Program]:
    return dict.fromkeys(names, body)


def _files() -> dict[str, Program]:
    """Deny set-id bits in every call that sets a mode, and probes of the page cache."""

    def mode_at(index: int) -> Program:
        return no_bits(index, _SET_ID_BITS, otherwise=errno.EPERM)

    no_probe = allow_if(no_bits(5, _READ_WITHOUT_WAITING, otherwise=errno.EOPNOTSUPP))
    return {
        "chmod": allow_if(mode_at(1)),
        "fchmod": allow_if(mode_at(1)),
        "fchmodat": allow_if(mode_at(2)),
        "fchmodat2": allow_if(mode_at(2)),
        "creat": allow_if(mode_at(1)),
        "open": allow_if(when_bits(1, _CREATES, mode_at(2))),
        "openat": allow_if(when_bits(2, _CREATES, mode_at(3))),
        "preadv2": no_probe,
        "pwritev2": no_probe,
        "fadvise64": allow_if(one_of(3, _FILE_ADVICE, otherwise=0)),
    }


def _kernel_objects() -> dict[str, Program]:
    """Allow only the operations that programs need of multiplexed calls."""
    injection = none_of(1, _TERMINAL_INJECTION, otherwise=errno.EPERM)
    return {
        "clone": allow_if(no_bits(0, _WORD & ~_CLONE_FLAGS, otherwise=errno.EPERM)),
        "ioctl": allow_if(injection, one_of(1, _IOCTLS, otherwise=errno.ENOTTY)),
        "prctl": allow_if(one_of(0, _PRCTLS, otherwise=errno.EINVAL)),
        "arch_prctl": allow_if(one_of(0, _ARCH_PRCTLS, otherwise=errno.EINVAL)),
        "futex": allow_if(one_of(1, _FUTEXES, otherwise=errno.ENOSYS, mask=_WORD & ~_FUTEX_OPTIONS)),
    }


def _sockets(families: Sequence[int], *, strict_memory: bool) -> dict[str, Program]:
    # With buffers of the default size, counting sockets bounds their memory.
    buffers = [none_of(2, [socket.SO_SNDBUF], otherwise=errno.EPERM)] if strict_memory else []
    options = one_of(2, _OPTIONS, otherwise=errno.ENOPROTOOPT)
    levels = one_of(1, _OPTION_LEVELS, otherwise=errno.ENOPROTOOPT)
    rules = {
        "socket": allow_if(one_of(0, families, otherwise=errno.EAFNOSUPPORT)),
        "socketpair": allow_if(one_of(0, [socket.AF_UNIX], otherwise=errno.EAFNOSUPPORT)),
        "setsockopt": allow_if(levels, *buffers, options),
        "getsockopt": allow_if(levels, one_of(2, (*_OPTIONS, *_ANSWERS), otherwise=errno.ENOPROTOOPT)),
    }
    flags_at = {"sendto": 3, "recvfrom": 3, "sendmsg": 2, "recvmsg": 2}
    for name, index in flags_at.items():
        rules[name] = allow_if(no_bits(index, _OUT_OF_BAND, otherwise=errno.EOPNOTSUPP))
    return rules


def _memory(*, strict: bool) -> dict[str, Program]:
    shared = none_of(3, _MAP_SHARED_ANONYMOUS, otherwise=errno.ENOMEM, mask=_MAP_TYPE_AND_ANONYMOUS)
    pipe_size = none_of(1, [_SET_PIPE_SIZE], otherwise=errno.EPERM)
    files = allow_if(no_bits(1, _WORD & ~_MEMORY_FILE_FLAGS, otherwise=errno.EINVAL))
    return {
        "mmap": allow_if(no_bits(3, _MAP_HUGE_PAGES, otherwise=errno.ENOMEM), *([shared] if strict else [])),
        "madvise": allow_if(one_of(2, _ADVICE, otherwise=errno.EINVAL)),
        "fcntl": allow_if(*([pipe_size] if strict else []), one_of(1, _FCNTLS, otherwise=errno.EINVAL)),
        "memfd_create": answer(errno.ENOSYS) if strict else files,
    }


#: Read and write open descriptors, memory, locks and the end of threads and the process.
_COMPUTING: Final = (
    "read", "readv", "write", "writev", "lseek", "close", "fstat", "newfstatat",
    "brk", "mmap", "munmap", "mremap", "mprotect", "madvise", "futex", "sched_yield", "rt_sigaction",
    "rt_sigprocmask", "rt_sigreturn", "sigaltstack", "clock_gettime", "getrandom", "getpid", "gettid",
    "exit", "exit_group", "restart_syscall",
)  # fmt: skip
#: Wait for signals, report an error, and end.
_WAITING: Final = ("pause", "ppoll", "rt_sigreturn", "restart_syscall", "futex", "write", "exit_group")


def computing_filter() -> bytes:
    """Return the filter: no files, sockets, processes or signals; every such call fails with EPERM.

    Raises:
        SandboxUnavailableError: the tables lack this architecture.
    """
    return _only(_COMPUTING)


def waiting_filter() -> bytes:
    """Return the filter of a process that does nothing; see ``computing_filter``."""
    return _only(_WAITING)


def _only(names: Iterable[str]) -> bytes:
    machine = platform.machine()
    numbers = NUMBERS.get(machine)
    if numbers is None:
        raise SandboxUnavailableError(f"no seccomp filter for {machine}; there are: {', '.join(AUDIT_ARCH)}")
    bodies = {numbers[name]: allow_if() for name in names if name in numbers}
    return pinned_tree(machine, bodies, otherwise=answer(errno.EPERM))
