"""Attempts that many tests check one by one, in groups of one sandbox each.

Every group is code for ``sandbox_lab.PREAMBLE``; tests fill in its ``{...}`` fields.
System call numbers are those of x86_64.
"""

from __future__ import annotations

import ast
from typing import Any

Attempts = dict[str, list[Any]]


def attempts_with(attempts: Attempts, prefix: str) -> Attempts:
    """The attempts whose label has this prefix; fails when there are none."""
    found = {label: outcome for label, outcome in attempts.items() if label.startswith(prefix + " ")}
    assert found
    return found


def assert_refused(attempts: Attempts, *, by: set[str] | None = None) -> None:
    """Check that every attempt failed, with one of these error numbers if given."""
    done = {label: outcome for label, outcome in attempts.items() if outcome[0] != "refused"}
    assert done == {}
    if by is not None:
        others = {label: outcome for label, outcome in attempts.items() if outcome[2] not in by}
        assert others == {}


def value_of(attempts: Attempts, label: str) -> Any:
    """The result of an attempt, which must have succeeded."""
    outcome = attempts[label]
    assert outcome[0] == "done", (label, outcome)
    return ast.literal_eval(outcome[1])


FILES = r"""
for path in ("/x", "/usr/x", "/usr/bin/python3", "/app/x", "/app/uploads/x", "/opt/sandbox/runner.py",
             "/opt/x", "/dev/x", "/etc/x", "/proc/x", "/lib/x"):
    attempt("F7 write " + path, lambda: open(path, "a").write("x"))
attempt("F7 chmod runner", lambda: os.chmod("/opt/sandbox/runner.py", 0o777))
attempt("F7 rename out of uploads", lambda: os.rename("/app/uploads/in.txt", "/app/shared/y"))
attempt("F7 remove from uploads", lambda: os.unlink("/app/uploads/in.txt"))
attempt("F7 link uploads into shared", lambda: os.link("/app/uploads/in.txt", "/app/shared/y"))
attempt("F7 link a system program into shared", lambda: os.link("/usr/bin/env", "/app/shared/y"))
attempt("F7 rename shared away", lambda: os.rename("/app/shared", "/app/other"))

def mode_of(path):
    return oct(stat.S_IMODE(os.stat(path).st_mode))
open("/app/shared/plain", "w").write("x")
for bits in (0o4755, 0o2755, 0o6777):
    attempt("F8 chmod %o" % bits, lambda: os.chmod("/app/shared/plain", bits))
    attempt("F8 fchmod %o" % bits, lambda: os.fchmod(os.open("/app/shared/plain", os.O_RDONLY), bits))
    attempt("F8 open %o" % bits, lambda: os.open("/app/shared/o%o" % bits, os.O_CREAT | os.O_WRONLY, bits))
    attempt("F8 fchmodat2 %o" % bits, lambda: syscall(452, -100, b"/app/shared/plain", bits, 0))
    attempt("F8 creat %o" % bits, lambda: syscall(85, b"/app/shared/c%o" % bits, bits))
    attempt("F8 tmpfile %o" % bits, lambda: os.open("/app/shared", os.O_TMPFILE | os.O_WRONLY, bits))
    attempt("F8 openat2 %o" % bits, lambda: syscall(437, -100, b"/app/shared/q", 0, 24))
os.mkdir("/app/shared/dir", 0o7777)
attempt("F8 mkdir has no set-id bits", lambda: os.stat("/app/shared/dir").st_mode & 0o6000)
attempt("F8 plain has no set-id bits", lambda: os.stat("/app/shared/plain").st_mode & 0o6000)

attempt("F9 mknod block", lambda: os.mknod("/app/shared/sda", 0o600 | stat.S_IFBLK, os.makedev(254, 0)))
attempt("F9 mknod char", lambda: os.mknod("/app/shared/mem", 0o600 | stat.S_IFCHR, os.makedev(1, 1)))
attempt("F9 mknod file with set-id", lambda: os.mknod("/app/shared/f", 0o6755 | stat.S_IFREG))
attempt("F9 mkfifo", lambda: os.mkfifo("/app/shared/fifo"))
attempt("F9 chown to root", lambda: os.chown("/app/shared/plain", 0, 0))
attempt("F9 chown to another", lambda: os.chown("/app/shared/plain", 12, 12))

for path in ("/etc/passwd", "/etc/shadow", "/root", "/home", "/var", "/mnt", "/srv", "/boot", "/sys", "/run",
             "/var/run/docker.sock", "/proc/1/root/etc/passwd", "/proc/self/cwd/../etc/passwd",
             "/app/uploads/../../etc/passwd", "{host_secret}", "{other_chat}"):
    attempt("F10 see " + path, lambda: os.listdir(path) if os.path.isdir(path) else open(path).read(100))
attempt("F10 what is at the top", lambda: sorted(os.listdir("/")))
attempt("F10 what is in app", lambda: sorted(os.listdir("/app")))
"""

