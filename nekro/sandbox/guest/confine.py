"""Start the runner without namespaces, and stay outside to end every process that it starts.

Started as ``python -I -S confine.py CONFIG`` by the drivers without bubblewrap. This process is
the subreaper of orphaned processes inside; its child drops root, restricts itself with Landlock
and seccomp, and becomes the runner. Without a process namespace, nothing else ends a daemon that
was started inside.

Source: landlock(7), landlock_create_ruleset(2), prctl(2).
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import struct
import sys
from typing import Any, NoReturn

PR_SET_PDEATHSIG = 1
PR_SET_SECCOMP = 22
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38
SECCOMP_MODE_FILTER = 2
SYS_LANDLOCK_CREATE, SYS_LANDLOCK_ADD, SYS_LANDLOCK_RESTRICT = 444, 445, 446
LANDLOCK_CREATE_VERSION = 1
LANDLOCK_PATH_BENEATH = 1
#: The first version that restricts signals and abstract sockets (Linux 6.12).
LEAST_LANDLOCK = 6

#: All file rights of version 6, and those for reading and for starting programs.
FS_ALL = (1 << 16) - 1
FS_EXECUTE, FS_WRITE_FILE, FS_READ_FILE, FS_READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
FS_TRUNCATE, FS_IOCTL_DEV = 1 << 14, 1 << 15
FS_READ = FS_EXECUTE | FS_READ_FILE | FS_READ_DIR
#: Rights that a rule for a single file, not a directory, may grant.
FS_OF_FILE = FS_EXECUTE | FS_WRITE_FILE | FS_READ_FILE | FS_TRUNCATE | FS_IOCTL_DEV
NET_ALL = 3
SCOPE_ALL = 3

libc = ctypes.CDLL(None, use_errno=True)


def check(result: int, what: str) -> int:
    """Raise when a C call failed: the code must not run less confined."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def landlock_version() -> int:
    """Return the kernel's Landlock version; 0 when there is none."""
    version: int = libc.syscall(SYS_LANDLOCK_CREATE, None, 0, LANDLOCK_CREATE_VERSION)
    return max(version, 0)


def restrict_files(readable: list[str], writable: list[str]) -> None:
    """Allow files below these paths only; deny TCP, and signals and abstract sockets to the outside."""
    if landlock_version() < LEAST_LANDLOCK:
        raise OSError(f"Landlock version {LEAST_LANDLOCK} is needed, this kernel has {landlock_version()}")
    attributes = struct.pack("QQQ", FS_ALL, NET_ALL, SCOPE_ALL)
    ruleset = check(libc.syscall(SYS_LANDLOCK_CREATE, attributes, len(attributes), 0), "landlock")
    for paths, rights in ((readable, FS_READ), (writable, FS_ALL & ~(FS_EXECUTE | FS_IOCTL_DEV))):
        for path in paths:
            fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
            granted = rights if os.path.isdir(path) else rights & FS_OF_FILE
            rule = struct.pack("=Qi", granted, fd)
            check(libc.syscall(SYS_LANDLOCK_ADD, ruleset, LANDLOCK_PATH_BENEATH, rule, 0), f"landlock {path}")
            os.close(fd)
    check(libc.syscall(SYS_LANDLOCK_RESTRICT, ruleset, 0), "landlock")


def restrict_calls(fd: int) -> None:
    """Load the seccomp filter that ``fd`` holds."""
    program = os.read(fd, 1 << 20)
    buffer = ctypes.create_string_buffer(program, len(program))
    filter_struct = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(buffer))
    check(libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, filter_struct), "seccomp")


def become(uid: int) -> None:
    """Drop root irrevocably."""
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def start_runner(config: dict[str, Any]) -> NoReturn:
    """Turn this child into the runner."""
    os.setsid()
    os.chdir(config["cwd"])
    if config["uid"] is not None:
        become(config["uid"])
    check(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    if config["confine"]:
        restrict_files(config["readable"], config["writable"])
        restrict_calls(config["seccomp"])
    for fd in config["close"]:
        os.close(fd)
    os.set_inheritable(config["channel"], True)
    os.execve(config["command"][0], config["command"], config["environment"])  # noqa: S606 - the runner


def parent_of(pid: int) -> int | None:
    """Return a process's parent; None when the process has ended.

    Reads bytes: a process can give itself a name of any bytes, which must not hide it from the list.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return None


def children_of(pid: int) -> list[int]:
    """Return every descendant of a process, as /proc lists them now."""
    parents = {int(name): parent_of(int(name)) for name in os.listdir("/proc") if name.isdigit()}
    for child, parent in list(parents.items()):
        if parent and parents.get(parent) is None:  # it ended between the two reads
            parents[child] = parent_of(child)
    found = {pid}
    while True:
        more = {child for child, parent in parents.items() if parent in found} - found
        if not more:
            return sorted(found - {pid})
        found |= more


def end_all() -> None:
    """Kill until no child is left: the kernel makes each orphan inside a child of this process."""
    while reap_ended():
        for pid in children_of(os.getpid()):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue


def reap_ended() -> bool:
    """Reap ended children without waiting; returns whether others still run."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True


def main() -> NoReturn:
    """Wait for the gate, start the runner, wait for its end, end all other processes."""
    config: dict[str, Any] = json.loads(sys.argv[1])
    check(libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0), "pdeathsig")
    check(libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "subreaper")
    # Start nothing before the service has put this process under its limits.
    if not os.read(config["gate"], 1):
        os._exit(1)

    def on_sigterm(signum: int, frame: object) -> None:
        end_all()
        os._exit(128 + signal.SIGKILL)

    signal.signal(signal.SIGTERM, on_sigterm)
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        try:
            start_runner(config)
        except BaseException as exc:
            os.write(2, f"{type(exc).__name__}: {exc}\n".encode())
            os._exit(126)
    os.close(config["channel"])
    while True:
        pid, status = os.wait()
        if pid == child:
            break
    end_all()
    code = os.waitstatus_to_exitcode(status)
    os._exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main()
