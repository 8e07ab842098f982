"""Private copies of sandbox files: made for plugin code, removed when its call has ended."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from nekro_agent import layout, runtime

__all__ = ["call_scope", "new_directory", "sweep"]

_scope: ContextVar[list[Path] | None] = ContextVar("nekro_staging", default=None)


def new_directory() -> Path:
    """Create a private directory; the surrounding :func:`call_scope`, if any, removes it."""
    base = layout.staging_dir(runtime.data_root())
    base.mkdir(mode=0o700, parents=True, exist_ok=True)
    directory = Path(tempfile.mkdtemp(dir=base))
    made = _scope.get()
    if made is not None:
        made.append(directory)
    return directory


@contextmanager
def call_scope() -> Iterator[None]:
    """Remove, at the end of the block, every directory that was made inside it."""
    made: list[Path] = []
    token = _scope.set(made)
    try:
        yield
    finally:
        _scope.reset(token)
        for directory in made:
            shutil.rmtree(directory, ignore_errors=True)


def sweep(root: Path, *, older_than_seconds: float = 24 * 3600) -> int:
    """Remove what crashed processes and code outside calls left behind; returns how many."""
    base = layout.staging_dir(root)
    if not base.is_dir():
        return 0
    limit = time.time() - older_than_seconds
    stale = [entry for entry in base.iterdir() if entry.lstat().st_mtime < limit]
    for entry in stale:
        shutil.rmtree(entry, ignore_errors=True)
    return len(stale)