NETWORK = r"""
def connect(family, address, kind=socket.SOCK_STREAM):
    with socket.socket(family, kind) as sock:
        sock.settimeout(2)
        sock.connect(address)
attempt("N1 loopback", lambda: connect(socket.AF_INET, ("127.0.0.1", {port})))
attempt("N1 loopback 6", lambda: connect(socket.AF_INET6, ("::1", {port})))
attempt("N1 private network", lambda: connect(socket.AF_INET, ("192.168.0.1", 80)))
attempt("N1 metadata service", lambda: connect(socket.AF_INET, ("169.254.169.254", 80)))
attempt("N1 datagram", lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
attempt("N1 raw", lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 1))
attempt("N1 names", lambda: socket.getaddrinfo("example.com", 80))
attempt("N2 unix socket by path", lambda: connect(socket.AF_UNIX, "{socket_path}"))
attempt("N3 abstract unix socket", lambda: connect(socket.AF_UNIX, "\0{abstract}"))
for name, family in (("AF_NETLINK", 16), ("AF_PACKET", 17), ("AF_VSOCK", 40), ("AF_ALG", 38),
                     ("AF_BLUETOOTH", 31), ("AF_CAN", 29), ("AF_TIPC", 30), ("AF_QIPCRTR", 42),
                     ("AF_RDS", 21), ("AF_KCM", 41),
                     ("AF_XDP", 44), ("AF_INET", 2), ("AF_INET6", 10), ("AF_KEY", 15)):
    attempt("N4 " + name, lambda: syscall(41, family, 1, 0))
    attempt("N4 pair " + name, lambda: syscall(53, family, 1, 0, 0))
attempt("N4 high bits of the family", lambda: syscall(41, (1 << 32) | 40, 1, 0))
for path in ("/var/run/docker.sock", "/run/docker.sock", "/run/containerd/containerd.sock"):
    attempt("N5 " + path, lambda: connect(socket.AF_UNIX, path))
attempt("N6 descriptors", lambda: sorted(int(fd) for fd in os.listdir("/proc/self/fd"))[:-1])
attempt("N6 descriptors of the first process", lambda: sorted(os.listdir("/proc/1/fd")))
attempt("N7 proxies", lambda: [name for name in os.environ if "proxy" in name.lower()])
def check_asyncio():
    import asyncio
    async def work():
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", "print(5)", stdout=-1)
        return (await process.communicate())[0]
    return asyncio.run(work())
attempt("N8 asyncio", check_asyncio)
def check_pair():
    left, right = socket.socketpair()
    left.send(b"x")
    return right.recv(1)
attempt("N8 socketpair", check_pair)
def check_pool():
    import multiprocessing
    with multiprocessing.Pool(2) as pool:
        return pool.map(abs, [-1, -2])
attempt("N8 multiprocessing", check_pool)
def check_threads():
    import threading
    values = []
    threads = [threading.Thread(target=values.append, args=(i,)) for i in range(8)]
    [thread.start() for thread in threads], [thread.join() for thread in threads]
    return sorted(values)
attempt("N8 threads", check_threads)
def check_sqlite():
    import sqlite3
    return sqlite3.connect("/app/shared/db.sqlite").execute("select 1").fetchall()
attempt("N8 sqlite", check_sqlite)
"""

