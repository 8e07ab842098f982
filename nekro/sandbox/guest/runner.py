"""Run one piece of code inside a sandbox and send its calls to the bridge.

Started as ``python -I -S -u runner.py CONFIG`` with the bridge's socket as a descriptor.
``nekro.sandbox.interpreter`` merges this package's runner, channel, values and signatures, and
``nekro.wire.tagged``, into one file: the only part of this project that exists inside. It makes no decisions:
the host trusts neither its frames nor its exit status.

The process forks. The parent stays pid 1, reaps orphans and passes on the child's status; the child
runs the code. A pid 1 would ignore signals that it sends to itself, and a crash would look like a
normal end.

This file imports the C modules of the standard library (``_json``, ``_signal``, ``_thread``): their
Python modules import ``re`` and ``enum``, which would double the time of a start.
"""

from __future__ import annotations

import atexit
import builtins
import gc
import os
import resource
import sys
import time
from _json import encode_basestring_ascii
from _signal import SIGKILL, SIGUSR1, signal  # type: ignore[import-not-found]
from _struct import pack
from _thread import start_new_thread
from select import POLLRDHUP, poll
from typing import TYPE_CHECKING

from nekro.sandbox.guest.channel import (
    CHANNEL,
    CODE_NAME,
    EXIT,
    HELLO,
    KEEP_GRACE_SECONDS,
    RUN,
    ApprovalDeniedError,
    Channel,
    MethodError,
    RunStopped,
    Stub,
    unsignalled,
)
from nekro.sandbox.guest.display import Display, ImportWatch, extend_path
from nekro.sandbox.guest.listings import replace_listings
from nekro.sandbox.guest.randomness import RANDOMNESS
from nekro.sandbox.guest.readings import READINGS, replace_clocks, replace_datetime
from nekro.sandbox.guest.undo_log import UNDO_LOG
from nekro.sandbox.guest.values import read_json
from nekro.sandbox.guest.variables import Variables
from nekro.sandbox.guest.working_directory import OwnModules, WorkingDirectory

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType
    from typing import Any, NoReturn

PROTOCOL = 2
TRACEBACK_FRAMES = 20
EXIT_TEXT_CHARS = 4000
#: Time for the code's process to end by itself after the host has closed its end.
HOST_GONE_SECONDS = 0.5
PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, SECCOMP_MODE_FILTER = 22, 38, 2
#: Error numbers of operating system errors that indicate a limit.
LIMIT_ERRORS = {11: "pids", 12: "memory", 24: "open_files", 27: "file_size", 28: "disk", 122: "disk"}

Module = type(sys)
Namespace = type(sys.implementation)


def namespace_of(channel: Channel, run: dict[str, Any]) -> dict[str, Any]:
    """Build the globals that the code sees: bare names, ``author.module.function``, the sandbox's own."""
    own = {
        "_ck": run["chat_key"],
        "ApprovalDeniedError": ApprovalDeniedError,
        "MethodError": MethodError,
        "dynamic_importer": importer_of(channel),
    }
    names: dict[str, Any] = {}
    stubs = [(Stub(channel, spec), spec) for spec in run["stubs"]]
    for stub, spec in stubs:
        if spec["name"]:
            names[spec["name"]] = stub
    for stub, spec in stubs:
        author, module, function = spec["path"].split(".")
        # An author named `print` must not hide the built-in; a method of that name may.
        if author in own or (author not in names and hasattr(builtins, author)):
            continue
        home = names.setdefault(author, Namespace())
        # By `vars`, because every object has an attribute `__class__`, and a plugin may have that name.
        vars(vars(home).setdefault(module, Namespace()))[function] = stub
    return names | own


def importer_of(channel: Channel) -> Any:
    """Build ``dynamic_importer``, which requests a package from the host."""

    def dynamic_importer(package_spec: str, import_name: str | None = None, **ignored: Any) -> Any:
        """Import a package; a missing package is installed for the next run of this chat."""
        import importlib

        name = import_name or package_spec
        try:
            if all(part.isidentifier() for part in name.split(".")):
                return importlib.import_module(name)
        except (ImportError, AttributeError):
            pass
        answer = channel.call("host:dynamic_importer", (package_spec,), {})
        if not answer["ready"]:
            raise ImportError(
                f"{answer['name']} {answer['version']} has been installed and can be imported from the"
                " next run of code on; end this one"
            )
        return importlib.import_module(import_name or answer["modules"][0])

    return dynamic_importer


def keep_source(code: str) -> Any:
    """Return what adds the code's lines to ``linecache`` when that is imported, which most runs never do."""

    def fill(module: ModuleType) -> None:
        # Only at the line ends of the compiler.
        text = code.replace("\r\n", "\n").replace("\r", "\n")
        lines = [line + "\n" for line in text.split("\n")]
        module.__dict__["cache"][CODE_NAME] = (len(code), None, lines, CODE_NAME)

    return fill


