"""Foreign text is split where its format says, never by ``str.splitlines``.

That method also splits at U+2028, U+0085, ``\\x0b``, ``\\x0c`` and ``\\x1c``-``\\x1e``, which the author of a
name, an error or a message can insert.
"""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = (
    "agent", "benchmarks", "broker_config", "cli", "codec", "gateway", "messaging", "nekro_agent",
    "nekro_client", "plugin_pkgs", "runtime", "sandbox", "scripts", "storage", "workers",
)  # fmt: skip
#: Where splitting at more characters than the format has is intended.
ALLOWED: dict[str, str] = {}
#: Text files that the host writes itself; everything else in ``sandbox`` is read as bytes.
READ_AS_TEXT = {
    "sandbox/bundle.py": "our own source",
    "sandbox/packages/base.py": "the layer's record, which the host writes",
    "sandbox/packages/base_build.py": "our own source and lists; the pinned matplotlib's defaults",
    "sandbox/packages/builder.py": "our own source",
    "sandbox/packages/layers.py": "records that the service writes; RECORD of a wheel, by newline alone",
}


def calls_of(name: str, packages: tuple[str, ...]) -> set[str]:
    """Files that use an attribute of that name, called or not."""
    found = set()
    for package in packages:
        for path in sorted((ROOT / package).rglob("*.py")):
            nodes = ast.walk(ast.parse(path.read_text("utf-8")))
            if any(isinstance(node, ast.Attribute) and node.attr == name for node in nodes):
                found.add(str(path.relative_to(ROOT)))
    return found


def test_no_text_is_split_by_splitlines() -> None:
    assert calls_of("splitlines", PACKAGES) - ALLOWED.keys() == set(), 'use split("\\n"), or proc_files'


def test_the_sandbox_reads_no_kernel_file_as_text() -> None:
    assert calls_of("read_text", ("sandbox",)) - READ_AS_TEXT.keys() == set(), "use sandbox.limits.proc_files"


def test_text_mode_is_not_used_on_proc() -> None:
    wrong = []
    for path in sorted((ROOT / "sandbox").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if not (
                isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "open"
            ):
                continue
            modes = [arg.value for arg in node.args[1:2] if isinstance(arg, ast.Constant)]
            if not modes or "b" not in str(modes[0]):
                wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert wrong == []