KERNEL = r"""
NAMESPACES = dict(NEWNS=0x20000, NEWCGROUP=0x2000000, NEWUTS=0x4000000, NEWIPC=0x8000000, NEWUSER=0x10000000,
                  NEWPID=0x20000000, NEWNET=0x40000000)
for name, flag in NAMESPACES.items():
    attempt("K1 unshare " + name, lambda: syscall(272, flag))
    attempt("K1 clone " + name, lambda: syscall(56, flag | 17, 0, 0, 0, 0))
for name, number, arguments in (
    ("clone3", 435, (0, 0)), ("setns", 308, (0, 0)), ("mount", 165, (b"x", b"/tmp", b"tmpfs", 0, 0)),
    ("umount2", 166, (b"/proc", 0)), ("pivot_root", 155, (b"/app", b"/tmp")), ("chroot", 161, (b"/app",)),
    ("fsopen", 430, (b"tmpfs", 0)), ("fsmount", 432, (0, 0, 0)), ("open_tree", 428, (-100, b"/", 1)),
    ("move_mount", 429, (0, 0, 0, 0, 0)), ("mount_setattr", 442, (0, 0, 0, 0, 0)),
    ("statmount", 457, (0, 0, 0, 0)),
):
    attempt("K1 " + name, lambda: syscall(number, *arguments))
for name, number, arguments in (
    ("ptrace", 101, (16, 1, 0, 0)), ("process_vm_readv", 310, (1, 0, 0, 0, 0, 0)),
    ("process_vm_writev", 311, (1, 0, 0, 0, 0, 0)), ("pidfd_getfd", 438, (0, 0, 0)),
    ("kcmp", 312, (1, 1, 0, 0, 0)), ("process_madvise", 440, (0, 0, 0, 0, 0)),
):
    attempt("K2 " + name, lambda: syscall(number, *arguments))
for name, number, arguments in (
    ("bpf", 321, (0, 0, 0)), ("perf_event_open", 298, (0, 0, -1, -1, 0)), ("userfaultfd", 323, (0,)),
    ("io_uring_setup", 425, (8, 0)), ("io_setup", 206, (8, 0)), ("keyctl", 250, (0, -3, 0)),
    ("add_key", 248, (b"user", b"a", b"b", 1, -3)), ("request_key", 249, (b"user", b"a", b"b", 0)),
    ("personality", 135, (0xFFFFFFFF,)), ("kexec_load", 246, (0, 0, 0, 0)), ("init_module", 175, (0, 0, b"")),
    ("finit_module", 313, (0, b"", 0)), ("syslog", 103, (3, 0, 0)), ("open_by_handle_at", 304, (0, 0, 0)),
    ("name_to_handle_at", 303, (-100, b"/", 0, 0, 0)), ("quotactl", 179, (0, 0, 0, 0)),
    ("reboot", 169, (0, 0, 0, 0)), ("swapon", 167, (b"/x", 0)), ("acct", 163, (b"/x",)),
    ("settimeofday", 164, (0, 0)), ("iopl", 172, (3,)),
    ("modify_ldt", 154, (0, 0, 0)), ("mbind", 237, (0, 0, 0, 0, 0, 0)), ("vmsplice", 278, (0, 0, 0, 0)),
    ("fanotify_init", 300, (0, 0)), ("memfd_secret", 447, (0,)),
):
    attempt("K3 " + name, lambda: syscall(number, *arguments))
import fcntl
attempt("K4 TIOCSTI", lambda: fcntl.ioctl(0, 0x5412, b"x"))
attempt("K4 TIOCLINUX", lambda: fcntl.ioctl(0, 0x541C, b"x"))
attempt("K4 high bits of the request", lambda: syscall(16, 0, (1 << 32) | 0x5412, b"x"))
def in_child(action):
    pid = os.fork()
    if pid == 0:
        action()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
attempt("K5 x32 entry", lambda: in_child(lambda: syscall(0x40000000 | 39)))
def i386_entry():
    import mmap
    # mov eax, 20 (getpid of i386); int 0x80; ret
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    code = mmap.mmap(-1, 4096, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    code.write(b"\xb8\x14\x00\x00\x00\xcd\x80\xc3")
    ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))()
attempt("K5 i386 entry", lambda: in_child(i386_entry))
for path in ("/proc/sys/kernel/core_pattern", "/proc/sys/kernel/hostname", "/proc/sys/vm/overcommit_memory",
             "/proc/sysrq-trigger", "/proc/self/oom_score_adj", "/proc/1/oom_score_adj", "/proc/self/uid_map",
             "/proc/self/setgroups", "/proc/self/attr/current"):
    attempt("K6 write " + path, lambda: os.write(os.open(path, os.O_WRONLY), b"-900"))
attempt("K8 processes", lambda: sorted(int(n) for n in os.listdir("/proc") if n.isdigit()))
attempt("K8 kill the first process", lambda: [os.kill(1, s) for s in (9, 15, 19)])
attempt("K8 kill outside", lambda: os.kill({outside}, 0))
attempt("K9 environment", lambda: sorted(os.environ))
attempt("K9 environment of the first process", lambda: open("/proc/1/environ", "rb").read())
attempt("K9 command line of the first process", lambda: open("/proc/1/cmdline", "rb").read())
for name in ("cmdline", "kallsyms", "keys", "timer_list"):
    attempt("K9 /proc/" + name, lambda: open("/proc/" + name).read(100))
attempt("K9 kernel messages", lambda: open("/proc/kmsg", "rb").read(10))
def status():
    lines = open("/proc/self/status").read().splitlines()
    return {key: value.strip() for key, _, value in (line.partition(":") for line in lines)
            if key.startswith(("Cap", "NoNew", "Seccomp", "Groups"))}
attempt("K10 status", lambda: json.dumps(status()))
attempt("K10 become root", lambda: os.setuid(0))
attempt("K10 become root group", lambda: os.setgid(0))
attempt("K10 setgroups", lambda: os.setgroups([0]))
import resource
attempt("K10 raise a hard limit", lambda: resource.setrlimit(resource.RLIMIT_NPROC, (9999, 9999)))
"""

