"""A conversation with the agent in a terminal; where its messages go is the subclass's."""

from __future__ import annotations

import shlex
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

from nekro.cli.exit_codes import ExitCode
from nekro.cli.output import Output, one_line
from nekro.cli.views.line_reader import LineReader
from nekro_agent.errors import LLMError, NekroError, UsageError
from nekro_client.sse import LiveMessage

__all__ = ["Conversation"]

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
