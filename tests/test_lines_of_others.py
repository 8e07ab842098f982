"""Foreign text is split where its format says, never by ``str.splitlines``.

That method also splits at U+2028, U+0085, ``\\x0b``, ``\\x0c`` and ``\\x1c``-``\\x1e``, which the author of a
name, an error or a message can insert.
"""

from __future__ import annotations

import ast
from pathlib import Path

from test_layers import PACKAGES

ROOT = Path(__file__).parent.parent
#: Code that runs in or beside the product; new packages are included by themselves.
DIRECTORIES = (*PACKAGES, "benchmarks", "examples", "scripts")
#: First line of a script.
PYTHON = b"#!/usr/bin/env python3\n"
#: Where splitting at more characters than the format has is intended.
ALLOWED: dict[str, str] = {}
#: Text files that the host writes itself; everything else in ``nekro/sandbox`` is read as bytes.
READ_AS_TEXT = {
    "nekro/sandbox/interpreter.py": "our own source",
    "nekro/sandbox/packages/base.py": "the layer's record, which the host writes",
    "nekro/sandbox/packages/base_build.py": "our own source and lists; the pinned matplotlib's defaults",
    "nekro/sandbox/packages/builder.py": "our own source",
    "nekro/sandbox/packages/layers.py": "records of the service; RECORD of a wheel, by newline alone",
}


def python_files(directory: Path) -> list[Path]:
    """Modules, and scripts without a suffix, in order; at least one."""
    scripts = [path for path in directory.iterdir() if path.is_file() and not path.suffix]
    found = [*directory.rglob("*.py"), *(s for s in scripts if s.read_bytes().startswith(PYTHON))]
    assert found, f"{directory} has no Python file"
    return sorted(found)


def calls_of(name: str, packages: tuple[str, ...]) -> set[str]:
    """Files that use an attribute of that name, called or not."""
    found = set()
    for package in packages:
        for path in python_files(ROOT / package):
            text = path.read_text("utf-8")
            nodes = ast.walk(ast.parse(text)) if name in text else ()
            if any(isinstance(node, ast.Attribute) and node.attr == name for node in nodes):
                found.add(str(path.relative_to(ROOT)))
    return found


def test_no_text_is_split_by_splitlines() -> None:
    assert calls_of("splitlines", DIRECTORIES) - ALLOWED.keys() == set(), 'use split("\\n"), or proc_files'


def test_the_sandbox_reads_no_kernel_file_as_text() -> None:
    assert calls_of("read_text", ("nekro/sandbox",)) - READ_AS_TEXT.keys() == set(), (
        "use nekro.sandbox.limits.proc_files"
    )


def test_text_mode_is_not_used_on_proc() -> None:
    wrong = []
    for path in sorted((ROOT / "nekro" / "sandbox").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if not (
                isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "open"
            ):
                continue
            modes = [arg.value for arg in node.args[1:2] if isinstance(arg, ast.Constant)]
            if not modes or "b" not in str(modes[0]):
                wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert wrong == []
