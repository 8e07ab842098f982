"""Answers that come in pieces, without the connections that bring them: output of runs, content of files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import takewhile
from typing import BinaryIO

import httpx
from pydantic import ValidationError

from nekro_client.errors import ApiError, ClientError, InvalidAnswerError, UnreachableError, api_error
from nekro_client.models import Event, EventType, Problem, Run, RunEventType
from nekro_client.operations import Backoff, Operation, failure_of, parsed_json
from nekro_client.sse import EventParser, EventTooLargeError
from nekro_client.streams import require_stream

__all__ = ["FileDownload", "RunOutput", "streamed"]


class RunOutput:
    """Puts the pieces of a run's output together."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._parser = EventParser()
        self._seen = ""
        #: Whether a piece is missing; what follows it comes from the report.
        self._has_gap = False
        self._has_begun = False
        self._run: Run | None = None

    def begin(self, response: httpx.Response) -> None:
        """Check the head of an answer; the body of an error must have been read."""
        failure = failure_of(response)
        if failure is not None:
            raise failure
        require_stream(response)
        self._has_begun = True

    def take(self, chunk: bytes) -> Iterator[str]:
        """Yield the pieces that a chunk completes."""
        try:
            for sent in self._parser.feed(chunk):
                if sent.type == EventType.OUTPUT_CHUNK:
                    event = parsed_json(sent.data, Event.model_validate_json, Event.model_validate)
                    piece = self._next(event)
                elif sent.type == RunEventType.ENDED:
                    run = parsed_json(sent.data, Run.model_validate_json, Run.model_validate)
                    piece = self._rest(run)
                elif sent.type == RunEventType.PROBLEM:
                    problem = Problem.model_validate_json(sent.data)
                    raise api_error(problem, retry_after_seconds=None)
                else:
                    continue  # of a newer release
                if piece:
                    yield piece
        except (ValidationError, EventTooLargeError) as exc:
            raise InvalidAnswerError(f"{self._path} returned an invalid run report: {exc}") from exc

    def end(self) -> None:
        """Process the end of the answer."""
        if self._run is None:
            raise UnreachableError(f"{self._path}: the stream ended before the run")

    def report(self) -> Run:
        """Return the report of a run that has ended."""
        if self._run is None:
            raise ClientError("the stream was closed before the run had ended")
        return self._run

    def delay_after(self, error: ClientError, backoff: Backoff) -> float:
        """Return the seconds until the request is sent again; raises ``error`` if it is not.

        A run that has begun is stopped with its connection.
        """
        delay = None if self._has_begun else backoff.delay_after(error)
        if delay is None:
            raise error
        return delay

    def _next(self, event: Event) -> str:
        text, offset = str(event.data.get("text", "")), event.data.get("offset")
        self._has_gap |= offset != len(self._seen)
        if self._has_gap:
            return ""
        self._seen += text
        return text

    def _rest(self, run: Run) -> str:
        self._run = run
        # Of very long output the report leaves out the middle.
        pairs = zip(self._seen, run.output, strict=False)
        return run.output[sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs)) :]


def streamed(operation: Operation[Run]) -> Operation[Run]:
    """Return the request of a run whose output is streamed."""
    return replace(operation, headers={**operation.headers, "accept": "text/event-stream"})


class FileDownload:
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
