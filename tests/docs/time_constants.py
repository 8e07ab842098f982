"""The times that are fixed in the product's modules."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from nekro_agent.placeholders import OWN_PACKAGES

__all__ = ["TimeConstant", "time_constants"]

_ROOT = Path(__file__).parents[2]
_NAME = re.compile(r"_(SECONDS|MS|MINUTES|HOURS|DAYS)$")


@dataclass(frozen=True, kw_only=True)
class TimeConstant:
    """One assignment at the top level of a module."""

    #: With its module, ``package.module.NAME``.
    name: str
    #: Source of the value, as ``ast.unparse`` writes it.
    value: str
    #: The line before the definition.
    before: str


def time_constants() -> Iterator[TimeConstant]:
    """Yield every time constant of a module, in the order of packages and paths."""
    for package in (*OWN_PACKAGES, "plugin_pkgs"):
        for path in sorted((_ROOT / package).rglob("*.py")):
            text = path.read_text("utf-8")
            module = ".".join(path.relative_to(_ROOT).with_suffix("").parts).removesuffix(".__init__")
            for node in ast.parse(text).body:
                if not isinstance(node, ast.Assign | ast.AnnAssign):
                    continue
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    if isinstance(target, ast.Name) and _NAME.search(target.id):
                        yield TimeConstant(
                            name=f"{module}.{target.id}",
                            value=ast.unparse(node.value) if node.value else "",
                            before=text.split("\n")[node.lineno - 2],
                        )
