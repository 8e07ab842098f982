"""Find and end what killed services left: processes of sandboxes, and their private directories.

Leftover containers, directories and processes carry the id of their service, so that another service can tell
whether it has ended. A process id alone is not enough: a service that shares a container engine or a
directory may run in another process namespace, or on another host.

Until the code starts, bubblewrap has a variable in its environment that identifies the service and the
launch; the code does not inherit it. A service that is killed during a launch can leave processes that wait
forever; the next service on this host kills them. With control groups they are members of a group, and end
with it; the search for marked processes is for hosts without.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import socket
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

from nekro.sandbox.limits import proc_files
from nekro_agent.files import safe_files

__all__ = [
    "ServiceId",
    "end_launch",
    "end_orphans",
    "launch_mark",
    "make_home",
    "own_id",
    "pid_namespace",
    "remove_home",
    "sweep_homes",
]

_NO_BOOT: Final = "unknown"
#: ASCII digits only and at most 20 of them, which ``int`` accepts in any case.
_NUMBER: Final = re.compile("[0-9]{1,20}")


@dataclass(frozen=True, kw_only=True)
class ServiceId:
    """One process of this project, among all hosts, boots and process namespaces."""

    host: str
    #: The kernel's random boot id.
    boot: str
    #: Inode number of the process namespace of ``pid``.
    namespace: str
    pid: int
    #: Clock ticks from the boot to the start of the process, as process ids are reused.
    started: int

    def __str__(self) -> str:
        return f"{self.host}/{self.boot}/{self.namespace}/{self.pid}/{self.started}"

    @classmethod
    def parse(cls, text: str) -> ServiceId | None:
        """Parse the text of ``str``; None when it has another form.

        The text is not trusted: other users choose environments of processes and names in ``/tmp``.
        """
        parts = text.split("/")
        if len(parts) != 5 or not (_NUMBER.fullmatch(parts[3]) and _NUMBER.fullmatch(parts[4])):
            return None
        host, boot, namespace, pid, started = parts
        return cls(host=host, boot=boot, namespace=namespace, pid=int(pid), started=int(started))

    @property
    def file_name(self) -> str:
        """The text as a file name, without slashes."""
        return str(self).replace("/", "~")

    @classmethod
    def of_file_name(cls, name: str) -> ServiceId | None:
        """Parse the text of ``file_name``; None when it has another form."""
        return cls.parse(name.replace("~", "/"))

    def is_gone(self, *, still_runs: bool) -> bool:
        """Whether it is certain that this process has ended.

        Args:
            still_runs: whether its leftovers are active. No leftover is active after a boot; if one
                is, it belongs to another host of the same name.
        """
        own = own_id()
        if (self.boot, self.namespace) == (own.boot, own.namespace):
            return _start_of(self.pid) != self.started
        if _NO_BOOT in (self.boot, own.boot):
            return False
        return self.host == own.host and self.boot != own.boot and not still_runs


def own_id() -> ServiceId:
    """Return the id of this process."""
    return _own_id(os.getpid())


@cache
def pid_namespace() -> str:
    """Return the number of this process's process namespace."""
    return str(os.stat("/proc/self/ns/pid").st_ino)


@cache
def _own_id(pid: int) -> ServiceId:
    return ServiceId(
        host=socket.gethostname().replace("/", "_"),
        boot=_boot_id(),
        namespace=pid_namespace(),
        pid=pid,
        started=_start_of(pid) or 0,
    )


def _boot_id() -> str:
    try:
        return proc_files.read("/proc/sys/kernel/random/boot_id").strip().decode("ascii")
    except OSError:  # a container or sandbox around this service hides it
        return _NO_BOOT


def _start_of(pid: int) -> int | None:
    try:
        return proc_files.process_stat(proc_files.read(f"/proc/{pid}/stat")).started
    except (OSError, proc_files.FormatError):
        return None


_VARIABLE: Final = "NEKRO_SANDBOX_LAUNCH"
_numbers: Final = itertools.count()
#: Passes over /proc: a process that is just being started may be missed by one.
_PASSES: Final = 3


def launch_mark() -> dict[str, str]:
    """Return the environment of one launch."""
    return {_VARIABLE: f"{own_id()} {next(_numbers)}"}


def end_launch(mark: dict[str, str]) -> int:
    """Kill the remaining processes of one launch whose first process has ended; returns how many."""
    return _end(lambda found: found == mark[_VARIABLE])


def end_orphans() -> int:
    """Kill processes of unfinished launches of services that have ended; returns how many.

    Services are identified by process id and start time, so that with a reused id neither an orphan is
    kept nor a sandbox of a running service killed.
    """

    def is_orphan(mark: str) -> bool:
        owner = ServiceId.parse(mark.partition(" ")[0])
        return owner is not None and owner.is_gone(still_runs=True)

    return _end(is_orphan)


def _end(chosen: Callable[[str], bool]) -> int:
    ended = 0
    for _ in range(_PASSES):
        before = ended
        for descriptor, mark in _marked():
            if chosen(mark):
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(descriptor, signal.SIGKILL)
                    ended += 1
        if ended == before:
            break
    return ended


def _marked() -> Iterator[tuple[int, str]]:
    """Yield (descriptor, mark) of marked processes; a descriptor is valid until the next step."""
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        try:
            # Opened before the environment is read: a reused id cannot be hit.
            descriptor = os.pidfd_open(int(name))
        except OSError:
            continue
        try:
            mark = _mark_of(name)
            if mark is not None:
                yield descriptor, mark
        finally:
            os.close(descriptor)


def _mark_of(pid: str) -> str | None:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            words = file.read().split(b"\0")
    except OSError:  # it has ended, or belongs to another user
        return None
    prefix = f"{_VARIABLE}=".encode()
    for word in words:
        if word.startswith(prefix):
            return word.removeprefix(prefix).decode("ascii", "replace")
    return None


#: Short, because the path of a Unix socket below it has at most 107 bytes.
_PREFIX: Final = "nekro-box"


def make_home() -> Path:
    """Create a directory that only this user may enter; its name identifies this service."""
    owner = own_id()
    return Path(tempfile.mkdtemp(prefix=f"{_PREFIX}-{owner.pid}-{owner.started}-ns{owner.namespace}-"))


def remove_home(path: Path) -> None:
    """Remove such a directory with everything that the code created in it."""
    with contextlib.suppress(OSError):
        safe_files.empty_directory(path)
        path.rmdir()


def sweep_homes() -> None:
    """Remove the directories of services that have ended.

    Directories of another process namespace are kept: whether their service runs is not visible here.
    """
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}-*"):
        owner = _owner_of(path)
        if owner is not None and owner.is_gone(still_runs=True):
            with contextlib.suppress(FileNotFoundError):  # another service sweeps too
                if path.lstat().st_uid == os.geteuid():
                    remove_home(path)


def _owner_of(path: Path) -> ServiceId | None:
    words = path.name.split("-")[2:]
    if len(words) != 4 or not words[2].startswith("ns"):
        return None
    pid, started, namespace = words[0], words[1], words[2].removeprefix("ns")
    own = own_id()
    return ServiceId.parse(f"{own.host}/{own.boot}/{namespace}/{pid}/{started}")
