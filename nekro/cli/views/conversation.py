"""A conversation with the agent in a terminal; where its messages go is the subclass's.

The main thread reads lines, with editing, a history and completion of file names; an event loop beside it
does the rest.
"""

from __future__ import annotations

import asyncio
import contextlib
import shlex
import signal
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, contextmanager
from pathlib import Path
from typing import Any, Final, Generic, NoReturn, TypeVar

from nekro.cli.output import Output, one_line
from nekro.cli.running import ExitCode, TerminatedError
from nekro_agent.errors import LLMError, NekroError, UsageError
from nekro_agent.files.private_files import make_directory, open_private
from nekro_client.sse import LiveMessage

__all__ = [
    "BackgroundContext",
    "Conversation",
    "LineReader",
    "opened_in_background",
]


_PROMPT: Final = "> "
#: Lines that are kept.
_HISTORY_LINES: Final = 1000


class LineReader:
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


_NOTICE_COLUMNS: Final = 120

_COMMANDS: Final = "/file PATH [TEXT], /save PATH [FILE], /help, /quit"

_ENDS: Final = frozenset({"/quit", "exit", "quit"})

File = TypeVar("File")


class Conversation(ABC, Generic[File]):
    """Reads lines, sends them, prints what follows; ``File`` is a stored file that a message can carry."""

    def __init__(self, reader: LineReader, output: Output, *, chat_key: str, save: Path | None) -> None:
        """Begin; ``save``: folder that gets the files that the agent sends, None for none."""
        self._reader = reader
        self._output = output
        self._chat_key = chat_key
        self._folder = save
        #: What the model writes, as far as it was shown; a pipe gets whole messages only.
        self._live = LiveMessage()
        #: Exit code of the last turn.
        self._code: int = ExitCode.OK

    @abstractmethod
    def _put(self, path: Path) -> tuple[File, str]:
        """Store a file of this host; returns it and its path in the sandbox."""

    @abstractmethod
    def _save(self, path: str, target: Path) -> tuple[Path, int]:
        """Copy a file of the chat to this host; returns the written file and its size in bytes."""

    @abstractmethod
    def _post(self, text: str, files: Sequence[File]) -> str | None:
        """Post a message; returns what names it, None if a plugin's hook blocked it."""

    @abstractmethod
    def _follow(self, posted: str, *, on_interrupt: Callable[[], None]) -> bool:
        """Show what happens until the turn has ended; returns False if Ctrl-C stopped it."""

    @abstractmethod
    def _require_success(self, posted: str) -> None:
        """Return if the turn that a message caused has ended well.

        Raises:
            LLMError: it has not.
        """

    def hold(self) -> int:
        """Talk until the input ends; returns the exit code."""
        self._output.words(f"chat {self._chat_key}; Ctrl-D ends, /help lists commands")
        was_interrupted = False
        while True:
            try:
                line = self._reader.read()
            except KeyboardInterrupt:
                if was_interrupted:
                    raise
                was_interrupted = True
                self._output.words("\nCtrl-C again ends")
                continue
            was_interrupted = False
            if line is None or line.strip().lower() in _ENDS:
                return self._code
            if line.strip():
                self._obey(line)

    def _obey(self, line: str) -> None:
        """Run a line that begins with a command of this program, or send it."""
        name, _, rest = line.partition(" ")
        try:
            match name:
                case "/help":
                    self._output.words(_COMMANDS)
                case "/file":
                    path, text = _arguments(rest, usage="/file PATH [TEXT]")
                    stored, shown = self._put(Path(path).expanduser())
                    self._output.words(f"· sends {shown}")
                    self._send(text, [stored])
                case "/save":
                    path, target = _arguments(rest, usage="/save PATH [FILE]")
                    name = path.rpartition("/")[2]
                    written, size = self._save(path, Path(target or name).expanduser())
                    self._output.words(f"· wrote {size} bytes to {written}")
                case _:
                    self._send(line[1:] if line.startswith("//") else line, [])
        except (UsageError, NekroError) as exc:
            # A mistake in one line does not end the chat.
            self._output.error(exc)

    def _send(self, text: str, files: Sequence[File]) -> None:
        posted = self._post(text, files)
        if posted is None:
            self._output.words("· a plugin's hook blocked this message")
            return
        if not self._follow(
            posted, on_interrupt=lambda: self._output.words("\nstopping the turn; Ctrl-C again ends")
        ):
            self._code = ExitCode.OK
            return
        try:
            self._require_success(posted)
        except LLMError as exc:
            self._output.error(exc)
            self._code = ExitCode.LLM
        else:
            self._code = ExitCode.OK

    def _show_notice(self, text: str) -> None:
        """Show what a plugin or the system added to the history."""
        self._output.words(f"· {one_line(text, limit=_NOTICE_COLUMNS)}")

    def _show_words(self, round_id: str | None, piece: Mapping[str, Any]) -> None:
        """Show words of a message that the model still writes."""
        if self._output.is_terminal and (new := self._live.add(round_id, piece)):
            self._output.piece(new)

    def _end_words(self, round_id: str | None, *, begins: bool) -> None:
        """End the words that a round has shown: no message follows them.

        Args:
            begins: whether the round begins, again if its worker died; it may write others.
        """
        if self._live.settle(round_id, goes_on=begins):
            self._output.data("")

    def _show_answer(self, text: str, path: str | None, round_id: str | None) -> None:
        """Show what the agent sent: a text, a file, or both.

        Args:
            round_id: the round that sent it; what its model wrote was shown already.
        """
        shown = self._live.settle(round_id) or self._live.interrupt()
        if shown and text.startswith(shown):
            self._output.data(text[len(shown) :])
        elif shown:
            self._output.data("")
        if text and not (shown and text.startswith(shown)):
            self._output.data(text)
        if path:
            self._show_file(path)

    def _show_file(self, path: str) -> None:
        if self._folder is None:
            self._output.words(f"· file {path}; `/save {path}` copies it here")
            return
        try:
            written, size = self._save(path, _free_name(self._folder / Path(path).name))
        except NekroError as exc:
            self._output.words(f"· file {path} was not saved: {exc}")
        else:
            self._output.words(f"· file {path}: wrote {size} bytes to {written}")


def _arguments(text: str, *, usage: str) -> Sequence[str]:
    """Split ``PATH [REST]``; the path may be quoted."""
    try:
        words = shlex.split(text)
    except ValueError as exc:
        raise UsageError(f"{exc}; write {usage}") from exc
    if not words:
        raise UsageError(f"write {usage}")
    return words[0], " ".join(words[1:])


def _free_name(path: Path) -> Path:
    """Return the path, with a number before its suffix if a file of that name exists."""
    number, free = 2, path
    while free.exists():
        number, free = number + 1, path.with_stem(f"{path.stem}-{number}")
    return free
