"""Runs code in a real sandbox and returns the result; also as another user, in a subprocess.

As a program it reads requests as lines of JSON and prints the result of each as one; tests that run as root
use this for user mode.
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import traceback
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any
from uuid import uuid4

from broker_config.settings import SandboxSettings
from nekro.sandbox.driver import SandboxDriver, SandboxSpec
from nekro.sandbox.drivers.bwrap import BwrapDriver
from nekro.sandbox.drivers.fork_server import imports_packages
from nekro.sandbox.drivers.selection import build_driver
from nekro.sandbox.manager import SandboxManager
from nekro.sandbox.models import (
    ARGUMENT_ERROR,
    Raised,
    Returned,
    RunRequest,
    RunResult,
    Stopped,
    StopType,
    StubCall,
    StubMethod,
    StubResult,
)
from nekro.sandbox.packages.base import read_base
from nekro.sandbox.users import hold_user, sandbox_uid
from nekro.wire.values import decode_arguments, encode_value
from nekro_agent.methods import SandboxMethodType

REPOSITORY = Path(__file__).resolve().parents[2]
#: Any user except root and those of the pool.
OTHER_USER = 64123
SYSTEM_PYTHON = Path("/usr/bin/python3")
#: Longer than a passing run takes on the busiest machine.
ANSWER_SECONDS = 60

#: Defines ``attempt(label, action)``; ``EPILOGUE`` reports all attempts.
PREAMBLE = """
import ctypes, errno, json, os, socket, stat, sys
_attempts = {}
def attempt(label, action):
    try:
        value = action()
    except BaseException as exc:
        number = getattr(exc, "errno", None) or 0
        _attempts[label] = ["refused", type(exc).__name__, errno.errorcode.get(number)]
    else:
        _attempts[label] = ["done", repr(value)[:400], None]
_libc = ctypes.CDLL(None, use_errno=True)
def syscall(number, *arguments):
    ctypes.set_errno(0)
    words = [ctypes.c_char_p(a) if isinstance(a, bytes) else ctypes.c_long(a) for a in arguments]
    result = _libc.syscall(ctypes.c_long(number), *words)
    if result < 0:
        raise OSError(ctypes.get_errno(), "")
    return result
