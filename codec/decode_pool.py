"""Reads costly arguments on a thread of its own, in turns between chats.

Short texts, and the first slice of those of medium length, are read on the caller's event loop: most
end there, and a thread would take longer. What is left would block a shared event loop, so one thread
per process reads all of it, in turns: one slice of each chat's first text. A chat with two hundred
costly calls delays another chat's costly call by its own slices only. Between slices the thread
sleeps, because a thread that computes releases the interpreter's lock only every 5 ms, and the loop
needs it several times per call.
"""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Generator
from concurrent.futures import Future
from typing import Final

from codec.short_texts import SHORT_CHARS
from codec.values import Arguments, arguments_in_slices, decode_arguments

__all__ = ["INLINE_CHARS", "DecodePool"]

#: Of texts up to this length the first slice is read on the event loop. It takes about 0.3 ms, also when all
#: of the text is one string or one value of bytes.
INLINE_CHARS: Final = 64 << 10
#: Between slices of about 0.3 ms, at least: long enough for a waiting thread to take the interpreter's lock.
_PAUSE_SECONDS: Final = 0.0002
#: Slices after which the garbage collector may run although no text was read to its end.
_UNCOLLECTED_SLICES: Final = 1000


class _Reading:
    """One text that is being read."""

    def __init__(self, slices: Generator[None, None, Arguments]) -> None:
        self._slices = slices
        #: CPU time that it took so far.
        self.seconds = 0.0
        self.result: Future[Arguments] = Future()

    def go_on(self) -> bool:
        """Read one slice; whether more is left."""
        if self.result.cancelled():
            self._slices.close()
            return False
        began = time.thread_time()
        try:
            return self._read_slice()
        finally:
            self.seconds += time.thread_time() - began

    def _read_slice(self) -> bool:
        try:
            next(self._slices)
        except StopIteration as end:
            self._settle(end.value)
        except Exception as exc:
            # Its frames hold all that was built.
            self._settle(exc.with_traceback(None))
        else:
            return True
        return False

    def fail(self, error: Exception) -> None:
        """Give up before the first slice."""
        self._settle(error)

    def _settle(self, outcome: Arguments | Exception) -> None:
        if not self.result.set_running_or_notify_cancel():
            return
        if isinstance(outcome, Exception):
            self.result.set_exception(outcome)
        else:
            self.result.set_result(outcome)


class DecodePool:
    """Reads arguments for all event loops of a process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: By chat, in the order of their turns.
        self._waiting: OrderedDict[str, deque[_Reading]] = OrderedDict()
        self._is_running = False

    def is_large(self, text: str) -> bool:
        """Whether reading a text can take longer than the rest of an ordinary call."""
        return len(text) > SHORT_CHARS

    async def read(
        self, text: str, *, chat_key: str, max_bytes: int, spent: Callable[[float], None] | None = None
    ) -> Arguments:
        """Read arguments; a cancelled call is read no further.

        Args:
            spent: called with the seconds of CPU time that a large text took, refused or not.

        Raises:
            ArgumentError: as ``decode_arguments``.
            RuntimeError: the process may start no more threads just now.
        """
        if not self.is_large(text):
            return decode_arguments(text, max_bytes=max_bytes)
        reading = _Reading(arguments_in_slices(text, max_bytes=max_bytes))
        try:
            if len(text) <= INLINE_CHARS and not reading.go_on():
                return reading.result.result()
            self._add(chat_key, reading)
            return await asyncio.wrap_future(reading.result)
        finally:
            if spent is not None:
                spent(reading.seconds)

    def _add(self, chat_key: str, reading: _Reading) -> None:
        with self._lock:
            self._waiting.setdefault(chat_key, deque()).append(reading)
            if self._is_running:
                return
            self._is_running = True
        try:
            threading.Thread(target=self._read_all, name="nekro-decode", daemon=True).start()
        except RuntimeError as exc:  # no more threads; the next text tries again
            self._fail_all(exc)

    def _fail_all(self, error: Exception) -> None:
        with self._lock:
            waiting = [reading for readings in self._waiting.values() for reading in readings]
            self._waiting.clear()
            self._is_running = False
        for reading in waiting:
            reading.fail(error)

    def _read_all(self) -> None:
        """Read until nothing waits; the next text begins a new thread."""
        slices = 0
        try:
            while (turn := self._next()) is not None:
                chat_key, reading = turn
                # What is read holds no cycles, but its allocations would have all of it looked through
                # time and again, up to 25 ms each, in which no thread goes on.
                gc.disable()
                before, slices = reading.seconds, slices + 1
                if reading.go_on():
                    with self._lock:
                        self._waiting.setdefault(chat_key, deque()).appendleft(reading)
                else:
                    slices = 0
                if slices % _UNCOLLECTED_SLICES == 0:
                    gc.enable()
                # At most half of the interpreter's time.
                time.sleep(max(_PAUSE_SECONDS, reading.seconds - before))
        finally:
            gc.enable()

    def _next(self) -> tuple[str, _Reading] | None:
        """Take the first text of the chat whose turn it is; the chat goes to the end of the line."""
        with self._lock:
            if not self._waiting:
                self._is_running = False
                return None
            chat_key, readings = self._waiting.popitem(last=False)
            reading = readings.popleft()
            if readings:
                self._waiting[chat_key] = readings
            return chat_key, reading
