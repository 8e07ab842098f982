"""Merge the runner's modules into one file that is passed into a sandbox.

The packages of this project do not exist inside, and each module that Python has to find, read and
compile adds to every start. Where the interpreter inside has the version of this process, the file
is compiled here, once.
"""

from __future__ import annotations
import __future__

import ast
import importlib.util
import json
import marshal
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Final

__all__ = ["PROGRAM_INSIDE", "encode_config", "guest_program"]

#: Path of the file inside; also the file name in its tracebacks.
PROGRAM_INSIDE: Final = "/opt/sandbox/runner.py"
#: Each module imports only modules before it; paths are relative to the packages' directory.
_MODULES: Final = (
    "nekro/wire/tagged.py",
    "nekro/sandbox/guest/signatures.py",
    "nekro/sandbox/guest/values.py",
    "nekro/sandbox/guest/channel.py",
    "nekro/sandbox/guest/display.py",
    "nekro/sandbox/guest/tables.py",
    "nekro/sandbox/guest/kept.py",
    "nekro/sandbox/guest/working_directory.py",
    "nekro/sandbox/guest/runner.py",
)
_PACKAGES: Final = ("nekro.sandbox.guest", "nekro.wire")


@cache
def guest_program(version: tuple[int, int] | None) -> bytes:
    """Return the runner as one file: compiled if ``version`` is this process's version, else as source.

    Args:
        version: version of the interpreter inside; None when it is not known.
    """
    text = _merged()
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


def _merged() -> str:
    """Return all modules as one, without module docstrings and imports of each other.

    The text of the statements is kept: ``ast.unparse`` of CPython 3.12 and newer writes f-strings that older
    interpreters cannot parse.
    """
    directory = Path(__file__).parents[2]
    kept: list[str] = []
    for name in _MODULES:
        text = (directory / name).read_text("utf-8")
        lines = text.split("\n")
        for statement in ast.parse(text).body:
            if not _is_dropped(statement):
                decorators = getattr(statement, "decorator_list", ())
                first = min(node.lineno for node in (statement, *decorators))
                kept += lines[first - 1 : statement.end_lineno]
    return "\n".join(kept) + "\n"


def _is_dropped(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.ImportFrom):
        module = statement.module or ""
        # `typing` is slow to import and, with annotations as text, needed by type checkers only.
        return module in ("__future__", "typing") or module.startswith(_PACKAGES)
    if isinstance(statement, ast.If):
        return isinstance(statement.test, ast.Name) and statement.test.id == "TYPE_CHECKING"
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
