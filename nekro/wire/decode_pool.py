"""Decodes costly arguments on a separate thread, round-robin between chats.

Short texts, and the first slice of those of medium length, are decoded on the caller's event loop: most
end there, and a thread would take longer. The rest would block a shared event loop, so one thread per
process decodes it: one slice of each chat's first text in turn. A chat with two hundred costly calls
delays another chat's costly call by one slice per turn only. The thread sleeps between slices, because
a computing thread releases the interpreter's lock only every 5 ms, and the event loop needs the lock
several times per call.
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

from nekro.wire.values import SHORT_CHARS, Arguments, arguments_in_slices, decode_arguments

__all__ = ["INLINE_CHARS", "DecodePool"]

#: The first slice of a text up to this length is decoded on the event loop. It takes about 0.3 ms, even if
#: the whole text is one string or one bytes value.
INLINE_CHARS: Final = 64 << 10
#: Minimum pause between slices of about 0.3 ms: long enough for a waiting thread to take the
#: interpreter's lock.
_PAUSE_SECONDS: Final = 0.0002
#: The garbage collector may run after this many slices although no text is complete.
_UNCOLLECTED_SLICES: Final = 1000


class _Reading:
    """One text that is being decoded."""

    def __init__(self, slices: Generator[None, None, Arguments]) -> None:
        self._slices = slices
        #: CPU time used so far.
        self.seconds = 0.0
        self.result: Future[Arguments] = Future()

    def go_on(self) -> bool:
        """Decode one slice; return whether more slices remain."""
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
            # The frames of the traceback would keep everything that was built alive.
            self._settle(exc.with_traceback(None))
        else:
            return True
        return False

    def fail(self, error: Exception) -> None:
        """Fail before the first slice."""
        self._settle(error)

    def _settle(self, outcome: Arguments | Exception) -> None:
        if not self.result.set_running_or_notify_cancel():
            return
        if isinstance(outcome, Exception):
            self.result.set_exception(outcome)
        else:
            self.result.set_result(outcome)


class DecodePool:
    """Decodes arguments for all event loops of a process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: Texts by chat, in the order of the chats' turns.
        self._waiting: OrderedDict[str, deque[_Reading]] = OrderedDict()
        self._is_running = False

    def is_large(self, text: str) -> bool:
        """Whether decoding a text can take longer than the rest of an ordinary call."""
        return len(text) > SHORT_CHARS

    async def read(
        self, text: str, *, chat_key: str, max_bytes: int, spent: Callable[[float], None] | None = None
    ) -> Arguments:
        """Decode arguments; cancellation stops the decoding.

        Args:
            spent: called with the seconds of CPU time that a large text took, also if it is refused.

        Raises:
            ArgumentError: as ``decode_arguments``.
            RuntimeError: the process cannot start another thread at present.
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
        except RuntimeError as exc:  # no thread could be started; the next text tries again
            self._fail_all(exc)

    def _fail_all(self, error: Exception) -> None:
        with self._lock:
            waiting = [reading for readings in self._waiting.values() for reading in readings]
            self._waiting.clear()
            self._is_running = False
        for reading in waiting:
            reading.fail(error)

    def _read_all(self) -> None:
        """Decode until no text is waiting; the next text starts a new thread."""
        slices = 0
        try:
            while (turn := self._next()) is not None:
                chat_key, reading = turn
                # Decoded values contain no cycles, but their allocations would trigger repeated garbage
                # collections of up to 25 ms each, which stop every thread.
                gc.disable()
                before, slices = reading.seconds, slices + 1
                if reading.go_on():
                    with self._lock:
                        self._waiting.setdefault(chat_key, deque()).appendleft(reading)
                else:
                    slices = 0
                if slices % _UNCOLLECTED_SLICES == 0:
                    gc.enable()
                # The thread takes at most half of the interpreter's time.
                time.sleep(max(_PAUSE_SECONDS, reading.seconds - before))
        finally:
            gc.enable()

    def _next(self) -> tuple[str, _Reading] | None:
        """Remove and return the first text of the next chat; the chat moves to the end of the order."""
        with self._lock:
            if not self._waiting:
                self._is_running = False
                return None
            chat_key, readings = self._waiting.popitem(last=False)
            reading = readings.popleft()
            if readings:
                self._waiting[chat_key] = readings
            return chat_key, reading
