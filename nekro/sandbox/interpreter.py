"""Select the Python that runs inside the sandbox, and make the program that it starts: the bundled runner.

By default it is the interpreter that this process's virtual environment was created from: its installation is
visible, its site-packages are hidden, the virtual environment does not exist inside. An interpreter that the
operator configures keeps its own packages, which is how sandboxed code gets numpy.

The packages of this project do not exist inside, and each module that Python has to find, read and compile
adds to every start. So the runner's modules are merged into one file. Where the interpreter inside has the
version of this process, the file is compiled here, once.
"""

from __future__ import annotations
import __future__

import ast
import importlib.util
import json
import marshal
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any, Final

from nekro_agent.durations import PROGRAM_SECONDS
from nekro_agent.errors import SandboxUnavailableError

__all__ = [
    "MINIMUM_VERSION",
    "OPTIONS",
    "PREFIX_INSIDE",
    "PROGRAM_INSIDE",
    "SITE_INSIDE",
    "Access",
    "Interpreter",
    "encode_config",
    "find_interpreter",
    "guest_program",
]

MINIMUM_VERSION = (3, 11)
#: Path inside of an installation outside ``/usr``.
PREFIX_INSIDE = PurePosixPath("/opt/python")
#: Parent inside of the numbered package directories of a configured interpreter.
SITE_INSIDE = PurePosixPath("/opt/site")
_FALLBACK = Path("/usr/bin/python3")

#: Run by the interpreter itself with `-I`, which ignores the environment; `-S` would hide site-packages.
_QUESTION = """
import json, sys, sysconfig
paths = sysconfig.get_paths()
print(json.dumps({
    "version": list(sys.version_info[:2]),
    "executable": getattr(sys, "_base_executable", None) or sys.executable,
    "prefix": sys.base_prefix,
    "in_venv": sys.prefix != sys.base_prefix,
    "site": [p for p in sys.path if p.endswith(("site-packages", "dist-packages"))],
}))
"""


class Access(Enum):
    """How the code's user accesses the interpreter."""

    #: The code's user is this process's own user.
    OWN = "own"
    #: Another user, for whom the installation is mounted at another path.
    BOUND = "bound"
    #: Another user, by the path on the host: every parent directory must be readable too.
    BY_PATH = "by_path"


@dataclass(frozen=True, kw_only=True)
class Interpreter:
    """A Python, on the host and as it appears inside."""

    executable: Path
    prefix: Path
    version: tuple[int, int]
    #: Package directories of the host that appear below ``SITE_INSIDE``, in ``sys.path`` order.
    site: tuple[Path, ...] = ()
    #: Package directories of the installation that are hidden by an empty mount.
    hidden: tuple[Path, ...] = ()
    #: Why the fallback interpreter was selected; empty when it was not.
    note: str = ""

    @property
    def description(self) -> str:
        """Path, version and note, for people."""
        version = ".".join(map(str, self.version))
        return f"{self.executable}, Python {version}{f' ({self.note})' if self.note else ''}"

    @property
    def in_usr(self) -> bool:
        """Whether it is below ``/usr``, which is visible anyway."""
        return self.prefix == Path("/usr") or Path("/usr") in self.prefix.parents

    def inside(self, path: Path) -> PurePosixPath:
        """Translate a path of the installation to the one inside."""
        return PurePosixPath(path) if self.in_usr else PREFIX_INSIDE / path.relative_to(self.prefix)

    @property
    def executable_inside(self) -> PurePosixPath:
        """Path of the interpreter inside."""
        return self.inside(self.executable)

    @property
    def site_inside(self) -> tuple[str, ...]:
        """Entries for ``sys.path`` inside."""
        return tuple(str(SITE_INSIDE / str(index)) for index in range(len(self.site)))

    @property
    def library_path_inside(self) -> PurePosixPath | None:
        """Directory of its shared library; None when it is linked into the executable or in ``/usr/lib``."""
        if self.prefix == Path("/usr") or not any(self.prefix.glob("lib/libpython3*.so*")):
            return None
        return self.inside(self.prefix / "lib")


def find_interpreter(named: Path | None, *, access: Access) -> Interpreter:
    """Select the interpreter for sandboxes.

    Args:
        named: the setting ``sandbox.python``; None selects the one that runs this process, or
            the system's when sandboxes cannot use that one.
        access: how the code's user accesses it.

    Raises:
        SandboxUnavailableError: it is missing, unreadable for the code's user or older than
            3.11; the message says what to set or install.
    """
    if named is not None:
        return _inspect(named, access=access, own_packages=True)
    default = Path(getattr(sys, "_base_executable", None) or sys.executable)
    try:
        return _inspect(default, access=access, own_packages=False)
    except SandboxUnavailableError as exc:
        if default.resolve() == _FALLBACK.resolve():
            raise
        refusal = exc
    try:
        found = _inspect(_FALLBACK, access=access, own_packages=False)
    except SandboxUnavailableError as exc:
        raise SandboxUnavailableError(f"{refusal}; and {exc}") from exc
    return Interpreter(**{**vars(found), "note": f"{refusal}; using {_FALLBACK} instead"})


