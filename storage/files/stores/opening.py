"""The choice of a store by its URL."""

from __future__ import annotations

import urllib.parse
from datetime import timedelta
from pathlib import Path

from broker_config.urls import LIVE_FILES, files_place
from nekro_agent.errors import SettingsError
from storage.files.stores.bucket import ATTEMPT, PATIENCE, BucketStore
from storage.files.stores.directory import DirectoryStore
from storage.files.stores.store import ObjectStore

__all__ = ["open_store"]


def open_store(url: str, *, patience: timedelta = PATIENCE) -> ObjectStore:
    """Return the store of a URL; nothing is opened before its first use.

    Args:
        url: ``file:///directory``, or ``s3://bucket/prefix``, ``gs://…`` or ``az://…``, which need the extra
            ``objects``. Credentials, region and endpoint come from the provider's own variables
            (``AWS_ACCESS_KEY_ID``, ``AWS_ENDPOINT_URL``, …), never from the URL.
        patience: how long a request to a bucket is repeated.

    Raises:
        SettingsError: the URL names no store, contains credentials, or ``obstore`` is not installed.
    """
    parts = files_place(url)
    if url == LIVE_FILES:
        raise SettingsError(f"{url} names no store; files are in the data directory")
    if parts.scheme == "file":
        return DirectoryStore(Path(urllib.parse.unquote(parts.path)))
    return BucketStore(url, attempt=min(ATTEMPT, patience), patience=patience)