SURFACE = r"""
import fcntl, mmap, signal, struct
signal.signal(signal.SIGIO, signal.SIG_IGN)
def plain(action):
    try:
        return action()
    except OSError as exc:
        return errno.errorcode[exc.errno]

left, right = socket.socketpair()
attempt("N9 send", lambda: left.send(b"x", socket.MSG_OOB))
attempt("N9 sendto with the flag among others", lambda: left.send(b"x", socket.MSG_OOB | socket.MSG_NOSIGNAL))
attempt("N9 sendmsg", lambda: left.sendmsg([b"x"], [], socket.MSG_OOB))
attempt("N9 receive", lambda: right.recv(1, socket.MSG_OOB | socket.MSG_DONTWAIT))
attempt("N9 recvmsg", lambda: right.recvmsg(1, 0, socket.MSG_OOB | socket.MSG_DONTWAIT))
attempt("N9 high bits of the flags", lambda: syscall(44, left.fileno(), b"x", 1, (1 << 32) | 1, 0, 0))
allow_all = ctypes.create_string_buffer(struct.pack("HBBI", 6, 0, 0, 0x7FFF0000))
program = struct.pack("HxxxxxxP", 1, ctypes.addressof(allow_all))
attempt("N10 attach a filter", lambda: left.setsockopt(socket.SOL_SOCKET, 26, program))
attempt("N10 attach bpf", lambda: left.setsockopt(socket.SOL_SOCKET, 50, 3))
attempt("N10 zero copy", lambda: left.setsockopt(socket.SOL_SOCKET, 60, 1))
attempt("N10 out of band inline", lambda: left.setsockopt(socket.SOL_SOCKET, 10, 1))

directory = os.open("/usr/bin", os.O_RDONLY)
system = open("/usr/bin/env", "rb")
own = open("/app/shared/own", "w+b")
own.write(b"x" * 8192), own.flush()
attempt("K11 inotify", lambda: syscall(253))
attempt("K11 inotify with flags", lambda: syscall(294, 0))
attempt("K11 add a watch", lambda: syscall(254, 0, b"/usr/bin", 0x20))
attempt("K11 fanotify", lambda: syscall(300, 0, 0))
attempt("K11 fanotify mark", lambda: syscall(301, 0, 1, 2, -100, b"/usr/bin"))
attempt("K11 dnotify", lambda: fcntl.fcntl(directory, 1026, 1))
attempt("K13 lease of an own file", lambda: fcntl.fcntl(own, 1024, fcntl.F_WRLCK))
attempt("K13 lease of a file of the host", lambda: fcntl.fcntl(system, 1024, fcntl.F_RDLCK))
attempt("K13 see a lease", lambda: fcntl.fcntl(system, 1025))
attempt("K13 lock of an open file", lambda: fcntl.fcntl(system, 37, struct.pack("hhqqi4x", 0, 0, 0, 1, 0)))
attempt("K13 see one", lambda: fcntl.fcntl(system, 36, struct.pack("hhqqi4x", 1, 0, 0, 1, 0)))
attempt("K13 signals about a descriptor", lambda: fcntl.fcntl(left, 8, os.getpid()))
attempt("K13 flock", lambda: fcntl.flock(own, fcntl.LOCK_EX))
for number in (451, 453, *range(459, 600), 1000, 0x3FFFFFFF):
    attempt("K14 %d" % number, lambda: syscall(number, 0, 0, 0, 0, 0, 0))
for name, number in (("splice", 275), ("tee", 276), ("sync_file_range", 277), ("membarrier", 324),
                     ("sync", 162), ("syncfs", 306), ("readahead", 187), ("mlock", 149),
                     ("get_robust_list", 274), ("io_uring_enter", 426), ("io_uring_register", 427),
                     ("io_pgetevents", 333)):
    attempt("K14 " + name, lambda: syscall(number, 0, 0, 0, 0, 0, 0))
attempt("K15 pidfd_open", lambda: syscall(434, 1, 0))
attempt("K15 pidfd_send_signal", lambda: syscall(424, 0, 0, 0, 0))
attempt("K15 process_mrelease", lambda: syscall(448, 0, 0))
attempt("K15 landlock", lambda: syscall(444, 0, 0, 1))
attempt("K15 seccomp", lambda: syscall(317, 2, 0, 0))
attempt("K15 a filter on top", lambda: syscall(157, 22, 2, program))
attempt("K15 listener of a filter", lambda: syscall(317, 1, 8, program))
pages = mmap.mmap(system.fileno(), 4096, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
attempt("K16 mincore", lambda: syscall(27, 0, 4096, 0))
attempt("K16 cachestat", lambda: syscall(451, system.fileno(), 0, 0, 0))
attempt("K16 read what is cached only", lambda: os.preadv(system.fileno(), [bytearray(1)], 0, 8))
attempt("K16 page out", lambda: pages.madvise(21))
attempt("K16 merge with others' pages", lambda: mmap.mmap(-1, 4096, mmap.MAP_PRIVATE).madvise(12))
attempt("K16 drop a file's pages", lambda: os.posix_fadvise(system.fileno(), 0, 0, os.POSIX_FADV_DONTNEED))
attempt("K17 memory file", lambda: os.memfd_create("x", 4))
attempt("K17 memory file of a size", lambda: os.memfd_create("x", 4 | (21 << 26)))
attempt("K17 mapping", lambda: mmap.mmap(-1, 2 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x40000))
attempt("K17 shared memory", lambda: syscall(29, 0, 2 << 20, 0o4000 | 0o1600))
attempt("K17 ordinary pages", lambda: len(mmap.mmap(-1, 4096, flags=mmap.MAP_PRIVATE)))
for name, request, target in (("flags of a file", 0x80086601, own), ("set flags of a file", 0x40086602, own),
                              ("extents of a file", 0xC020660B, own),
                              ("generation of a file", 0x80087601, own),
                              ("interfaces", 0x8912, left), ("address of an interface", 0x8915, left),
                              ("mark of out of band data", 0x8905, left), ("clone a file", 0x40049409, own)):
    attempt("K18 " + name, lambda: fcntl.ioctl(target, request, bytes(128)))
attempt("K18 size of the terminal", lambda: plain(lambda: os.get_terminal_size(0)))
for name, number, arguments in (
    ("message queue", 240, (b"x", 0o102, 0o600, 0)), ("timer", 222, (0, 0, 0)),
    ("semaphore", 64, (0, 1, 0o1600)),
    ("shared memory", 29, (0, 4096, 0o1600)), ("message of System V", 68, (0, 0o1600)),
    ("futex with priorities", 202, (0, 6, 0, 0, 0, 0)), ("futex of several", 449, (0, 0, 0, 0, 0)),
    ("protection key", 330, (0, 0)), ("sigqueue", 129, (1, 0, 0)), ("priority of input", 251, (1, 0, 0)),
    ("execveat", 322, (-100, b"/none", 0, 0, 0)), ("secret memory", 447, (0,)),
):
    attempt("K19 " + name, lambda: syscall(number, *arguments))
attempt("K20 hide from the service", lambda: syscall(157, 4, 0, 0, 0, 0))
attempt("K20 name a mapping", lambda: syscall(157, 0x53564D41, 0, 0, 0, b"x"))
attempt("K20 move the command line", lambda: syscall(157, 35, 8, 0, 0, 0))
attempt("K20 become the reaper", lambda: syscall(157, 36, 1, 0, 0, 0))
def readable(path):
    try:
        return bool(os.listdir(path)) if os.path.isdir(path) else open(path, "rb").read(1) is not None
    except OSError:
        return False
entries = [name for name in os.listdir("/proc") if not name.isdigit()]
attempt("K21 readable", lambda: [name for name in entries if readable("/proc/" + name)])
for name in ("config.gz", "diskstats", "pressure/cpu", "interrupts", "vmstat", "locks"):
    attempt("K21 read " + name, lambda: open("/proc/" + name, "rb").read(1))
for name in ("fs/file-nr", "fs/inode-nr", "fs/dentry-state", "kernel/random/boot_id"):
    attempt("K21 setting " + name, lambda: open("/proc/sys/" + name).read())
attempt("K22 set", lambda: os.setxattr("/app/shared/own", "user.x", b"x" * 2000))
attempt("K22 set by descriptor", lambda: os.setxattr(own.fileno(), "user.x", b"x"))
attempt("K22 set on a link", lambda: os.setxattr("/app/shared/own", "user.x", b"x", follow_symlinks=False))
attempt("K22 remove", lambda: os.removexattr("/app/shared/own", "user.x"))
"""
