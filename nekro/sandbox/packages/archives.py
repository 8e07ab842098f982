"""Archives of installed packages, which hosts without a shared disk store for each other.

pip writes regular files, some of them executable: it also makes files of the links that a wheel has. An
archive therefore has these and nothing else, and no file has another right than to be read, written by its
owner, and executed. What comes from a store is checked again.
"""

from __future__ import annotations

import os
import shutil
import stat
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Final

from nekro_agent.errors import PackageInstallError
from storage.files.paths import checked_path

__all__ = ["extract", "pack"]

_CHUNK_BYTES: Final = 1 << 20
_MOST_NAMES: Final = 100_000
#: Bytecode, which each host writes when it imports a module.
_BYTECODE: Final = "__pycache__"


def pack(directory: Path, file: IO[bytes], *, without: frozenset[str] = frozenset()) -> None:
    """Write the files of a directory, except bytecode; equal directories give equal bytes.

    Args:
        without: names of files directly in the directory that are left out.

    Raises:
        PackageInstallError: it has something other than files and directories, or too many of them.
    """
    names = 0
    with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for path, found in _files(directory):
            name, names = path.relative_to(directory).as_posix(), names + 1
            if not stat.S_ISREG(found.st_mode) or names > _MOST_NAMES:
                raise PackageInstallError(f"{ascii(name)[:100]} is no regular file, or is one too many")
            if name in without:
                continue
            info = tarfile.TarInfo(name)
            info.size, info.mode = found.st_size, 0o755 if found.st_mode & stat.S_IXUSR else 0o644
            with path.open("rb") as source:
                archive.addfile(info, source)


def _files(directory: Path) -> Iterator[tuple[Path, os.stat_result]]:
    for entry in sorted(os.scandir(directory), key=lambda entry: entry.name):
        found = entry.stat(follow_symlinks=False)
        if not stat.S_ISDIR(found.st_mode):
            yield Path(entry.path), found
        elif entry.name != _BYTECODE:
            yield from _files(Path(entry.path))


def extract(path: Path, target: Path) -> None:
    """Extract files into a directory, which must be empty.

    Raises:
        PackageInstallError: the archive has something other than files, a path outside of the directory, a
            path twice, or more than its own size, or it is no archive.
    """
    try:
        _extract(path, target)
    except (tarfile.TarError, ValueError, OverflowError, FileExistsError, NotADirectoryError) as exc:
        raise PackageInstallError(f"an archive of packages is damaged: {exc}") from exc


def _extract(path: Path, target: Path) -> None:
    left_bytes, left_names = path.stat().st_size, _MOST_NAMES
    with tarfile.open(path, mode="r:") as archive:
        for info in archive:
            left_bytes, left_names = left_bytes - info.size, left_names - 1
            source = archive.extractfile(info) if info.type == tarfile.REGTYPE else None
            if source is None or left_bytes < 0 or left_names < 0:
                raise PackageInstallError(f"an archive of packages has {ascii(info.name)[:100]}, or too much")
            file = target / checked_path(info.name)
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with source, file.open("xb") as copy:
                shutil.copyfileobj(source, copy, _CHUNK_BYTES)
                os.fchmod(copy.fileno(), 0o700 if info.mode & stat.S_IXUSR else 0o600)
