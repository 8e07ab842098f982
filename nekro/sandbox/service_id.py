"""Identify service processes across hosts, boots and process namespaces.

Leftover containers, directories and processes carry the id of their service, so that another service can
tell whether it has ended. A process id alone is not enough: a service that shares a container engine or
a directory may run in another process namespace, or on another host.
"""

from __future__ import annotations

import os
import re
import socket
from dataclasses import dataclass
from functools import cache
from typing import Final

from nekro.sandbox.limits import proc_files

__all__ = ["ServiceId", "own_id", "pid_namespace"]

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
