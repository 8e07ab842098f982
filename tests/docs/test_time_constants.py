"""Every time that is fixed in the product states beside its value what it is for."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from nekro_agent.placeholders import OWN_PACKAGES

ROOT = Path(__file__).parents[2]
NAME = re.compile(r"_(SECONDS|MS|MINUTES|HOURS|DAYS)$")


def time_constants() -> Iterator[tuple[str, str]]:
    """Yield (file:name, line before its definition) of every time constant of a module."""
    for package in (*OWN_PACKAGES, "plugin_pkgs"):
        for path in sorted((ROOT / package).rglob("*.py")):
            text = path.read_text("utf-8")
            for node in ast.parse(text).body:
                targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
                for target in targets:
                    if isinstance(target, ast.Name) and NAME.search(target.id):
                        yield f"{path.relative_to(ROOT)}:{target.id}", text.split("\n")[node.lineno - 2]


def test_every_time_constant_has_a_reason() -> None:
    found = list(time_constants())
    assert len(found) > 10
    assert [name for name, before in found if not before.startswith("#")] == []
