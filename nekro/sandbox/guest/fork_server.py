"""Start runs by forking a process that has the interpreter and the packages loaded already.

Started by bubblewrap as ``python -I -S -u runner.py CONFIG``, with a socket to the host. Three kinds of
processes, none of which ever runs code of a model:

- The keeper, pid 1 of all. It starts templates, passes requests on, and reaps orphans.
- A template: a new interpreter that has imported the packages, and has one thread. It forks the process of
  each run and reports its exit.
- The first process of each run's process namespace, which reaps what is orphaned inside and does nothing
  else. Its end ends the run. The keeper forks it ahead, and it belongs to no chat until a run takes it.

A run's process makes its other namespaces and its mounts, attaches the chat's directories, gives up every
privilege, and continues as the runner does after its start. The keeper and the templates have privileges in a
user namespace only in which no user of the host is root, and see no file of a chat except, where the service
is an ordinary user, that user's own.
"""

from __future__ import annotations

import gc
import os
import sys
from _signal import (  # type: ignore[import-not-found]
    SIG_DFL,
    SIG_IGN,
    SIGCHLD,
    SIGINT,
    pause,
    set_wakeup_fd,
    signal,
)
from _socket import (
    AF_UNIX,
    CMSG_SPACE,
    MSG_CMSG_CLOEXEC,
    SCM_RIGHTS,
    SOCK_SEQPACKET,
    SOL_SOCKET,
    socket,
    socketpair,
)
from _struct import pack, unpack
from select import POLLIN, poll
from typing import TYPE_CHECKING

from nekro.sandbox.guest.channel import CHANNEL
from nekro.sandbox.guest.namespaces import (
    NEW_MOUNTS,
    NEW_PIDS,
    NEW_USER,
    NO_DEVICES,
    NO_EXEC,
    NO_SETUID,
    PR_SET_DEATH_SIGNAL,
    PR_SET_DUMPABLE,
    ROOM,
    attach_mount,
    clone_mount,
    cover_mount,
    enter_namespaces,
    give_up_privileges,
    hold_capabilities,
    make_private,
    make_readonly,
    mount_new,
    separate,
    set_capabilities,
    set_option,
    unmount,
)
from nekro.sandbox.guest.runner import confine, prepare, run_code, warm_up
from nekro.sandbox.guest.values import read_json

if TYPE_CHECKING:
    from typing import Any, NoReturn

#: Largest message, and most descriptors of one.
MESSAGE_BYTES, MOST_DESCRIPTORS = 1 << 16, 16
#: First processes that are forked before a run needs one.
MOST_SPARE = 2
#: Where the host's directories are, for a service that is an ordinary user.
AREAS = "/opt/sandbox/areas"
NOTHING_FILE, NOTHING_DIRECTORY = "/opt/sandbox/nothing", "/opt/sandbox/empty"
FAILED = 126


def send_message(link: socket, text: str, descriptors: list[int]) -> None:
    """Send a message and descriptors in one packet."""
    rights = [(SOL_SOCKET, SCM_RIGHTS, pack(f"{len(descriptors)}i", *descriptors))] if descriptors else []
    link.sendmsg([text.encode()], rights)


def receive_message(link: socket) -> tuple[str, list[int]]:
    """Receive what ``send_message`` sent; an empty text when the other end is closed."""
    # Closed in programs that start here: those of one run must not reach a new template.
    data, rights, _, _ = link.recvmsg(MESSAGE_BYTES, CMSG_SPACE(4 * MOST_DESCRIPTORS), MSG_CMSG_CLOEXEC)
    descriptors: list[int] = []
    for _, _, packed in rights:
        descriptors += unpack(f"{len(packed) // 4}i", packed)
    return data.decode(), descriptors


def close_all(descriptors: list[int]) -> None:
    """Close descriptors."""
    for descriptor in descriptors:
        os.close(descriptor)


