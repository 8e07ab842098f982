"""The base layer: packages that every sandbox of this host can import, mounted read-only.

<root>/
├── current -> <version>          switched by a rename
└── <version>/
    ├── layer.json                what is in it
    ├── matplotlib/               matplotlib's list of fonts, copied at its first import in a run
    └── python3.11/               importable files

The name of the inner directory keeps an interpreter of another version from importing them. Each change
makes a new version beside the old one, so a running sandbox keeps the files that it has mounted.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from broker_config.settings import SandboxSettings

__all__ = ["CURRENT", "MANIFEST", "BaseLayer", "base_root", "named_packages", "python_directory", "read_base"]

CURRENT: Final = "current"
MANIFEST: Final = "layer.json"


@dataclass(frozen=True, kw_only=True)
class BaseLayer:
    """One version of the base layer."""

    path: Path
    #: The Python that can import it, such as ``3.11``.
    python: str
    #: Name and version of the packages that were asked for, the default set first.
    named: tuple[tuple[str, str], ...]
    #: Name and version of all packages, dependencies included.
    packages: tuple[tuple[str, str], ...]
    #: Pinned lines of added packages, dependencies included, by the name that was asked for.
    added: dict[str, list[str]]
    #: SHA-256 of the pins that it was built from.
    digest: str


def base_root(settings: SandboxSettings) -> Path:
    """Return the directory of the base layer; it need not exist."""
    return _root(settings.packages_dir)


def _root(packages_dir: Path | None) -> Path:
    return packages_dir or Path(sys.prefix) / "share" / "nekro" / "packages"


def python_directory() -> str:
    """Return the name of the directory of importable files for this process's Python."""
    return f"python{sys.version_info[0]}.{sys.version_info[1]}"


def read_base(settings: SandboxSettings) -> BaseLayer | None:
    """Return the layer that the next sandbox mounts.

    None where there is none, where it is for another Python, and where the operator's interpreter
    (`sandbox.python`) brings its own packages.
    """
    if settings.python is not None:
        return None
    current = _current(settings.packages_dir)
    try:
        found = os.stat(current)
        return _read(current, found.st_ino, found.st_ctime_ns)
    except (OSError, ValueError, KeyError):
        return None


@lru_cache(maxsize=4)
def _current(packages_dir: Path | None) -> str:
    return str(_root(packages_dir) / CURRENT)


def named_packages(settings: SandboxSettings) -> str:
    """Return the packages that sandboxed code can import, for a prompt; "" where there is no layer."""
    layer = read_base(settings)
    return "" if layer is None else ", ".join(" ".join(pair) for pair in layer.named)


@lru_cache(maxsize=4)
def _read(current: str, _inode: int, _changed_ns: int) -> BaseLayer | None:
    """Read the layer that a link names; what the link leads to is told apart by its inode."""
    path = Path(current).resolve(strict=True)
    record: dict[str, Any] = json.loads((path / MANIFEST).read_text())
    if not (path / python_directory()).is_dir():
        return None
    return BaseLayer(
        path=path,
        python=record["python"],
        named=tuple((name, version) for name, version in record["named"]),
        packages=tuple((name, version) for name, version in record["packages"]),
        added=record["added"],
        digest=record["digest"],
    )
