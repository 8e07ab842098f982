"""``/app/shared`` on a file system of its own: an ext4 image per container key, mounted by a loop device.

The kernel bounds its bytes and its inodes, including those of deleted files that are still open, so
nothing has to be measured. Needs root and a local file system. An area is mounted on its directory once,
before its first sandbox; it stays mounted over runs and restarts, and is unmounted and deleted with its
image when it was idle (``shared_idle_seconds``). Its journal repairs it after a crash.

One lock for all areas of a data directory prevents concurrent formatting, mounting and dropping by the
services of a host. ``mount`` reuses the loop device of an image, so two mounts of one image share one
file system.

"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import shutil
import subprocess
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Final

from loguru import logger

from broker_config.settings import SandboxSettings
from nekro.sandbox.leftovers import make_home, remove_home
from nekro.sandbox.shared import Hold
from nekro_agent.durations import PROGRAM_SECONDS
from nekro_agent.errors import NekroError, SandboxUnavailableError
from nekro_agent.files import safe_files

__all__ = ["check_images", "drop_idle", "is_bounded", "is_unmounted", "mount_and_hold"]

_PATH: Final = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
_JOURNAL_BYTES: Final = 4 << 20
#: ext4 rounds inodes up to whole blocks per group, and reserves eleven.
_INODE_SLACK: Final = 64
#: ``statfs.f_type`` of file systems that only this host writes: ext4, xfs, btrfs, f2fs, zfs, tmpfs, overlay.
_LOCAL: Final = {0xEF53, 0x58465342, 0x9123683E, 0xF2F52010, 0x2FC12FC1, 0x01021994, 0x794C7630}
_OPTIONS: Final = "loop,nosuid,nodev,discard"


def is_bounded(directory: Path, settings: SandboxSettings) -> bool:
    """Whether ``directory`` is a mounted file system of at most the size that the settings allow."""
    if not _is_mounted(directory):
        return False
    size = os.statvfs(directory)
    files = settings.shared_files + settings.shared_files // 4 + _INODE_SLACK
    return 0 < size.f_files <= files and size.f_blocks * size.f_frsize <= settings.shared_bytes


def is_unmounted(directory: Path) -> bool:
    """Whether the area of ``directory`` has an image that is not mounted: its files are not visible."""
    return _image_of(directory).exists() and not _is_mounted(directory)


def mount_and_hold(directory: Path, settings: SandboxSettings) -> Hold:
    """Mount the area of ``directory`` unless it is mounted, and return a hold that prevents its removal.

    Files that plugins wrote into the directory while it was not mounted are moved into the area, as far
    as they fit.

    Raises:
        SandboxUnavailableError: it cannot be formatted or mounted; the message says why.
    """
    with _locked(directory.parent):
        if not _is_mounted(directory):
            _mount_with_contents(directory, settings)
        return Hold(directory)


def drop_idle(parent: Path, *, idle_seconds: float, kept: Collection[str] = ()) -> int:
    """Unmount and delete areas below ``parent`` without writes for ``idle_seconds``; returns how many.

    Areas that a sandbox or a plugin has open are kept.

    Args:
        kept: names of areas that are in use without either.
    """
    dropped = 0
    if not _images_of(parent).is_dir():
        return dropped
    with _locked(parent):
        for image in _images_of(parent).glob("*.img"):
            directory = parent / image.stem
            if image.stem in kept or image.stat().st_mtime > time.time() - idle_seconds:
                continue
            if directory.is_dir() and _is_mounted(directory) and not _unmount(directory):
                continue
            image.unlink()
            dropped += 1
    return dropped


def check_images(settings: SandboxSettings, shared_root: Path | None) -> None:
    """Format, mount, measure and drop an area in a private directory.

    Args:
        shared_root: where areas will be; it must be on a file system that only this host writes.

    Raises:
        SandboxUnavailableError: areas cannot be bounded here; the message says why and what to do.
    """
    if shared_root is not None:
        _check_local(next(path for path in (shared_root, *shared_root.parents) if path.exists()))
    home = make_home()
    directory = home / "areas" / "shared"
    directory.mkdir(parents=True)
    try:
        mount_and_hold(directory, settings).release()
        bounded = is_bounded(directory, settings)
        failed = _run("umount", str(directory))
    finally:
        remove_home(home)
    if failed or not bounded:
        raise SandboxUnavailableError(f"a bounded area could not be used: {failed or 'it is too large'}")


def _mount_with_contents(directory: Path, settings: SandboxSettings) -> None:
    image = _image_of(directory)
    if not image.exists():
        _format(image, settings)
    below = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        _mount(image, directory)
        with contextlib.suppress(OSError):
            os.rmdir(directory / "lost+found")
        _move_files(below, directory, settings)
    finally:
        os.close(below)


def _format(image: Path, settings: SandboxSettings) -> None:
    _check_local(image.parent)
    # Under another name until it is complete: the service may be killed meanwhile.
    fresh = image.with_suffix(".new")
    with fresh.open("wb") as file:
        file.truncate(settings.shared_bytes + _JOURNAL_BYTES)
    failed = _run(
        "mkfs.ext4", "-q", "-F", "-m", "0", "-b", "4096", "-N", str(settings.shared_files),
        "-O", "^resize_inode", "-J", f"size={_JOURNAL_BYTES >> 20}", str(fresh),
    )  # fmt: skip
    if failed:
        raise SandboxUnavailableError(f"{image} cannot be formatted: {failed}")
    fresh.rename(image)


def _mount(image: Path, directory: Path) -> None:
    failed = _run("mount", "-t", "ext4", "-o", _OPTIONS, str(image), str(directory))
    if failed and image.stat().st_size:
        logger.bind(image=str(image), error=failed).warning("sandbox_area_not_mounted")
        _run("e2fsck", "-p", str(image))
        failed = _run("mount", "-t", "ext4", "-o", _OPTIONS, str(image), str(directory))
    if failed:
        raise SandboxUnavailableError(
            f"{image} cannot be mounted: {failed}; give this service CAP_SYS_ADMIN and loop devices,"
            " delete the image if it is damaged, or set NEKRO_SANDBOX__SHARED_STORAGE=directory"
        )


def _unmount(directory: Path) -> bool:
    """Unmount an area unless it is held or open; returns whether it was. The caller holds the lock."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        # Locks work across mount namespaces; a mount in another namespace does not make this one busy.
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
    return not _run("umount", str(directory))


