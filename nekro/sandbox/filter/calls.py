"""The system calls that sandboxed code may make, by name, and their numbers per architecture.

All others fail with ENOSYS. The lists come from traces: ``scripts/seen-syscalls`` traces CPython with
asyncio, threads, multiprocessing, subprocess, sqlite3 and ssl, and numpy, pandas, matplotlib and Pillow, and
prints every call that is missing here. Each call is listed with its older and newer forms (``stat`` and
``statx``), because the C library's version decides which of them is used. A call that an architecture does
not have is absent; a test compares the numbers with the C headers where those are installed.

Source: the kernel's ``arch/x86/entry/syscalls/syscall_64.tbl`` and ``include/uapi/asm-generic/unistd.h``
(aarch64).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

__all__ = [
    "ALLOWED",
    "FORK_SERVER",
    "NUMBERS",
    "OWN_PROCESS_ONLY",
    "PROGRAMS",
    "REFUSED",
    "UNSUPPORTED",
    "WHOLE_USERS",
]

_FILES: Final = (
    # Open, read, write.
    "open", "openat", "creat", "close", "close_range", "read", "write", "readv", "writev", "pread64",
    "pwrite64", "preadv", "pwritev", "preadv2", "pwritev2", "lseek", "sendfile", "copy_file_range",
    "ftruncate", "truncate", "fallocate", "fadvise64", "fsync", "fdatasync",
    # Descriptors; sqlite3 needs record locks by fcntl.
    "dup", "dup2", "dup3", "fcntl", "ioctl", "pipe", "pipe2", "memfd_create",
    # Metadata and directories.
    "stat", "fstat", "lstat", "newfstatat", "statx", "statfs", "fstatfs", "access", "faccessat", "faccessat2",
    "readlink", "readlinkat", "getdents", "getdents64", "getcwd", "chdir", "fchdir",
    "getxattr", "lgetxattr", "fgetxattr", "listxattr", "llistxattr", "flistxattr",
    # Names, modes, times.
    "mkdir", "mkdirat", "rmdir", "unlink", "unlinkat", "rename", "renameat", "renameat2", "link", "linkat",
    "symlink", "symlinkat", "umask", "chmod", "fchmod", "fchmodat", "fchmodat2", "chown", "fchown", "lchown",
    "fchownat", "utime", "utimes", "futimesat", "utimensat",
)  # fmt: skip

_MEMORY: Final = ("brk", "mmap", "munmap", "mremap", "mprotect", "madvise", "msync")

_PROCESSES: Final = (
    # Start and end.
    "clone", "fork", "vfork", "execve", "exit", "exit_group", "wait4", "waitid",
    # Set-up of a process or thread by the C library.
    "arch_prctl", "prctl", "set_tid_address", "set_robust_list", "rseq", "restart_syscall", "futex",
    # Ids of processes, sessions and users.
    "getpid", "getppid", "gettid", "getpgid", "getpgrp", "setpgid", "getsid", "setsid", "getuid", "geteuid",
    "getgid", "getegid", "getresuid", "getresgid", "getgroups",
    # setpriv drops root with these after the filter has been loaded; from then on they have no effect.
    "setresuid", "setresgid", "setgroups", "capget", "capset",
    # Processors and limits.
    "sched_yield", "sched_getaffinity", "sched_setaffinity", "sched_getparam", "sched_getscheduler",
    "sched_get_priority_max", "sched_get_priority_min", "getcpu", "getpriority", "setpriority", "getrlimit",
    "setrlimit", "prlimit64", "getrusage", "times", "uname", "sysinfo",
)  # fmt: skip

_SIGNALS: Final = (
    "kill", "tgkill", "tkill", "rt_sigaction", "rt_sigprocmask", "rt_sigpending", "rt_sigreturn",
    "rt_sigsuspend", "rt_sigtimedwait", "sigaltstack", "signalfd", "signalfd4", "pause", "alarm", "getitimer",
    "setitimer",
)  # fmt: skip

_TIME: Final = (
    "time", "gettimeofday", "clock_gettime", "clock_getres", "clock_nanosleep", "nanosleep", "getrandom",
)  # fmt: skip

_WAITING: Final = (
    "poll", "ppoll", "select", "pselect6", "epoll_create", "epoll_create1", "epoll_ctl", "epoll_wait",
    "epoll_pwait", "epoll_pwait2", "eventfd", "eventfd2", "timerfd_create", "timerfd_settime",
    "timerfd_gettime",
)  # fmt: skip

_SOCKETS: Final = (
    "socket", "socketpair", "bind", "listen", "accept", "accept4", "connect", "shutdown", "getsockname",
    "getpeername", "getsockopt", "setsockopt", "sendto", "recvfrom", "sendmsg", "recvmsg",
)  # fmt: skip

#: Allowed calls, some of them only with the arguments that ``nekro.sandbox.filter.seccomp`` names.
ALLOWED: Final = frozenset((*_FILES, *_MEMORY, *_PROCESSES, *_SIGNALS, *_TIME, *_WAITING, *_SOCKETS))

#: Fail with EPERM instead of ENOSYS: programs handle "not permitted" for these old Unix calls
#: (``mkfifo``, ``os.setuid``, ``mount``) but treat "no such call" as a fault.
REFUSED: Final = frozenset((
    "acct", "adjtimex", "chroot", "clock_adjtime", "clock_settime", "mknod", "mknodat", "mount",
    "pivot_root", "ptrace", "quotactl", "reboot", "sched_setattr", "sched_setparam", "sched_setscheduler",
    "setdomainname", "setfsgid", "setfsuid", "setgid", "sethostname", "setns", "setregid", "setreuid",
    "settimeofday", "setuid", "swapoff", "swapon", "syslog", "umount2", "unshare", "vhangup",
))  # fmt: skip

#: Fail with EOPNOTSUPP, as on a file system without extended attributes: ``shutil.copy2`` and tar then
#: continue without them. Extended attributes would hold data that no quota counts.
UNSUPPORTED: Final = frozenset((
    "setxattr", "lsetxattr", "fsetxattr", "removexattr", "lremovexattr", "fremovexattr",
))  # fmt: skip

#: Calls that take a process id and check only that its user is the same: where the host's processes are
#: visible, only the caller itself (0) is allowed. The call that also takes user ids is denied there.
OWN_PROCESS_ONLY: Final = ("prlimit64", "sched_setaffinity")
WHOLE_USERS: Final = ("setpriority",)

#: Additionally allowed for programs that an operator installed (MCP servers): locks of whole files, which
#: package managers need, names looked up over UDP, barriers between threads, and watching own files.
PROGRAMS: Final = (
    "flock", "sendmmsg", "recvmmsg", "membarrier", "inotify_init", "inotify_init1", "inotify_add_watch",
    "inotify_rm_watch",
)  # fmt: skip

#: Additionally allowed for the fork server, whose runs then get their own filter: making and entering
#: namespaces and mounts, descriptors of processes, and every option of a process.
FORK_SERVER: Final = (
    "unshare", "setns", "mount", "umount2", "open_tree", "move_mount", "mount_setattr", "pidfd_open", "prctl",
)  # fmt: skip


_X86_64: Final = {
    "read": 0, "write": 1, "open": 2, "close": 3, "stat": 4, "fstat": 5, "lstat": 6, "poll": 7,
    "lseek": 8, "mmap": 9, "mprotect": 10, "munmap": 11, "brk": 12, "rt_sigaction": 13,
    "rt_sigprocmask": 14, "rt_sigreturn": 15, "ioctl": 16, "pread64": 17, "pwrite64": 18, "readv": 19,
    "writev": 20, "access": 21, "pipe": 22, "select": 23, "sched_yield": 24, "mremap": 25, "msync": 26,
    "madvise": 28, "dup": 32, "dup2": 33, "pause": 34, "nanosleep": 35, "getitimer": 36, "alarm": 37,
    "setitimer": 38, "getpid": 39, "sendfile": 40, "socket": 41, "connect": 42, "accept": 43,
    "sendto": 44, "recvfrom": 45, "sendmsg": 46, "recvmsg": 47, "shutdown": 48, "bind": 49, "listen": 50,
    "getsockname": 51, "getpeername": 52, "socketpair": 53, "setsockopt": 54, "getsockopt": 55,
    "clone": 56, "fork": 57, "vfork": 58, "execve": 59, "exit": 60, "wait4": 61, "kill": 62, "uname": 63,
    "fcntl": 72, "flock": 73, "fsync": 74, "fdatasync": 75, "truncate": 76, "ftruncate": 77, "getdents": 78,
    "getcwd": 79, "chdir": 80, "fchdir": 81, "rename": 82, "mkdir": 83, "rmdir": 84, "creat": 85,
    "link": 86, "unlink": 87, "symlink": 88, "readlink": 89, "chmod": 90, "fchmod": 91, "chown": 92,
    "fchown": 93, "lchown": 94, "umask": 95, "gettimeofday": 96, "getrlimit": 97, "getrusage": 98,
    "sysinfo": 99, "times": 100, "ptrace": 101, "getuid": 102, "syslog": 103, "getgid": 104,
    "setuid": 105, "setgid": 106, "geteuid": 107, "getegid": 108, "setpgid": 109, "getppid": 110,
    "getpgrp": 111, "setsid": 112, "setreuid": 113, "setregid": 114, "getgroups": 115, "setgroups": 116,
    "setresuid": 117, "getresuid": 118, "setresgid": 119, "getresgid": 120, "getpgid": 121,
    "setfsuid": 122, "setfsgid": 123, "getsid": 124, "capget": 125, "capset": 126, "rt_sigpending": 127,
    "rt_sigtimedwait": 128, "rt_sigsuspend": 130, "sigaltstack": 131, "utime": 132, "mknod": 133,
    "statfs": 137, "fstatfs": 138, "getpriority": 140, "setpriority": 141, "sched_setparam": 142,
    "sched_getparam": 143, "sched_setscheduler": 144, "sched_getscheduler": 145,
    "sched_get_priority_max": 146, "sched_get_priority_min": 147, "vhangup": 153, "pivot_root": 155,
    "prctl": 157, "arch_prctl": 158, "adjtimex": 159, "setrlimit": 160, "chroot": 161, "acct": 163,
    "settimeofday": 164, "mount": 165, "umount2": 166, "swapon": 167, "swapoff": 168, "reboot": 169,
    "sethostname": 170, "setdomainname": 171, "quotactl": 179, "gettid": 186, "setxattr": 188,
    "lsetxattr": 189, "fsetxattr": 190, "getxattr": 191, "lgetxattr": 192, "fgetxattr": 193,
    "listxattr": 194, "llistxattr": 195, "flistxattr": 196, "removexattr": 197, "lremovexattr": 198,
    "fremovexattr": 199, "tkill": 200, "time": 201, "futex": 202, "sched_setaffinity": 203,
    "sched_getaffinity": 204, "epoll_create": 213, "getdents64": 217, "set_tid_address": 218,
    "restart_syscall": 219, "fadvise64": 221, "clock_settime": 227, "clock_gettime": 228,
    "clock_getres": 229, "clock_nanosleep": 230, "exit_group": 231, "epoll_wait": 232, "epoll_ctl": 233,
    "tgkill": 234, "utimes": 235, "waitid": 247, "openat": 257, "mkdirat": 258, "mknodat": 259,
    "fchownat": 260, "futimesat": 261, "newfstatat": 262, "unlinkat": 263, "renameat": 264, "linkat": 265,
    "symlinkat": 266, "readlinkat": 267, "fchmodat": 268, "faccessat": 269, "pselect6": 270, "ppoll": 271,
    "unshare": 272, "set_robust_list": 273, "utimensat": 280, "epoll_pwait": 281, "signalfd": 282,
    "timerfd_create": 283, "eventfd": 284, "fallocate": 285, "timerfd_settime": 286,
    "timerfd_gettime": 287, "accept4": 288, "signalfd4": 289, "eventfd2": 290, "epoll_create1": 291,
    "dup3": 292, "pipe2": 293, "preadv": 295, "pwritev": 296, "prlimit64": 302, "clock_adjtime": 305,
    "setns": 308, "getcpu": 309, "sched_setattr": 314, "renameat2": 316, "getrandom": 318,
    "memfd_create": 319, "copy_file_range": 326, "preadv2": 327, "pwritev2": 328, "statx": 332,
    "rseq": 334, "close_range": 436, "faccessat2": 439, "epoll_pwait2": 441, "fchmodat2": 452,
    "inotify_init": 253, "inotify_add_watch": 254, "inotify_rm_watch": 255, "inotify_init1": 294,
    "recvmmsg": 299, "sendmmsg": 307, "membarrier": 324,
    "open_tree": 428, "move_mount": 429, "pidfd_open": 434, "mount_setattr": 442,
}  # fmt: skip

_AARCH64: Final = {
    "setxattr": 5, "lsetxattr": 6, "fsetxattr": 7, "getxattr": 8, "lgetxattr": 9, "fgetxattr": 10,
    "listxattr": 11, "llistxattr": 12, "flistxattr": 13, "removexattr": 14, "lremovexattr": 15,
    "fremovexattr": 16, "getcwd": 17, "eventfd2": 19, "epoll_create1": 20, "epoll_ctl": 21,
    "epoll_pwait": 22, "dup": 23, "dup3": 24, "fcntl": 25, "ioctl": 29, "mknodat": 33, "mkdirat": 34,
    "unlinkat": 35, "symlinkat": 36, "linkat": 37, "renameat": 38, "umount2": 39, "mount": 40,
    "pivot_root": 41, "statfs": 43, "fstatfs": 44, "truncate": 45, "ftruncate": 46, "fallocate": 47,
    "faccessat": 48, "chdir": 49, "fchdir": 50, "chroot": 51, "fchmod": 52, "fchmodat": 53,
    "fchownat": 54, "fchown": 55, "openat": 56, "close": 57, "vhangup": 58, "pipe2": 59, "quotactl": 60,
    "getdents64": 61, "lseek": 62, "read": 63, "write": 64, "readv": 65, "writev": 66, "pread64": 67,
    "pwrite64": 68, "preadv": 69, "pwritev": 70, "sendfile": 71, "pselect6": 72, "ppoll": 73,
    "signalfd4": 74, "readlinkat": 78, "newfstatat": 79, "fstat": 80, "fsync": 82, "fdatasync": 83,
    "timerfd_create": 85, "timerfd_settime": 86, "timerfd_gettime": 87, "utimensat": 88, "acct": 89,
    "capget": 90, "capset": 91, "exit": 93, "exit_group": 94, "waitid": 95, "set_tid_address": 96,
    "unshare": 97, "futex": 98, "set_robust_list": 99, "nanosleep": 101, "getitimer": 102,
    "setitimer": 103, "clock_settime": 112, "clock_gettime": 113, "clock_getres": 114,
    "clock_nanosleep": 115, "syslog": 116, "ptrace": 117, "sched_setparam": 118,
    "sched_setscheduler": 119, "sched_getscheduler": 120, "sched_getparam": 121, "sched_setaffinity": 122,
    "sched_getaffinity": 123, "sched_yield": 124, "sched_get_priority_max": 125,
    "sched_get_priority_min": 126, "restart_syscall": 128, "kill": 129, "tkill": 130, "tgkill": 131,
    "sigaltstack": 132, "rt_sigsuspend": 133, "rt_sigaction": 134, "rt_sigprocmask": 135,
    "rt_sigpending": 136, "rt_sigtimedwait": 137, "rt_sigreturn": 139, "setpriority": 140,
    "getpriority": 141, "reboot": 142, "setregid": 143, "setgid": 144, "setreuid": 145, "setuid": 146,
    "setresuid": 147, "getresuid": 148, "setresgid": 149, "getresgid": 150, "setfsuid": 151,
    "setfsgid": 152, "times": 153, "setpgid": 154, "getpgid": 155, "getsid": 156, "setsid": 157,
    "getgroups": 158, "setgroups": 159, "uname": 160, "sethostname": 161, "setdomainname": 162,
    "getrlimit": 163, "setrlimit": 164, "getrusage": 165, "umask": 166, "prctl": 167, "getcpu": 168,
    "gettimeofday": 169, "settimeofday": 170, "adjtimex": 171, "getpid": 172, "getppid": 173,
    "getuid": 174, "geteuid": 175, "getgid": 176, "getegid": 177, "gettid": 178, "sysinfo": 179,
    "socket": 198, "socketpair": 199, "bind": 200, "listen": 201, "accept": 202, "connect": 203,
    "getsockname": 204, "getpeername": 205, "sendto": 206, "recvfrom": 207, "setsockopt": 208,
    "getsockopt": 209, "shutdown": 210, "sendmsg": 211, "recvmsg": 212, "brk": 214, "munmap": 215,
    "mremap": 216, "clone": 220, "execve": 221, "mmap": 222, "fadvise64": 223, "swapon": 224,
    "swapoff": 225, "mprotect": 226, "msync": 227, "madvise": 233, "accept4": 242, "wait4": 260,
    "prlimit64": 261, "clock_adjtime": 266, "setns": 268, "sched_setattr": 274, "renameat2": 276,
    "getrandom": 278, "memfd_create": 279, "copy_file_range": 285, "preadv2": 286, "pwritev2": 287,
    "statx": 291, "rseq": 293, "close_range": 436, "faccessat2": 439, "epoll_pwait2": 441,
    "fchmodat2": 452,
    "inotify_init1": 26, "inotify_add_watch": 27, "inotify_rm_watch": 28, "flock": 32, "recvmmsg": 243,
    "sendmmsg": 269, "membarrier": 283,
    "open_tree": 428, "move_mount": 429, "pidfd_open": 434, "mount_setattr": 442,
}  # fmt: skip

#: Architecture, as ``platform.machine()`` names it, to call name to number.
NUMBERS: Final[Mapping[str, Mapping[str, int]]] = MappingProxyType(
    {"x86_64": MappingProxyType(_X86_64), "aarch64": MappingProxyType(_AARCH64)}
)