"""
EPILOGUE = "\nreport(json.dumps(_attempts))\n"


@dataclass(kw_only=True)
class Areas:
    """File areas below one directory."""

    root: Path

    @property
    def on_host(self) -> Areas:
        return self

    def for_run(
        self, chat_key: str, container_key: str, *, fence: int | None
    ) -> AbstractAsyncContextManager[None]:
        return nullcontext()

    def uploads_dir(self, chat_key: str) -> Path:
        return self._made("uploads", chat_key)

    def shared_dir(self, container_key: str) -> Path:
        return self._made("sandboxes", container_key)

    def plugin_dir(self, plugin_key: str) -> Path:
        return self._made("plugins", plugin_key)

    def _made(self, *parts: str) -> Path:
        path = self.root.joinpath(*parts)
        path.mkdir(parents=True, exist_ok=True)
        return path


def method(token: str, **changes: Any) -> StubMethod:
    """A granted method; its token is its name."""
    values: dict[str, Any] = {
        "token": token,
        "name": token,
        "path": f"alice.tools.{token}",
        "signature": "(*args, **kwargs)",
        "doc": f"Does {token}.",
        "type": SandboxMethodType.TOOL,
        "timeout_seconds": 30,
    }
    return StubMethod(**{**values, **changes})


Handler = Callable[..., Any]


@dataclass(kw_only=True)
class Lab:
    """A manager with scripted methods, and the recorded calls of them."""

    settings: SandboxSettings
    areas: Areas
    manager: SandboxManager
    name: str = field(default_factory=lambda: uuid4().hex)
    handlers: dict[str, Handler] = field(default_factory=dict)
    calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)
    reports: list[Any] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    _waited_for_packages: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.handlers |= {
            "echo": lambda *args, **kwargs: (args, kwargs),
            "report": self.reports.append,
            "agent": lambda *_: Stopped(stop=StopType.AGENT),
            "picture": lambda *_: Stopped(stop=StopType.MULTIMODAL_AGENT),
            "fail": lambda *_: Raised(error_type="ValueError", message="no good"),
            "misuse": lambda *_: Raised(error_type=ARGUMENT_ERROR, message="missing argument 'x'"),
        }

    async def run(self, code: str, *, chat_key: str = "chat", **changes: Any) -> RunResult:
        """Run code with every handler as a method."""
        values: dict[str, Any] = {
            "run_id": uuid4().hex,
            "chat_key": chat_key,
            "container_key": self.container(chat_key),
            "code": code,
            "methods": [method(name) for name in self.handlers],
            "dispatch": self.dispatch,
        }
        request = RunRequest(**{**values, **changes})
        if not self._waited_for_packages and imports_packages((request.code, *request.variables.values())):
            await self.wait_for_packages()
        return await self.manager.run(request)

    async def wait_for_packages(self) -> None:
        """Wait for the fork server of programs with packages, which takes a second to start."""
        await _wait_for_fork_server(self.manager, self.areas, with_packages=True)
        self._waited_for_packages = True

    async def attempts(self, code: str, **changes: Any) -> dict[str, list[str | None]]:
        """Run code that calls ``attempt``; returns its report."""
        result = await self.run(PREAMBLE + code + EPILOGUE, **changes)
        assert self.reports, f"nothing was reported: {result}"
        attempts: dict[str, list[str | None]] = json.loads(self.reports.pop())
        return attempts

    async def dispatch(self, call: StubCall) -> StubResult:
        """Answer by the handler of that name."""
        args, kwargs = decode_arguments(call.arguments, max_bytes=self.settings.argument_bytes)
        self.calls.append((call.token, args, kwargs))
        try:
            result = self.handlers[call.token](*args, **kwargs)
            if isinstance(result, Awaitable):
                result = await result
        except asyncio.CancelledError:
            self.cancelled.append(call.token)
            raise
        if isinstance(result, Returned | Raised | Stopped):
            return result
        return Returned(value=encode_value(result, max_bytes=1 << 30))

    def shared(self, chat_key: str = "chat") -> Path:
        return self.areas.shared_dir(self.container(chat_key))

    def container(self, chat_key: str = "chat") -> str:
        """Container key of a chat; unique per lab, so that concurrent tests share no user."""
        return container_of(self.name, chat_key)

    def user(self, chat_key: str = "chat") -> int:
        """Host user of a chat's code."""
        return (
            sandbox_uid(self.container(chat_key), settings=self.settings)
            if os.geteuid() == 0
            else os.geteuid()
        )


async def _wait_for_fork_server(manager: SandboxManager, areas: Areas, *, with_packages: bool) -> None:
    """Wait for a fork server, so that each test's runs are forked; where it does not work they are not."""
    driver = manager._driver
    if isinstance(driver, BwrapDriver) and driver.forks is not None:
        base = read_base(driver._settings)
        spec = SandboxSpec(
            shared_dir=areas.shared_dir("x"),
            uploads_dir=areas.uploads_dir("x"),
            uid=0,
            layers=() if base is None else (base.path,),
            preload=driver._settings.preload,
            imports_packages=with_packages,
        )
        server = driver.forks.of(spec)
        await server.ready(server.kind_of(spec))


@asynccontextmanager
async def lab(
    root: Path, *, use: SandboxDriver | None = None, name: str | None = None, **settings: Any
) -> Any:
    """Build a lab on a started manager and close it."""
    chosen = SandboxSettings(**settings)
    areas = Areas(root=root)
    # A driver of these settings without the proof, which has its own test.
    manager = SandboxManager(chosen, areas, driver=use or build_driver(chosen))
    await manager.start()
    await _wait_for_fork_server(manager, areas, with_packages=False)
    try:
        with nullcontext(name) if name else own_name(chosen) as own:
            yield Lab(settings=chosen, areas=areas, manager=manager, name=own)
    finally:
        await manager.close()


