"""System calls that make and enter namespaces, attach mounts and give up privileges, for the fork server.

Source: namespaces(7), setns(2), mount(2), open_tree(2), move_mount(2), mount_setattr(2), user_namespaces(7),
capabilities(7), seccomp(2).
"""

from __future__ import annotations

import ctypes
import os
from _struct import pack

__all__ = [
    "NEW_MOUNTS",
    "NEW_PIDS",
    "NEW_USER",
    "NO_DEVICES",
    "NO_EXEC",
    "NO_SETUID",
    "PR_SET_DEATH_SIGNAL",
    "PR_SET_DUMPABLE",
    "ROOM",
    "attach_mount",
    "clone_mount",
    "cover_mount",
    "enter_namespaces",
    "give_up_privileges",
    "hold_capabilities",
    "make_private",
    "make_readonly",
    "mount_new",
    "separate",
    "set_capabilities",
    "set_option",
    "unmount",
]

NEW_MOUNTS, NEW_CGROUP, NEW_UTS, NEW_IPC = 0x00020000, 0x02000000, 0x04000000, 0x08000000
NEW_USER, NEW_PIDS, NEW_NETWORK = 0x10000000, 0x20000000, 0x40000000
#: The namespaces of a run besides that of its processes, which a process can only have from its start on.
ROOM = NEW_MOUNTS | NEW_CGROUP | NEW_UTS | NEW_IPC | NEW_NETWORK

READ_ONLY, NO_SETUID, NO_DEVICES, NO_EXEC, REMOUNT, BIND = 1, 2, 4, 8, 32, 4096
RECURSIVE, PRIVATE = 1 << 14, 1 << 18
DETACH = 2
#: Numbers that all architectures share.
SYS_OPEN_TREE, SYS_MOVE_MOUNT, SYS_MOUNT_SETATTR = 428, 429, 442
AT_FDCWD, AT_NO_FOLLOW, AT_EMPTY_PATH = -100, 0x100, 0x1000
OPEN_TREE_CLONE = 1
MOVE_FROM_EMPTY_PATH = 4

PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_DEATH_SIGNAL, PR_CAP_AMBIENT = 4, 24, 1, 47
AMBIENT_RAISE, AMBIENT_CLEAR = 2, 4
CAPABILITY_VERSION = 0x20080522
#: SETGID, SETUID, SYS_CHROOT, SYS_ADMIN: what making and entering a run's namespaces needs.
HELD = (6, 7, 18, 21)
#: More than any kernel has.
MOST_CAPABILITIES = 64

libc_of_server = ctypes.CDLL(None, use_errno=True)


def verify_call(result: int, what: str) -> int:
    """Raise when a C call failed: a run must not begin with less isolation."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def set_option(option: int, value: int = 0, third: int = 0) -> None:
    """Set an option of this process by prctl(2)."""
    verify_call(libc_of_server.prctl(option, value, third, 0, 0), f"prctl {option}")


def separate(kinds: int) -> None:
    """Enter new namespaces of these kinds."""
    verify_call(libc_of_server.unshare(kinds), f"unshare {kinds:#x}")


def enter_namespaces(descriptor: int, kinds: int) -> None:
    """Enter the namespaces of a process, given by a descriptor of it; of kind ``NEW_PIDS``: for children."""
    verify_call(libc_of_server.setns(descriptor, kinds), f"setns {kinds:#x}")


def mount_new(kind: str, path: str, options: str = "", flags: int = NO_SETUID | NO_DEVICES) -> None:
    """Mount a new file system."""
    text = options.encode() if options else None
    result = libc_of_server.mount(kind.encode(), path.encode(), kind.encode(), flags, text)
    verify_call(result, f"mount {kind} at {path}")


def cover_mount(source: str, path: str) -> None:
    """Hide a path behind another one."""
    result = libc_of_server.mount(source.encode(), path.encode(), None, BIND, None)
    verify_call(result, f"bind {source} at {path}")


def make_readonly(path: str, flags: int = NO_SETUID | NO_DEVICES) -> None:
    """Make a mount read-only."""
    result = libc_of_server.mount(None, path.encode(), None, REMOUNT | BIND | READ_ONLY | flags, None)
    verify_call(result, f"remount {path}")


def make_private() -> None:
    """Keep later mounts of other mount namespaces out of this one."""
    verify_call(libc_of_server.mount(b"none", b"/", None, RECURSIVE | PRIVATE, None), "private mounts")


def unmount(path: str) -> None:
    """Detach a mount."""
    verify_call(libc_of_server.umount2(path.encode(), DETACH), f"unmount {path}")


def clone_mount(path: str, *, writable: bool) -> int:
    """Return a descriptor of a mount of a directory that is attached nowhere yet.

    Args:
        path: its last part is not followed if it is a symbolic link.
    """
    flags = OPEN_TREE_CLONE | os.O_CLOEXEC | AT_NO_FOLLOW
    descriptor: int = libc_of_server.syscall(SYS_OPEN_TREE, AT_FDCWD, os.fsencode(path), flags)
    verify_call(descriptor, "open_tree")
    try:
        # struct mount_attr: what to set, what to clear, propagation, user namespace.
        attributes = pack("QQQQ", NO_SETUID | NO_DEVICES | (0 if writable else READ_ONLY), 0, PRIVATE, 0)
        result = libc_of_server.syscall(
            SYS_MOUNT_SETATTR, descriptor, b"", AT_EMPTY_PATH, attributes, ctypes.c_size_t(len(attributes))
        )
        verify_call(result, "mount_setattr")
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def attach_mount(descriptor: int, path: str) -> None:
    """Attach what ``clone_mount`` returned."""
    result = libc_of_server.syscall(
        SYS_MOVE_MOUNT, descriptor, b"", AT_FDCWD, path.encode(), MOVE_FROM_EMPTY_PATH
    )
    verify_call(result, f"move_mount to {path}")


def set_capabilities(mask: int) -> None:
    """Set the effective, permitted and inheritable capabilities."""
    words = mask & 0xFFFFFFFF, mask >> 32
    data = pack("IIIIII", words[0], words[0], words[0], words[1], words[1], words[1])
    verify_call(libc_of_server.capset(pack("Ii", CAPABILITY_VERSION, 0), data), "capset")


def hold_capabilities() -> None:
    """Keep only the capabilities that making runs needs, also in programs that this process starts."""
    set_capabilities(sum(1 << number for number in HELD))
    for number in HELD:
        set_option(PR_CAP_AMBIENT, AMBIENT_RAISE, number)


def give_up_privileges(uid: int, own_ids: int) -> None:
    """Become a user in a user namespace of its own, without capabilities.

    The namespace owns nothing: what was made before belongs to the one that is left. The kernel counts the
    processes of each such namespace separately.

    Args:
        own_ids: descriptor of a writable ``/proc`` in which this process is visible.
    """
    if uid != os.getuid():
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    set_option(PR_SET_DUMPABLE, 1)  # the change of user has cleared it; else root would own /proc/self
    separate(NEW_USER)
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{uid} {uid} 1")):
        descriptor = os.open(f"self/{name}", os.O_WRONLY, dir_fd=own_ids)
        os.write(descriptor, text.encode())
        os.close(descriptor)
    os.close(own_ids)
    for number in range(MOST_CAPABILITIES):
        if libc_of_server.prctl(PR_CAPBSET_DROP, number, 0, 0, 0) < 0:
            break
    set_option(PR_CAP_AMBIENT, AMBIENT_CLEAR)
    set_capabilities(0)