def be_first(config: dict[str, Any]) -> NoReturn:
    """Serve as the first process of a run's process namespace."""
    try:
        os.closerange(3, 1 << 16)
        signal(SIGCHLD, SIG_IGN)  # the kernel reaps orphans
        set_capabilities(0)
        confine(bytes.fromhex(config["waiting_seccomp"]))
        while True:
            pause()
    except BaseException as exc:
        report_failure(exc)


def report_failure(exc: BaseException) -> NoReturn:
    """Print an error and end this process."""
    os.write(2, f"fork server: {type(exc).__name__}: {exc}\n".encode())
    os._exit(FAILED)


class Template:
    """The process that forks."""

    def __init__(self, config: dict[str, Any], link: socket, host: socket) -> None:
        self._config = config
        self._link = link
        self._host = host
        self._filter = bytes.fromhex(config["seccomp"])
        self._own_ids = os.open("/proc", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        #: Processes of runs by their descriptors.
        self._children: dict[int, int] = {}
        self._polled = poll()
        self._is_open = True

    def serve(self) -> NoReturn:
        """Import, then fork a process for each request until the keeper closes the link."""
        sys.dont_write_bytecode = True
        self._display, self._watch = prepare(self._config)
        for name in self._config["packages"]:
            try:  # noqa: SIM105 - contextlib is slow to import
                __import__(name)
            except ImportError:  # it is not installed
                pass
        warm_up()
        os.chdir("/app")
        # A run that collects garbage would copy the pages of all objects that exist now.
        gc.freeze()
        with open("/proc/self/statm", "rb") as file:
            self._base_bytes = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        self._polled.register(self._link.fileno(), POLLIN)
        self._link.send(b"ready")
        while self._is_open or self._children:
            for descriptor, _ in self._polled.poll():
                if descriptor == self._link.fileno():
                    self._take_request()
                else:
                    self._reap(descriptor)
        os._exit(0)

    def _take_request(self) -> None:
        text, descriptors = receive_message(self._link)
        if not text:
            self._is_open = False
            self._polled.unregister(self._link.fileno())
            return
        try:
            self._fork(read_json(text), descriptors)
        finally:
            close_all(descriptors)

    def _fork(self, request: dict[str, Any], descriptors: list[int]) -> None:
        if len(os.listdir("/proc/self/task")) != 1:
            raise RuntimeError("a template has more than one thread")
        first = descriptors[0]
        enter_namespaces(first, NEW_PIDS)
        child = os.fork()
        if child == 0:
            be_run(self, descriptors)
        process = os.pidfd_open(child)
        self._children[process] = child
        self._polled.register(process, POLLIN)
        send_message(self._host, f'{{"run": {request["run"]}}}', [process, first])

    def _reap(self, process: int) -> None:
        self._polled.unregister(process)
        child, status = os.waitpid(self._children.pop(process), 0)
        os.close(process)
        send_message(self._host, f'{{"ended": {child}, "status": {status}}}', [])

    def become_run(self, descriptors: list[int]) -> NoReturn:
        """Turn a fork of this process into the process of a run."""
        _, channel, output, *rest = descriptors
        os.dup2(output, 1)
        os.dup2(output, 2)
        self._link.detach()
        self._host.detach()
        # From the host and not from this process's parent, which must know nothing of one run in another.
        request = read_json(os.read(channel, MESSAGE_BYTES).decode())
        mounts, groups = rest[: request["mounts"]], rest[request["mounts"] :]
        for group in groups:
            os.write(group, b"0")
        os.setsid()
        separate(ROOM)
        self._mount_own()
        if not mounts:
            mounts = [
                clone_mount(f"{AREAS}/shared/{request['shared']}", writable=True),
                clone_mount(f"{AREAS}/uploads/{request['uploads']}", writable=False),
            ]
            unmount(f"{AREAS}/shared")
            unmount(f"{AREAS}/uploads")
        for mount, path in zip(mounts, ("/app/shared", "/app/uploads"), strict=True):
            attach_mount(mount, path)
        os.chdir("/app")
        give_up_privileges(request["uid"], self._own_ids)
        os.dup2(channel, CHANNEL)
        os.set_inheritable(CHANNEL, False)
        os.closerange(CHANNEL + 1, 1 << 16)
        confine(self._filter)
        run_code(self._display, self._watch, lingers=True, base_bytes=self._base_bytes)

    def _mount_own(self) -> None:
        """Mount what each run has of its own."""
        make_private()
        mount_new("proc", "/proc", flags=NO_SETUID | NO_DEVICES | NO_EXEC)
        for path in self._config["hidden_files"]:
            cover_mount(NOTHING_FILE, path)
        for path in self._config["hidden_directories"]:
            cover_mount(NOTHING_DIRECTORY, path)
        make_readonly("/proc", flags=NO_SETUID | NO_DEVICES | NO_EXEC)
        for path in ("/dev/shm", "/tmp"):  # noqa: S108 - paths inside
            mount_new("tmpfs", path, f"mode=1777,size={self._config['tmp_bytes']}")


def be_run(template: Template, descriptors: list[int]) -> NoReturn:
    """Turn a fork of a template into the process of a run."""
    try:
        template.become_run(descriptors)
    except BaseException as exc:
        report_failure(exc)


def be_template(host: socket, link: socket) -> NoReturn:
    """Serve as a template, in an interpreter of its own."""
    try:
        signal(SIGINT, SIG_DFL)
        Template(read_json(receive_message(link)[0]), link, host).serve()
    except BaseException as exc:
        report_failure(exc)


class Keeper:
    """The first process of the fork server."""

    def __init__(self, config: dict[str, Any], host: socket) -> None:
        self._config = config
        self._host = host
        os.set_inheritable(host.fileno(), False)
        self._own_pids = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
        #: Descriptors of the first processes of future runs.
        self._spare: list[int] = []
        #: Children that are no process of a run.
        self._own: set[int] = set()
        #: The template that forks now, and one that is starting: its pid and the socket to it.
        self._template: tuple[int, socket] | None = None
        self._starting: tuple[int, socket] | None = None
        self._forks = 0

    def serve(self) -> NoReturn:
        """Work until the host closes its end."""
        woken, wakes = socketpair()
        wakes.setblocking(False)
        signal(SIGCHLD, lambda *_: None)
        set_wakeup_fd(wakes.fileno(), warn_on_full_buffer=False)
        self._start_template()
        while True:
            polled = poll()
            for link in (self._host, woken, *((self._starting[1],) if self._starting else ())):
                polled.register(link.fileno(), POLLIN)
            ready = {descriptor for descriptor, _ in polled.poll()}
            if woken.fileno() in ready:
                woken.recv(1 << 10)
                self._reap()
            if self._starting is not None and self._starting[1].fileno() in ready:
                self._use_started(*self._starting)
            if self._host.fileno() in ready:
                self._pass_on()
            self._fork_first()

    def _start_template(self) -> None:
        ours, theirs = socketpair(AF_UNIX, SOCK_SEQPACKET)
        host = os.dup(self._host.fileno())
        for descriptor in (theirs.fileno(), host):
            os.set_inheritable(descriptor, True)
        # With the options of this process.
        command = [sys.executable, "-P", "-s", "-S", "-u", sys.argv[0], str(host), str(theirs.fileno())]
        pid = os.posix_spawn(sys.executable, command, os.environ)
        theirs.close()
        os.close(host)
        send_message(ours, self._config["template"], [])
        self._own.add(pid)
        self._starting = pid, ours

    def _use_started(self, pid: int, link: socket) -> None:
        self._starting = None
        if not link.recv(64):  # it has ended
            link.close()
            if self._template is None:
                os._exit(FAILED)
            self._forks = 0
            return
        if self._template is not None:
            self._template[1].close()
        self._template = pid, link
        self._forks = 0
        process = os.pidfd_open(pid)
        send_message(self._host, f'{{"template": {pid}}}', [process])
        os.close(process)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if self._template is not None and pid == self._template[0]:
                self._template[1].close()
                self._template = None
                send_message(self._host, '{"template": 0}', [])
                if self._starting is None:
                    self._start_template()
            if pid in self._own:
                self._own.discard(pid)
            else:  # the process of a run whose template has ended
                send_message(self._host, f'{{"ended": {pid}, "status": {status}}}', [])

    def _pass_on(self) -> None:
        text, descriptors = receive_message(self._host)
        if not text:
            self._end()
        try:
            if self._template is not None:
                self._fork_first(least=1)
                descriptors.insert(0, self._spare.pop(0))
                send_message(self._template[1], text, descriptors)
                self._forks += 1
                if self._forks == self._config["most_forks"] and self._starting is None:
                    self._start_template()
        except (BrokenPipeError, ConnectionResetError):
            pass  # the template has ended: the host sees no answer
        finally:
            close_all(descriptors)

    def _end(self) -> NoReturn:
        """End after the template, whose runs the host has ended; the kernel kills what is left."""
        if self._template is not None:
            self._template[1].close()
            os.waitpid(self._template[0], 0)
        os._exit(0)

    def _fork_first(self, *, least: int = MOST_SPARE) -> None:
        while len(self._spare) < least:
            separate(NEW_PIDS)
            child = os.fork()
            if child == 0:
                set_wakeup_fd(-1)
                be_first(self._config)
            enter_namespaces(self._own_pids, NEW_PIDS)
            self._spare.append(os.pidfd_open(child))
            self._own.add(child)


def leave_root(first: int, count: int, uid: int) -> None:
    """Enter a user namespace that has the users of the pool only, as one of them."""
    own_ids = os.open("/proc", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    pid = os.getpid()
    ready, begin = os.pipe()
    helper = os.fork()
    if helper == 0:
        # Stays outside: writing a map of many users takes privileges there.
        os.close(begin)
        os.read(ready, 1)
        for name in ("uid_map", "gid_map"):
            descriptor = os.open(f"{pid}/{name}", os.O_WRONLY, dir_fd=own_ids)
            os.write(descriptor, f"{first} {first} {count}".encode())
        os._exit(0)
    os.close(ready)
    separate(NEW_USER)
    os.close(begin)
    _, status = os.waitpid(helper, 0)
    if status:
        raise RuntimeError("the users of the pool could not be mapped")
    os.close(own_ids)
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def become_first() -> None:
    """Go on as the first process of a process namespace that belongs to this user namespace.

    From another one this process could not make namespaces repeatedly.
    """
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
    mount_new("proc", "/proc", flags=NO_SETUID | NO_DEVICES | NO_EXEC)


def be_keeper(host: socket) -> NoReturn:
    """Confine this process, and serve."""
    try:
        config: dict[str, Any] = read_json(receive_message(host)[0])
        # What bubblewrap has covered of its own one would prevent new ones in another user namespace.
        mount_new("proc", "/proc", flags=NO_SETUID | NO_DEVICES | NO_EXEC)
        if config["users"] is not None:
            leave_root(*config["users"])
            separate(NEW_MOUNTS | NEW_PIDS)
            become_first()
        set_option(PR_SET_DUMPABLE, 1)
        set_option(PR_SET_DEATH_SIGNAL, 9)
        hold_capabilities()
        # Also of the templates and of all runs, which get a narrower one.
        confine(bytes.fromhex(config["seccomp"]))
        Keeper(config, host).serve()
    except BaseException as exc:
        report_failure(exc)


def main_of_server() -> NoReturn:
    """Serve as the keeper, or as a template where there is a socket to a keeper.

    Configurations are messages, because a run sees the command line of its first process.
    """
    host, *links = [socket(fileno=int(word)) for word in sys.argv[1:]]
    if links:
        be_template(host, links[0])
    be_keeper(host)


if __name__ == "__main__":
    main_of_server()