def _move_files(below: int, directory: Path, settings: SandboxSettings) -> None:
    if not os.listdir(below):
        return
    try:
        for entry in safe_files.list_files(below, max_entries=settings.shared_files):
            with safe_files.open_file(below, entry.path) as source:
                safe_files.replace_file(directory, entry.path, source)
    except (OSError, NekroError) as exc:
        logger.bind(directory=directory.name, error=str(exc)).warning("sandbox_area_files_not_moved")
    safe_files.empty_directory(below)


def _is_mounted(directory: Path) -> bool:
    return os.stat(directory).st_dev != os.stat(directory.parent).st_dev


def _images_of(parent: Path) -> Path:
    return parent.with_name(f"{parent.name}-images")


def _image_of(directory: Path) -> Path:
    return _images_of(directory.parent) / f"{directory.name}.img"


@contextlib.contextmanager
def _locked(parent: Path) -> Iterator[None]:
    images = _images_of(parent)
    images.mkdir(mode=0o700, exist_ok=True)
    fd = os.open(images, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _check_local(directory: Path) -> None:
    buffer = ctypes.create_string_buffer(256)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.statfs(os.fsencode(directory), buffer):
        raise OSError(ctypes.get_errno(), "statfs", str(directory))
    kind = ctypes.c_long.from_buffer(buffer).value & 0xFFFFFFFF
    if kind not in _LOCAL:
        raise SandboxUnavailableError(
            f"{directory} is on a file system ({kind:#x}) that other hosts may write to, but only one host"
            " may mount an image; set NEKRO_SANDBOX__SHARED_STORAGE=directory"
        )


def _run(program: str, *arguments: str) -> str:
    """Run a tool; returns "" or the error output of a failure."""
    found = shutil.which(program, path=_PATH)
    if found is None:
        return f"{program} is not installed (Debian: apt install e2fsprogs mount)"
    try:
        done = subprocess.run(  # noqa: S603 - fixed programs, no shell
            [found, *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=PROGRAM_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as exc:
        return str(exc)
    words = (done.stderr or done.stdout).decode("utf-8", "replace")
    return "" if done.returncode == 0 else " ".join(words.split())[:300] or f"exit code {done.returncode}"