def show_error(exc: BaseException, module: ModuleType) -> str:
    """Print the traceback without the runner's own frames; return its last line."""
    try:
        import traceback
    except Exception:
        # The code used up the descriptors or the memory that an import needs: release them.
        module.__dict__.clear()
        os.closerange(CHANNEL + 1, 1 << 16)
        import traceback

    report = traceback.TracebackException.from_exception(exc, limit=-TRACEBACK_FRAMES)
    own_file = show_error.__code__.co_filename
    seen: set[int] = set()
    pending: list[Any] = [report]
    while pending:
        part = pending.pop()
        if part is None or id(part) in seen:
            continue
        seen.add(id(part))
        part.stack[:] = [frame for frame in part.stack if frame.filename != own_file]
        pending += [part.__cause__, part.__context__, *(getattr(part, "exceptions", None) or ())]
    try:  # noqa: SIM105 - contextlib is slow to import
        print("".join(report.format()), end="", file=sys.stderr, flush=True)
    except Exception:  # noqa: S110 - the code may have closed or replaced stderr
        pass
    return "".join(report.format_exception_only()).strip()


def limit_of(exc: BaseException) -> str | None:
    """Return the limit that an error indicates, for display; None when it indicates none."""
    if isinstance(exc, MemoryError):
        return "memory"
    if isinstance(exc, RuntimeError) and "start new thread" in str(exc):
        return "pids"
    return LIMIT_ERRORS.get(exc.errno or 0) if isinstance(exc, OSError) else None


def exit_code_of(exc: SystemExit) -> int:
    """Translate ``exit(…)`` as the interpreter does: None is 0, a text goes to stderr and is 1."""
    if exc.code is None:
        return 0
    if isinstance(exc.code, int):
        return exc.code & 0xFF
    print(exc.code, file=sys.stderr, flush=True)
    return 1


def execute(
    code: str, module: ModuleType, channel: Channel, display: Display, leave: Callable[[], None]
) -> dict[str, Any]:
    """Run the code as ``__main__`` to its end, its threads and exit handlers included.

    Args:
        leave: called when no more code will run.
    """
    report: dict[str, Any] = {"code": 0, "error": None, "limit": None}
    try:
        exec(compile(code, CODE_NAME, "exec"), module.__dict__)  # noqa: S102 - the purpose of the sandbox
    except RunStopped:
        leave()
        channel.finish(0)
    except SystemExit as exc:
        report["code"] = exit_code_of(exc)
    except BaseException as exc:
        report.update(code=1, limit=limit_of(exc))
        report["error"] = show_error(exc, module)[:EXIT_TEXT_CHARS]
    try:
        # As at the end of any script: wait for non-daemon threads, then run exit handlers.
        if "threading" in sys.modules:
            sys.modules["threading"]._shutdown()
        if report["code"] == 0:
            display.show_figures()
        atexit._run_exitfuncs()
    except BaseException:
        leave()
        channel.finish(0)
    leave()
    return report


def encode_report(report: dict[str, Any]) -> bytes:
    """Write the EXIT frame's JSON by hand; ``json`` imports ``re``."""
    text = {
        key: "null" if report[key] is None else encode_basestring_ascii(report[key])
        for key in ("error", "limit")
    }
    text["readings"] = encode_basestring_ascii(READINGS.take().decode())
    pairs = [f'"{key}": {value}' for key, value in text.items()]
    return f'{{"code": {report["code"]}, {", ".join(pairs)}}}'.encode()


def set_limits(limits: dict[str, int]) -> None:
    """Lower this process's limits, the hard ones too, so that the code cannot raise them."""
    for name, value in limits.items():
        number = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(number)[1]
        bound = value if hard == resource.RLIM_INFINITY else min(value, hard)
        # One CPU second between the limits distinguishes an exhausted run (SIGXCPU) from a kill.
        resource.setrlimit(number, (bound, bound + 1 if name == "CPU" and bound == value else bound))


def warm_up() -> None:
    """Do slow first-time work before the code arrives: copy shared pages, initialise the compiler."""
    gc.collect()
    exec(compile("x = 1", CODE_NAME, "exec"), {})  # noqa: S102 - a constant


def interrupt(signum: int, frame: object) -> NoReturn:
    """Stop the main thread wherever it is."""
    raise RunStopped(0)


def prepare(config: dict[str, Any]) -> tuple[Display, ImportWatch]:
    """Do what does not depend on the run, and import what the configuration names."""
    display = Display(extend_path(config["path"]))
    # Before any package binds the originals by name.
    replace_clocks()
    replace_listings()
    RANDOMNESS.install()
    own = {"datetime": (None, replace_datetime), "sqlite3": (None, UNDO_LOG.watch_sqlite)}
    watch = ImportWatch({**display.actions(), **RANDOMNESS.actions(), **own})
    sys.meta_path.insert(0, watch)
    if "datetime" in sys.modules:
        replace_datetime(sys.modules["datetime"])
    for name in config["preload"]:
        try:
            __import__(name)
        except Exception as exc:
            print(f"preloading {name} failed: {type(exc).__name__}: {exc}", file=sys.stderr, flush=True)
    return display, watch


