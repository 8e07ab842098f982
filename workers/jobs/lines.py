"""What the code of a job logs, until it is written to the job's log."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final

from loguru import logger

from storage.repositories.job_log import MOST_CHARS

if TYPE_CHECKING:
    from loguru import Message

__all__ = ["JobLines"]

#: Most records that wait for one write, about once a second; older ones are dropped.
_MOST_WAITING: Final = 20
_LEAST_LEVEL: Final = "INFO"


class JobLines:
    """The log records of one job's code that wait to be written; thread-safe."""

    def __init__(self, job_id: str, redact: Callable[[str], str]) -> None:
        self._job_id = job_id
        self._redact = redact
        self._waiting: deque[tuple[str, str]] = deque(maxlen=_MOST_WAITING)

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Keep the records of the block's context and of the tasks that it starts."""
        sink = logger.add(
            self._add,
            level=_LEAST_LEVEL,
            format=lambda _: "",
            filter=lambda record: record["extra"].get("job_id") == self._job_id,
            catch=True,
        )
        try:
            yield
        finally:
            with suppress(ValueError):  # the process has configured its log anew
                logger.remove(sink)

    def take(self) -> list[tuple[str, str]]:
        """Remove and return the records that wait, as (level, text)."""
        taken: list[tuple[str, str]] = []
        with suppress(IndexError):
            while True:
                taken.append(self._waiting.popleft())
        return taken

    def put_back(self, taken: list[tuple[str, str]]) -> None:
        """Return records that could not be written; newer ones take their place if there are too many."""
        for line in reversed(taken):
            if len(self._waiting) < _MOST_WAITING:
                self._waiting.appendleft(line)

    def redacted(self, text: str) -> str:
        """Return what the log keeps of a text. Redacts first: a secret that was cut is not recognised."""
        return self._redact(text)[:MOST_CHARS]

    def _add(self, message: Message) -> None:
        record = message.record
        text, error = record["message"], record["exception"]
        if error is not None and error.type is not None:
            text = f"{text}: {error.type.__name__}: {error.value}"
        self._waiting.append((record["level"].name, self.redacted(text)))
