"""Downloads to paths or streams, in pieces: both clients share this logic."""

from __future__ import annotations

from typing import BinaryIO

import httpx

from nekro_client.errors import ApiError, ClientError, InvalidAnswerError
from nekro_client.operations import Backoff, failure_of

__all__ = ["Download"]


class Download:
    """Writes one file into a stream; a cut connection goes on where it ended."""

    def __init__(
        self, target: BinaryIO, *, retry_seconds: float, start: int = 0, end: int | None = None
    ) -> None:
        """Fetch the bytes from ``start`` and before ``end`` (None: to the end) into ``target``."""
        self._target = target
        self._start, self._end = start, end
        self._etag: str | None = None
        self._backoff = Backoff(retry_seconds)
        #: Bytes written so far.
        self.size_bytes = 0

    def headers(self) -> dict[str, str]:
        """Headers of the next request."""
        headers = {"accept-encoding": "identity"}
        first = self._start + self.size_bytes
        if first or self._end is not None:
            headers["range"] = f"bytes={first}-{'' if self._end is None else self._end - 1}"
        if self.size_bytes and self._etag:
            headers["if-range"] = self._etag
        return headers

    def begin(self, response: httpx.Response) -> None:
        """Check the head of an answer whose body has been read if it is an error.

        Raises:
            ApiError: the gateway refused it.
            InvalidAnswerError: the file changed between two parts of its download.
        """
        failure = failure_of(response)
        if failure is not None:
            raise failure
        if "range" in self.headers() and response.status_code != httpx.codes.PARTIAL_CONTENT:
            what = "changed while it was downloaded" if self.size_bytes else "is not served in parts"
            raise InvalidAnswerError(f"the file {what}")
        self._etag = response.headers.get("etag")

    def write(self, chunk: bytes) -> None:
        """Write a part of the content."""
        self._target.write(chunk)
        self.size_bytes += len(chunk)

    def delay_after(self, error: ClientError) -> float:
        """Return the seconds to wait before the next request; raises ``error`` if there is none."""
        delay = self._backoff.delay_after(error)
        cannot_resume = self.size_bytes > 0 and self._etag is None
        if delay is None or (cannot_resume and not isinstance(error, ApiError)):
            raise error
        return delay