@contextmanager
def own_name(settings: SandboxSettings) -> Iterator[str]:
    """Find a name of a lab whose chat has a host user that no other sandbox has, and keep that user.

    Users follow from names, and one of 10,000 is the same by chance: a test that looks for processes of its
    user would then find those of another test.
    """
    while True:
        name = uuid4().hex
        key = container_of(name, "chat")
        with hold_user(key, settings=settings) as hold:
            if os.geteuid() != 0 or hold.uid == sandbox_uid(key, settings=settings):
                yield name
                return


def container_of(name: str, chat_key: str) -> str:
    return f"box-{name}-{chat_key}"


def host_processes(uid: int) -> list[int]:
    """Return the live processes of a user on the host; a zombie only waits to be reaped."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if entry.stat().st_uid == uid and ") Z " not in (entry / "stat").read_text():
                    found.append(int(entry.name))
            except (FileNotFoundError, ProcessLookupError):
                continue
    return found


async def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Execute one request: a run, or several attempts."""
    with tempfile.TemporaryDirectory(prefix="nekro-lab-") as root:
        os.chmod(root, 0o755)
        async with lab(Path(root), **request.get("settings", {})) as box:
            result = await box.run(request["code"], **request.get("run", {}))
            return {
                "stop": result.stop_type.name,
                "exit_code": result.exit_code,
                "limit": result.limit,
                "error": result.error,
                "output": result.output,
                "reports": box.reports,
            }


def other_user_command(*arguments: str, uid: int = OTHER_USER) -> list[str]:
    """Return the command that runs the system's Python as an ordinary user; root only."""
    setpriv = shutil.which("setpriv") or "setpriv"
    return [setpriv, f"--reuid={uid}", f"--regid={uid}", "--clear-groups", str(SYSTEM_PYTHON), *arguments]


def other_user_environment() -> dict[str, str]:
    """Return variables with which the system's Python finds this project and its packages."""
    return {
        "PATH": "/usr/bin:/bin",
        "PYTHONPATH": f"{REPOSITORY}:{sysconfig.get_paths()['purelib']}",
        "PYTHONDONTWRITEBYTECODE": "1",
    }


@functools.cache
def _lab_of(uid: int) -> subprocess.Popen[str]:
    """Start this program as an ordinary user: it has imported all when a request comes, and forks for it."""
    started = subprocess.Popen(
        other_user_command(str(Path(__file__).resolve()), uid=uid),
        env=other_user_environment(),
        cwd="/",
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )

    def end() -> None:
        started.kill()
        started.communicate()

    atexit.register(end)
    return started


def as_other_user(request: dict[str, Any], *, uid: int = OTHER_USER) -> dict[str, Any]:
    """Execute a request in a process of an ordinary user; root only."""
    started = _lab_of(uid)
    assert started.stdin is not None and started.stdout is not None
    print(json.dumps(request), file=started.stdin, flush=True)
    if not wait([started.stdout.fileno()], ANSWER_SECONDS):
        started.kill()
        _lab_of.cache_clear()
        raise AssertionError(f"no answer after {ANSWER_SECONDS} s")
    result: dict[str, Any] = json.loads(started.stdout.readline())
    assert "failed" not in result, result["failed"]
    return result


def _answer_in_a_fork(request: str) -> None:
    """Execute a request in a process of its own and print the result, or how it failed."""
    pid = os.fork()
    if pid == 0:
        try:
            result = asyncio.run(answer(json.loads(request)))
        except BaseException:
            result = {"failed": traceback.format_exc()}
        print(json.dumps(result), flush=True)
        os._exit(0)
    if status := os.waitpid(pid, 0)[1]:
        print(
            json.dumps({"failed": f"the process ended with {os.waitstatus_to_exitcode(status)}"}), flush=True
        )


if __name__ == "__main__":
    for line in sys.stdin:
        _answer_in_a_fork(line)