def _inspect(path: Path, *, access: Access, own_packages: bool) -> Interpreter:
    answer = _ask(path)
    version = (int(answer["version"][0]), int(answer["version"][1]))
    if version < MINIMUM_VERSION:
        raise SandboxUnavailableError(
            f"{path} is Python {version[0]}.{version[1]}, the sandbox needs 3.11 or newer;"
            " set NEKRO_SANDBOX__PYTHON to another interpreter"
        )
    prefix = Path(os.path.realpath(answer["prefix"]))
    executable = Path(os.path.realpath(answer["executable"]))
    if prefix not in executable.parents:
        raise SandboxUnavailableError(
            f"{executable} lies outside its installation {prefix}; set NEKRO_SANDBOX__PYTHON to"
            " the interpreter of a self-contained installation"
        )
    if access is not Access.OWN:
        _check_readable(executable, Path("/") if access is Access.BY_PATH else prefix)
    site = [Path(entry) for entry in answer["site"] if Path(entry).is_dir()]
    of_installation = [*prefix.glob("lib/python3*/site-packages"), *prefix.glob("lib/python3*/dist-packages")]
    return Interpreter(
        executable=executable,
        prefix=prefix,
        version=version,
        site=tuple(site) if own_packages else (),
        hidden=tuple(path for path in of_installation if path.is_dir() and not path.is_symlink()),
    )


def _ask(path: Path) -> dict[str, Any]:
    # With -I: PYTHON* variables of this process must not change the answer of another interpreter.
    try:
        answer = subprocess.run(  # noqa: S603 - the configured or the default interpreter
            [path, "-I", "-c", _QUESTION],
            capture_output=True,
            text=True,
            timeout=PROGRAM_SECONDS,
            check=True,
            cwd="/",
        )
        parsed: dict[str, Any] = json.loads(answer.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as exc:
        raise SandboxUnavailableError(
            f"{path} cannot be used as the sandbox's Python ({type(exc).__name__}: {exc});"
            " set NEKRO_SANDBOX__PYTHON to an interpreter that this user can run"
        ) from exc
    return parsed


def _check_readable(executable: Path, top: Path) -> None:
    for path in (executable, *executable.parents):
        if path.stat().st_mode & 0o005 != 0o005:
            raise SandboxUnavailableError(
                f"{executable} cannot be used by the sandbox's user: {path} is not readable for others;"
                " run chmod o+rx, or set NEKRO_SANDBOX__PYTHON to an interpreter that all users can read"
            )
        if path == top:
            return


#: Options of the interpreter inside: as ``-I``, except that it reads its environment, for PYTHONHASHSEED. The
#: drivers make the environment.
OPTIONS: Final = ("-P", "-s")
#: Path of the file inside; also the file name in its tracebacks.
PROGRAM_INSIDE: Final = "/opt/sandbox/runner.py"
#: Each module imports only modules before it; paths are relative to the packages' directory.
_MODULES: Final = (
    "nekro/wire/tagged.py",
    "nekro/sandbox/guest/values.py",
    "nekro/sandbox/guest/channel.py",
    "nekro/sandbox/guest/readings.py",
    "nekro/sandbox/guest/randomness.py",
    "nekro/sandbox/guest/listings.py",
    "nekro/sandbox/guest/originals.py",
    "nekro/sandbox/guest/undo_log.py",
    "nekro/sandbox/guest/display.py",
    "nekro/sandbox/guest/variables.py",
    "nekro/sandbox/guest/working_directory.py",
    "nekro/sandbox/guest/runner.py",
)
#: What the fork server has besides.
_FORK_MODULES: Final = ("nekro/sandbox/guest/namespaces.py", "nekro/sandbox/guest/fork_server.py")
_PACKAGES: Final = ("nekro.sandbox.guest", "nekro.wire")


@cache
def guest_program(version: tuple[int, int] | None, *, forks: bool = False) -> bytes:
    """Return the runner as one file: compiled if ``version`` is this process's version, else as source.

    Args:
        version: version of the interpreter inside; None when it is not known.
        forks: return the fork server instead, which includes the runner.
    """
    text = _merged((*_MODULES, *_FORK_MODULES) if forks else _MODULES)
    if version != sys.version_info[:2] or sys.implementation.name != "cpython":
        return f"from __future__ import annotations\n{text}".encode()
    # As a flag: the statement would import the module `__future__` at each start.
    flags = __future__.annotations.compiler_flag
    code = compile(text, PROGRAM_INSIDE, "exec", flags=flags, dont_inherit=True, optimize=0)
    # The layout of a .pyc (PEP 552): magic number, then no flags, no time, no size.
    return importlib.util.MAGIC_NUMBER + bytes(12) + marshal.dumps(code)


def encode_config(config: Mapping[str, object]) -> str:
    """Encode the runner's one argument as JSON; bytes become hexadecimal digits."""
    return json.dumps(dict(config), default=bytes.hex)


def _merged(modules: Sequence[str]) -> str:
    """Return modules as one, without module docstrings and imports of each other.

    The text of the statements is kept: ``ast.unparse`` of CPython 3.12 and newer writes f-strings that older
    interpreters cannot parse.
    """
    directory = Path(__file__).parents[2]
    kept: list[str] = []
    for name in modules:
        text = (directory / name).read_text("utf-8")
        lines = text.split("\n")
        for statement in ast.parse(text).body:
            if not _is_dropped(statement, is_last=name == modules[-1]):
                decorators = getattr(statement, "decorator_list", ())
                first = min(node.lineno for node in (statement, *decorators))
                kept += lines[first - 1 : statement.end_lineno]
    return "\n".join(kept) + "\n"


def _is_dropped(statement: ast.stmt, *, is_last: bool) -> bool:
    if isinstance(statement, ast.ImportFrom):
        module = statement.module or ""
        # `typing` is slow to import and, with annotations as text, needed by type checkers only.
        return module in ("__future__", "typing") or module.startswith(_PACKAGES)
    if isinstance(statement, ast.If):
        if isinstance(statement.test, ast.Compare):  # the main program
            return not is_last
        return isinstance(statement.test, ast.Name) and statement.test.id == "TYPE_CHECKING"
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
