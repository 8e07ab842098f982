#!/usr/bin/env python3
"""List the CPythons of this machine that the project supports: version and path, one per line.

    scripts/pythons.py

It looks into /usr/bin, /usr/local/bin and the versions of pyenv and uv, and lists each full version once.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

OLDEST = (3, 11)
PLACES = (
    Path("/usr/bin"),
    Path("/usr/local/bin"),
    *Path.home().glob(".pyenv/versions/*/bin"),
    *Path.home().glob(".local/share/uv/python/cpython-*/bin"),
)
NAMES = re.compile(r"python3\.\d+")
DESCRIBE = "import sys; print(sys.implementation.name, *sys.version_info[:3])"


def pythons() -> Iterator[tuple[Path, str]]:
    """Each CPython of this machine that the project supports, once per full version."""
    seen = set()
    for path in sorted(path for place in PLACES for path in place.glob("python3.*")):
        if not NAMES.fullmatch(path.name):
            continue
        described = subprocess.run([path, "-I", "-c", DESCRIBE], capture_output=True, text=True)  # noqa: S603
        name, *numbers = described.stdout.split() or [""]
        version = tuple(map(int, numbers))
        if name == "cpython" and version >= OLDEST and version not in seen:
            seen.add(version)
            yield path, ".".join(numbers)


if __name__ == "__main__":
    for found, text in pythons():
        print(text, found)
