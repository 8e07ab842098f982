"""Builds the seccomp filter of a process that only computes on what it has already opened."""

from __future__ import annotations

import errno
import platform
from typing import Final

from nekro.sandbox.filter.bpf import AUDIT_ARCH, allow_if, answer, pinned_tree
from nekro.sandbox.filter.syscalls import NUMBERS
from nekro_agent.errors import SandboxUnavailableError

__all__ = ["computing_filter"]

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
