"""The system calls that sandboxed code may make, by name; all others fail with ENOSYS.

The lists come from traces: ``scripts/seen-syscalls`` traces CPython with asyncio, threads,
multiprocessing, subprocess, sqlite3 and ssl, and numpy, pandas, matplotlib and Pillow, and prints
every call that is missing here. Each call is listed with its older and newer forms (``stat`` and
``statx``), because the C library's version decides which of them is used.
"""

from __future__ import annotations

from typing import Final

__all__ = ["ALLOWED", "OWN_PROCESS_ONLY", "PROGRAMS", "REFUSED", "UNSUPPORTED", "WHOLE_USERS"]

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

#: Fail with EPERM instead of ENOSYS: old Unix calls for which programs handle "not permitted"
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
