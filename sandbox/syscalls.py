"""System call numbers that the seccomp filter names, per architecture.

Source: the kernel's ``arch/x86/entry/syscalls/syscall_64.tbl`` and
``include/uapi/asm-generic/unistd.h`` (aarch64). A test compares them with the C headers
where those are installed. A call that an architecture does not have is absent.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

__all__ = ["DENIED", "NUMBERS", "OWN_PROCESS_ONLY", "WHOLE_USERS"]

#: Calls that no sandboxed code needs and that reach far into the kernel; answered with EPERM.
DENIED: Final = (
    "_sysctl",
    "acct",
    "add_key",
    "adjtimex",
    "bpf",
    "chroot",
    "clock_adjtime",
    "clock_settime",
    "create_module",
    "delete_module",
    "fanotify_init",
    "finit_module",
    "fsconfig",
    "fsmount",
    "fsopen",
    "fspick",
    "get_kernel_syms",
    "get_mempolicy",
    "init_module",
    "io_cancel",
    "io_destroy",
    "io_getevents",
    "io_setup",
    "io_submit",
    "io_uring_enter",
    "io_uring_register",
    "io_uring_setup",
    "ioperm",
    "iopl",
    "kcmp",
    "kexec_file_load",
    "kexec_load",
    "keyctl",
    "listmount",
    "lookup_dcookie",
    "mbind",
    "memfd_secret",
    "migrate_pages",
    "mknod",
    "mknodat",
    "modify_ldt",
    "mount",
    "mount_setattr",
    "move_mount",
    "move_pages",
    "msgget",
    "name_to_handle_at",
    "nfsservctl",
    "open_by_handle_at",
    "open_tree",
    "open_tree_attr",
    "perf_event_open",
    "personality",
    "pidfd_getfd",
    "pivot_root",
    "process_madvise",
    "process_vm_readv",
    "process_vm_writev",
    "ptrace",
    "query_module",
    "quotactl",
    "quotactl_fd",
    "reboot",
    "remap_file_pages",
    "request_key",
    "semget",
    "set_mempolicy",
    "set_mempolicy_home_node",
    "setdomainname",
    "sethostname",
    "setns",
    "settimeofday",
    "shmget",
    "statmount",
    "swapoff",
    "swapon",
    "sysfs",
    "syslog",
    "umount2",
    "unshare",
    "uselib",
    "userfaultfd",
    "ustat",
    "vhangup",
    "vmsplice",
)

#: Calls that name a process by its id and ask for its user only, not for more: where the host's
#: processes are not out of sight, only the caller itself (0) may be named. The two that also name
#: whole users are denied there.
OWN_PROCESS_ONLY: Final = (
    "prlimit64",
    "sched_setaffinity",
    "sched_setattr",
    "sched_setparam",
    "sched_setscheduler",
)
WHOLE_USERS: Final = ("ioprio_set", "setpriority")

#: Numbers from 424 on are the same on every architecture.
_COMMON: Final = {
    "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "open_tree": 428,
    "move_mount": 429, "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433, "clone3": 435,
    "openat2": 437, "pidfd_getfd": 438, "process_madvise": 440, "mount_setattr": 442, "quotactl_fd": 443,
    "memfd_secret": 447, "set_mempolicy_home_node": 450, "fchmodat2": 452, "statmount": 457,
    "listmount": 458, "open_tree_attr": 467,
}  # fmt: skip

_X86_64: Final = {
    "open": 2, "mmap": 9, "ioctl": 16, "shmget": 29, "socket": 41, "socketpair": 53, "clone": 56,
    "setsockopt": 54, "semget": 64, "msgget": 68, "creat": 85, "chmod": 90, "fchmod": 91, "ptrace": 101,
    "syslog": 103, "mknod": 133, "uselib": 134, "personality": 135, "ustat": 136, "sysfs": 139,
    "vhangup": 153, "modify_ldt": 154, "pivot_root": 155, "_sysctl": 156, "adjtimex": 159, "chroot": 161,
    "acct": 163, "settimeofday": 164, "mount": 165, "umount2": 166, "swapon": 167, "swapoff": 168,
    "reboot": 169, "sethostname": 170, "setdomainname": 171, "iopl": 172, "ioperm": 173, "create_module": 174,
    "init_module": 175, "delete_module": 176, "get_kernel_syms": 177, "query_module": 178, "quotactl": 179,
    "nfsservctl": 180, "io_setup": 206, "io_destroy": 207, "io_getevents": 208, "io_submit": 209,
    "io_cancel": 210, "lookup_dcookie": 212, "remap_file_pages": 216, "clock_settime": 227, "mbind": 237,
    "set_mempolicy": 238, "get_mempolicy": 239, "kexec_load": 246, "add_key": 248, "request_key": 249,
    "keyctl": 250, "migrate_pages": 256, "openat": 257, "mknodat": 259, "fchmodat": 268, "unshare": 272,
    "vmsplice": 278, "move_pages": 279, "perf_event_open": 298, "fanotify_init": 300,
    "name_to_handle_at": 303, "open_by_handle_at": 304, "clock_adjtime": 305, "setns": 308,
    "process_vm_readv": 310, "process_vm_writev": 311, "kcmp": 312, "finit_module": 313,
    "memfd_create": 319, "kexec_file_load": 320, "bpf": 321, "userfaultfd": 323,
    "setpriority": 141, "sched_setparam": 142, "sched_setscheduler": 144, "sched_setaffinity": 203,
    "ioprio_set": 251, "prlimit64": 302, "sched_setattr": 314, "fcntl": 72,
}  # fmt: skip

_AARCH64: Final = {
    "io_setup": 0, "io_destroy": 1, "io_submit": 2, "io_cancel": 3, "io_getevents": 4,
    "lookup_dcookie": 18, "ioctl": 29, "mknodat": 33, "umount2": 39, "mount": 40, "pivot_root": 41,
    "nfsservctl": 42, "chroot": 51, "fchmod": 52, "fchmodat": 53, "openat": 56, "vhangup": 58,
    "quotactl": 60, "vmsplice": 75, "acct": 89, "personality": 92, "unshare": 97, "kexec_load": 104,
    "init_module": 105, "delete_module": 106, "clock_settime": 112, "syslog": 116, "ptrace": 117,
    "reboot": 142, "sethostname": 161, "setdomainname": 162, "settimeofday": 170, "adjtimex": 171,
    "msgget": 186, "semget": 190, "shmget": 194, "socket": 198, "socketpair": 199, "add_key": 217,
    "request_key": 218, "keyctl": 219, "clone": 220, "mmap": 222, "swapon": 224, "swapoff": 225,
    "remap_file_pages": 234, "mbind": 235, "get_mempolicy": 236, "set_mempolicy": 237,
    "migrate_pages": 238, "move_pages": 239, "perf_event_open": 241, "fanotify_init": 262,
    "name_to_handle_at": 264, "open_by_handle_at": 265, "clock_adjtime": 266, "setns": 268,
    "process_vm_readv": 270, "process_vm_writev": 271, "kcmp": 272, "finit_module": 273,
    "memfd_create": 279, "bpf": 280, "userfaultfd": 282, "kexec_file_load": 294,
    "ioprio_set": 30, "sched_setparam": 118, "sched_setscheduler": 119, "sched_setaffinity": 122,
    "setpriority": 140, "prlimit64": 261, "sched_setattr": 274, "fcntl": 25, "setsockopt": 208,
}  # fmt: skip

#: Architecture, as ``platform.machine()`` names it, to call name to number.
NUMBERS: Final[Mapping[str, Mapping[str, int]]] = MappingProxyType(
    {"x86_64": MappingProxyType(_X86_64 | _COMMON), "aarch64": MappingProxyType(_AARCH64 | _COMMON)}
)