def run_code(display: Display, watch: ImportWatch, *, lingers: bool, base_bytes: int = 0) -> NoReturn:
    """Send HELLO, wait for RUN, run the code, send EXIT.

    Args:
        lingers: as in ``Channel``.
        base_bytes: address space that the limit does not count.
    """
    channel = Channel()
    channel.lingers = lingers
    signal(SIGUSR1, interrupt)
    channel.send(HELLO, f'{{"protocol": {PROTOCOL}, "python": "{sys.version.split()[0]}"}}'.encode())
    try:
        kind, _, payload = channel.receive()
    except EOFError:
        os._exit(0)
    if kind != RUN:
        os._exit(3)
    run = read_json(payload.decode())
    channel.argument_bytes = run["argument_bytes"]
    channel.take_readings = READINGS.take
    # `-S` skips the `site` module, which adds these.
    builtins.exit = builtins.quit = sys.exit  # type: ignore[assignment]
    module = Module("__main__")
    module.__dict__.update(namespace_of(channel, run), __builtins__=builtins)
    variables = Variables(run, module.__dict__, channel)
    if run["keep"]["bytes"]:
        channel.grace_seconds = KEEP_GRACE_SECONDS
    # From here on `__main__` is the code's module, also for pickle and multiprocessing.
    runner, sys.modules["__main__"] = sys.modules["__main__"], module
    sys.argv = [CODE_NAME]
    watch.actions["linecache"] = (None, keep_source(run["code"]))
    if "linecache" in sys.modules:  # by a preloaded module
        keep_source(run["code"])(sys.modules["linecache"])
    display.begin(run, module.__dict__)
    sys.dont_write_bytecode = True  # next to modules among the chat's files
    directory = WorkingDirectory()
    directory.enter("\n".join((run["code"], *run["variables"].values())))
    sys.meta_path.append(OwnModules(directory.path, module.__dict__))
    run["limits"]["AS"] += base_bytes
    set_limits(run["limits"])
    variables.restore()
    RANDOMNESS.begin(run["replay"]["seed"])
    READINGS.begin(run["replay"]["readings"])
    if run["replay"]["undo"] is not None:
        UNDO_LOG.on_give_up = READINGS.give_up
        channel.watch_files = UNDO_LOG.watch
        UNDO_LOG.begin(directory.path, **run["replay"]["undo"])

    report = execute(run["code"], module, channel, display, variables.send)
    del runner
    module.__dict__.clear()  # closes, and so flushes, files that the code left open

    unsignalled(end, channel, report)
    raise AssertionError("the process goes on after its end")


def end(channel: Channel, report: dict[str, Any]) -> NoReturn:
    """Send EXIT, but not from a fork that reached the end of the code, and end the process."""
    if os.getpid() == channel.owner:
        channel.send_last(EXIT, encode_report(report))
    channel.finish(report["code"])


def reap(child: int, *, has_socket: bool) -> NoReturn:
    """Stay pid 1 until the code's process has ended; its status becomes this process's status.

    Also ends, and so ends the code, when the host has ended.
    """
    start_new_thread(end_with_host, (has_socket,))
    if not has_socket:
        os.close(CHANNEL)
    while True:
        pid, status = os.wait()
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)


def end_with_host(has_socket: bool) -> NoReturn:
    """Exit when the host has closed its end of the socket, where this process connected it, or of stdout."""
    gone = poll()
    if has_socket:
        gone.register(CHANNEL, POLLRDHUP)
    else:
        gone.register(1, 0)
    gone.poll()
    time.sleep(HOST_GONE_SECONDS)
    os._exit(128 + SIGKILL)


def confine(program: bytes) -> None:
    """Load the seccomp filter where the driver could not load it."""
    import ctypes

    buffer = ctypes.create_string_buffer(program, len(program))
    filter_struct = pack("HxxxxxxP", len(program) // 8, ctypes.addressof(buffer))
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    if prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, filter_struct):
        raise OSError(ctypes.get_errno(), "the seccomp filter was refused")


def open_channel(config: dict[str, Any]) -> int:
    """Return the descriptor of the bridge's socket: inherited, or connected by its path."""
    if "fd" in config:
        return int(config["fd"])
    import socket

    connection = socket.socket(socket.AF_UNIX)
    connection.connect(config["socket"])
    return connection.detach()


def main() -> NoReturn:
    """Move the socket to descriptor 3, close every higher one, fork into reaper and runner."""
    config: dict[str, Any] = read_json(sys.argv[1])
    os.dup2(open_channel(config), CHANNEL)
    os.set_inheritable(CHANNEL, False)
    os.closerange(CHANNEL + 1, 1 << 16)
    if "seccomp" in config:
        confine(bytes.fromhex(config["seccomp"]))
    child = os.fork()
    if child:
        reap(child, has_socket="socket" in config)
    display, watch = prepare(config)
    warm_up()
    # Not in a container, whose output is complete only at its end.
    run_code(display, watch, lingers="fd" in config)


if __name__ == "__main__":
    main()
