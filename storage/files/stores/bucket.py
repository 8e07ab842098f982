"""Objects in a bucket of S3, Google Cloud Storage or Azure, by ``obstore``.

The library repeats requests that a store answers with 5xx, cuts off or does not answer. Its errors contain
whole requests, which for some stores have a signature in their URL, so only a status and a code of them are
shown.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Collection
from contextlib import contextmanager
from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Final

from nekro_agent.errors import SettingsError, StorageError, StorageUnavailableError
from storage.files.stores.store import PART_BYTES, StoredObject

if TYPE_CHECKING:
    from collections.abc import Iterator

    from obstore.store import ClientConfig, RetryConfig
    from obstore.store import ObjectStore as Bucket

__all__ = ["ATTEMPT", "PATIENCE", "BucketStore"]

#: How long a request is repeated, and how long each of its attempts may take. A slow link moves an object of
#: ``PART_BYTES`` within one attempt at 2 Mbit/s.
PATIENCE: Final = timedelta(seconds=120)
ATTEMPT: Final = timedelta(seconds=60)
_CONNECT: Final = timedelta(seconds=5)
_REPETITIONS: Final = 8
#: Most objects of one request to delete.
_DELETE_BATCH: Final = 1000

_STATUS: Final = re.compile(r"status(?: code)?: (\d{3}[ A-Za-z]{0,40})")
_CODE: Final = re.compile(r"<Code>(\w{1,60})</Code>")


class BucketStore:
    """Implements ``ObjectStore``.

    The library runs threads from the first request on, which a forked process does not have: use an instance
    in the process that first uses it only.
    """

    def __init__(self, url: str, *, attempt: timedelta = ATTEMPT, patience: timedelta = PATIENCE) -> None:
        """
        Args:
            url: as for ``storage.files.stores.opening.open_store``.
            attempt: how long the store may take for one request.
            patience: after this time no request is repeated.

        Raises:
            SettingsError: ``obstore`` is not installed.
        """
        try:
            import obstore
        except ImportError as exc:
            raise SettingsError(
                f"files in {url} need obstore; install it with `pip install 'nekro-workers[objects]'`"
            ) from exc
        self._library = obstore
        self._url = url
        # Plain HTTP is a matter of the endpoint, which an operator chooses by its URL.
        self._client: ClientConfig = {"allow_http": True, "timeout": attempt, "connect_timeout": _CONNECT}
        self._retry: RetryConfig = {"max_retries": _REPETITIONS, "retry_timeout": patience}

    @cached_property
    def _bucket(self) -> Bucket:
        from obstore.store import from_url

        with self._refusals("open"):
            return from_url(self._url, client_options=self._client, retry_config=self._retry)

    async def put(self, key: str, data: bytes) -> None:
        """Store an object with one request."""
        from obstore.exceptions import AlreadyExistsError

        with self._refusals(f"store object {key}"):
            try:
                await self._library.put_async(
                    self._bucket, _path(key), data, mode="create", use_multipart=False
                )
            except AlreadyExistsError:
                return

    async def get(self, key: str) -> bytes | None:
        """Return an object."""
        with self._refusals(f"read object {key}"):
            try:
                found = await self._library.get_async(self._bucket, _path(key))
            except FileNotFoundError as exc:
                _require_bucket(exc)
                return None
            if found.meta["size"] <= PART_BYTES:
                return bytes(await found.bytes_async())
            data = bytearray()  # it was altered, and all of it might not fit into memory
            async for chunk in found.stream():
                data += chunk
                if len(data) > PART_BYTES:
                    break
            return bytes(data[: PART_BYTES + 1])

    async def size(self, key: str) -> int | None:
        """Return the size of an object."""
        with self._refusals(f"find object {key}"):
            try:
                return (await self._library.head_async(self._bucket, _path(key)))["size"]
            except FileNotFoundError as exc:
                _require_bucket(exc)
                return None

    async def delete(self, keys: Collection[str]) -> None:
        """Delete objects, many with a request where the store can."""
        paths = [_path(key) for key in keys]
        for start in range(0, len(paths), _DELETE_BATCH):
            with self._refusals("delete objects"):
                try:
                    await self._library.delete_async(self._bucket, paths[start : start + _DELETE_BATCH])
                except FileNotFoundError:  # of some stores; the others of the batch may remain for the next
                    continue

    async def list(self) -> AsyncIterator[list[StoredObject]]:
        """Yield the objects below the prefix."""
        with self._refusals("list objects"):
            async for batch in self._library.list(self._bucket, chunk_size=_DELETE_BATCH):
                yield [
                    StoredObject(
                        key=found["path"].rpartition("/")[2],
                        size_bytes=found["size"],
                        modified_at=found["last_modified"],
                    )
                    for found in batch
                ]

    @contextmanager
    def _refusals(self, what: str) -> Iterator[None]:
        from obstore.exceptions import (
            BaseError,
            PermissionDeniedError,
            UnauthenticatedError,
            UnknownConfigurationKeyError,
        )

        try:
            yield
        except (PermissionDeniedError, UnauthenticatedError) as exc:
            raise StorageError(
                f"cannot {what} in {self._url}: {_reason(exc)}; check the credentials of the store, and what "
                "they permit"
            ) from None
        except (UnknownConfigurationKeyError, ValueError) as exc:
            raise SettingsError(f"cannot {what} in {self._url}: {_reason(exc)}") from None
        except (BaseError, FileNotFoundError, OSError) as exc:
            # Without the cause, whose text has the whole request.
            raise StorageUnavailableError(f"cannot {what} in {self._url}: {_reason(exc)}") from None


def _require_bucket(exc: FileNotFoundError) -> None:
    if "<Code>NoSuchBucket</Code>" in str(exc):
        raise exc


def _path(key: str) -> str:
    return f"{key[:2]}/{key}"


def _reason(exc: Exception) -> str:
    text = str(exc)
    found = [match[1] for match in (_STATUS.search(text), _CODE.search(text)) if match is not None]
    return ", ".join(found) or type(exc).__name__
