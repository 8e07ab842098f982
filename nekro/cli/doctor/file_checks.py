"""The check of `nekro doctor` for the place of files."""

from __future__ import annotations

import secrets
import shutil
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Final

from broker_config.settings import Settings
from nekro.cli.doctor.service_checks import Check, CheckState
from nekro.cli.running import ExitCode
from nekro_agent import layout
from nekro_agent.errors import SettingsError, StorageError

if TYPE_CHECKING:
    from storage.files.stores.store import ObjectStore

__all__ = ["files_check"]

#: A person waits: a store that takes longer for one object is no store to work with.
_PATIENCE: Final = timedelta(seconds=5)
#: Free space of the cache's disk below which the check warns.
_LOW_CACHE_BYTES: Final = 1 << 30


async def files_check(settings: Settings) -> Check:
    """Check where files are kept; of a store, that objects can be stored, read and deleted there."""
    name = "files"
    if not settings.files.in_store:
        return Check(
            name=name,
            verdict=CheckState.OK,
            detail="in the data directory, which all hosts of a fleet must share",
        )
    from storage.files.stores.opening import open_store

    cache = layout.files_dir(settings.data_dir) / "cache"
    free_bytes = shutil.disk_usage(next(path for path in cache.parents if path.exists())).free
    try:
        seconds = await _probe(open_store(settings.files.url, patience=_PATIENCE))
    except SettingsError as exc:
        return Check(name=name, verdict=CheckState.FAILED, detail=str(exc), code=ExitCode.USAGE)
    except StorageError as exc:
        return Check(
            name=name,
            verdict=CheckState.FAILED,
            detail=str(exc),
            fix="correct NEKRO_FILES__URL, or the provider's variables for endpoint and credentials",
            code=ExitCode.STORAGE,
        )
    detail = (
        f"{settings.files.url}, {seconds * 1000:.0f} ms to store, read and delete an object; hosts share no "
        f"disk; cache {cache}, at most {settings.files.cache_bytes / (1 << 30):.1f} GiB, "
        f"{free_bytes / (1 << 30):.1f} GiB free"
    )
    # What the cache already has is on this disk, too, so only a small rest is a reason to warn.
    low = free_bytes < min(settings.files.cache_bytes, _LOW_CACHE_BYTES)
    return Check(
        name=name,
        verdict=CheckState.WARNING if low else CheckState.OK,
        detail=detail,
        fix="free disk space, or lower NEKRO_FILES__CACHE_BYTES" if low else "",
    )


async def _probe(store: ObjectStore) -> float:
    """Store, read and delete an object that no collection takes for a content; returns the seconds.

    Raises:
        StorageError: the store does not answer, refuses a request, or returns other bytes.
    """
    data = secrets.token_bytes(64)
    key = f"{secrets.token_hex(32)}.probe"
    started = time.monotonic()
    await store.put(key, data)
    try:
        found = await store.get(key)
    finally:
        await store.delete([key])
    if found != data:
        raise StorageError("the store of files does not return what was stored there")
    return time.monotonic() - started
