"""Check the disk and memory of a running sandbox periodically where the kernel does not bound them."""

from __future__ import annotations

from collections.abc import Callable

from broker_config.settings import SandboxSettings
from nekro.sandbox.driver import Sandbox
from nekro.sandbox.limits.guards import Guards
from nekro.sandbox.limits.holdings import hold_of_all, names_bytes, sockets_in_sockets, waiting_at
from nekro.sandbox.limits.processes import shared_out
from nekro.sandbox.limits.quota import Quota
from nekro.sandbox.models import Limit
from nekro_agent.durations import POLL_SECONDS

__all__ = ["disk_check", "memory_check", "watch"]


def watch(
    guards: Guards,
    sandbox: Sandbox,
    quota: Quota | None,
    settings: SandboxSettings,
    *,
    every_seconds: float = POLL_SECONDS,
) -> None:
    """Check a sandbox's disk and memory until the guards are closed.

    Args:
        quota: None where the kernel bounds the shared directory.
        every_seconds: least time between two checks; the default is for running code.
    """
    quotas = {} if quota is None else {"disk": quota}
    if sandbox.scratch_dir is not None:
        quotas["tmp"] = Quota.of_scratch(sandbox.scratch_dir, settings)
    for name, watched in quotas.items():
        check = disk_check(sandbox, watched, most_file_bytes=settings.max_file_bytes)
        # Half as often as memory: measuring a directory costs more than reading counters.
        guards.poll(name, check, every_seconds=max(every_seconds, 2 * POLL_SECONDS))
    if not sandbox.memory_bounded:
        guards.poll("memory", memory_check(sandbox, settings), every_seconds=every_seconds)


def memory_check(sandbox: Sandbox, settings: SandboxSettings) -> Callable[[], Limit | None]:
    """Return a check of the memory of all processes together; between two checks it may be exceeded."""

    def check() -> Limit | None:
        most_bytes = settings.memory_bytes - _kernel_bytes(sandbox)
        used_bytes = sandbox.usage().memory_bytes or 0
        # This counts shared pages once per process: cheap, and never too low.
        is_exceeded = used_bytes > most_bytes and shared_out(sandbox.processes()) > most_bytes
        return Limit.MEMORY if is_exceeded else None

    return check


def _kernel_bytes(sandbox: Sandbox) -> int:
    """Return the most kernel memory of the code: buffers of sockets and pipes, names in memory."""
    # Where /tmp is a directory of the host, its names are on disk and the disk check counts them.
    names = names_bytes(sandbox.processes()) if sandbox.scratch_dir is None else 0
    return hold_of_all(sandbox.processes, root=sandbox.spec.shared_dir).buffer_bytes() + names


def disk_check(sandbox: Sandbox, quota: Quota, *, most_file_bytes: int) -> Callable[[], Limit | None]:
    """Return a check of the disk space of the sandbox's files.

    Args:
        most_file_bytes: size assumed for a file whose size is not visible.
    """
    hidden: set[int] = set()

    def check() -> Limit | None:
        nonlocal hidden
        held = hold_of_all(sandbox.processes, root=quota.root)
        before, hidden = hidden, sockets_in_sockets(sandbox.processes(), held)
        if before & hidden:
            return Limit.DISK  # the files in flight in there cannot be counted
        used_bytes = held.disk_bytes(most_file_bytes=most_file_bytes)
        # The host's end of the channel is a socket too, and is not read at the maximum of calls in flight.
        used_bytes += waiting_at(sandbox.writer.get_extra_info("socket").fileno()) * most_file_bytes
        is_exceeded = quota.exceeded(unlinked=used_bytes, most_file_bytes=most_file_bytes)
        return Limit.DISK if is_exceeded else None

    return check
