"""Lines of a terminal in the main thread, and an event loop in a thread beside it."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import threading
from collections.abc import Coroutine, Iterator
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, contextmanager
from pathlib import Path
from typing import Any, Final, Generic, NoReturn, TypeVar

from nekro.cli.output import Output
from nekro.cli.running import TerminatedError
from nekro_agent.files.private_files import make_directory, open_private

__all__ = ["BackgroundContext", "InputReader", "opened_in_background"]


_PROMPT: Final = "> "
#: Lines that are kept.
_HISTORY_LINES: Final = 1000


class InputReader:
    """Reads standard input line by line."""

    def __init__(self, output: Output, history: Path) -> None:
        """Create the reader; ``history`` is the private file that keeps lines over runs."""
        self._output = output
        self._history = history
        #: Python edits lines only if both are terminals.
        self._edits = sys.stdin.isatty() and output.is_terminal and self._has_readline()

    def read(self) -> str | None:
        """Return the next line without its end; None at the end of the input."""
        if self._edits:
            try:
                return input(_PROMPT)
            except EOFError:
                self._output.words("")
                return None
        if sys.stdin.isatty():
            self._output.stderr.write(_PROMPT)
            self._output.stderr.flush()
        line = sys.stdin.readline()
        return line.rstrip("\n") if line else None

    def close(self) -> None:
        """Store the history."""
        if not self._edits:
            return
        import readline

        with contextlib.suppress(OSError):  # a chat does not fail for its history
            make_directory(self._history.parent)
            open_private(self._history, "a").close()
            readline.set_history_length(_HISTORY_LINES)
            readline.write_history_file(self._history)

    def _has_readline(self) -> bool:
        try:
            import readline
        except ImportError:  # a Python without the library
            return False
        readline.clear_history()
        readline.parse_and_bind("tab: complete")  # the names of files
        with contextlib.suppress(OSError):
            readline.read_history_file(self._history)
        return True


T = TypeVar("T")

V = TypeVar("V")


class BackgroundContext(Generic[V]):
    """What was opened on the loop; made by ``opened_in_background``."""

    def __init__(self, value: V, loop: asyncio.AbstractEventLoop) -> None:
        self.value = value
        self._loop = loop

    def begin(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start work on the loop; ``result`` of the future can be interrupted and called again."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Do work on the loop; an interruption cancels it."""
        begun = self.begin(work)
        try:
            return begun.result()
        except BaseException:
            begun.cancel()
            raise


@contextmanager
def opened_in_background(opening: AbstractAsyncContextManager[V]) -> Iterator[BackgroundContext[V]]:
    """Keep a context open on an event loop in a thread; both end with the block.

    Raises:
        TerminatedError: SIGTERM, while the block runs.
        Exception: the context cannot be opened or closed.
    """
    opened: Future[BackgroundContext[V]] = Future()
    ended: Future[None] = Future()
    holder: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any] | None]] = []
    closing = threading.Event()

    async def hold() -> None:
        loop = asyncio.get_running_loop()
        holder.append((loop, asyncio.current_task()))
        async with opening as value:
            opened.set_result(BackgroundContext(value, loop))
            await asyncio.to_thread(closing.wait)

    def main() -> None:
        try:
            asyncio.run(hold())
        except BaseException as exc:
            # An error of the opening belongs to the block's start, a later one to its end.
            (ended if opened.done() else opened).set_exception(exc)
        if not ended.done():
            ended.set_result(None)

    thread = threading.Thread(target=main, name="nekro-beside", daemon=True)
    before = signal.signal(signal.SIGTERM, _terminate)
    thread.start()
    try:
        yield opened.result()
    finally:
        closing.set()
        if not opened.done() and holder and holder[0][1] is not None:
            holder[0][0].call_soon_threadsafe(holder[0][1].cancel)
        ended.result()
        thread.join()
        signal.signal(signal.SIGTERM, before)


def _terminate(*_: object) -> NoReturn:
    raise TerminatedError
