"""Build seccomp filters: of a sandbox, and of a process that only computes on what it has already opened.

Isolation of the network and of the kernel depends on a sandbox's filter as much as on the namespaces: a
network namespace leaves ``AF_VSOCK`` and netlink open, and nothing else prevents a setuid file in a directory
that the host sees too. The filter is an allow list: a call that ``nekro.sandbox.filter.calls`` does not name,
known today or added by a later kernel, fails with ENOSYS, which programs handle as an older kernel. It checks
the architecture, so a number always means the call in the table.
"""

from __future__ import annotations

import errno
import os
import platform
import socket
from collections.abc import Iterable, Sequence
from typing import Final

from nekro.sandbox.filter.bpf import (
    AUDIT_ARCH,
    Program,
    allow_if,
    answer,
    no_bits,
    none_of,
    one_of,
    pinned_tree,
    when_bits,
)
from nekro.sandbox.filter.calls import ALLOWED, NUMBERS, OWN_PROCESS_ONLY, REFUSED, UNSUPPORTED, WHOLE_USERS
from nekro_agent.errors import SandboxUnavailableError

__all__ = [
    "build_filter",
    "computing_filter",
    "filter_fd",
]

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
        machine: name as of ``platform.machine()``; None means this machine.
        strict_memory: also deny memory that no process's resident set shows (memfd, shared
            anonymous pages, larger buffers of pipes and sockets). Needed where no cgroup bounds
            memory: the watchdog would not see that memory.
        families: allowed address families of sockets; the network namespace decides what they
            reach.
        strict_processes: also deny changes to other processes of the same user (their limits,
            priority, processors). Needed without a process namespace: the service itself may be
            one of those processes.
        also: more allowed calls, by name.

    Raises:
        SandboxUnavailableError: the tables lack this architecture.
    """
    machine = machine or platform.machine()
    numbers = NUMBERS.get(machine)
    if numbers is None:
        raise SandboxUnavailableError(
            f"no seccomp filter for {machine}; use {' or '.join(AUDIT_ARCH)}, or sandbox.driver=container"
        )
    rules = _always((*ALLOWED, *also), allow_if())
    rules |= _always(REFUSED, answer(errno.EPERM)) | _always(UNSUPPORTED, answer(errno.EOPNOTSUPP))
    rules |= _files() | _kernel_objects() | _sockets(families, strict_memory=strict_memory)
    rules |= _memory(strict=strict_memory)
    if strict_processes:
        rules |= _always(OWN_PROCESS_ONLY, allow_if(one_of(0, [0], otherwise=errno.EPERM)))
        rules |= _always(WHOLE_USERS, answer(errno.EPERM))
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
_ALLOWED: Final = (
    "read", "readv", "write", "writev", "lseek", "close", "fstat", "newfstatat",
    "brk", "mmap", "munmap", "mremap", "mprotect", "madvise", "futex", "sched_yield", "rt_sigaction",
    "rt_sigprocmask", "rt_sigreturn", "sigaltstack", "clock_gettime", "getrandom", "getpid", "gettid",
    "exit", "exit_group", "restart_syscall",
)  # fmt: skip


def computing_filter() -> bytes:
    """Return the filter: no files, sockets, processes or signals; every such call fails with EPERM.

    Raises:
        SandboxUnavailableError: the tables lack this architecture.
    """
    machine = platform.machine()
    numbers = NUMBERS.get(machine)
    if numbers is None:
        raise SandboxUnavailableError(f"no seccomp filter for {machine}; there are: {', '.join(AUDIT_ARCH)}")
    bodies = {numbers[name]: allow_if() for name in _ALLOWED if name in numbers}
    return pinned_tree(machine, bodies, otherwise=answer(errno.EPERM))
