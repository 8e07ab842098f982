"""A conversation with the agent in a terminal, over the API.

The main thread reads lines, with editing, a history and completion of file names; an event loop beside it
does the rest.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from nekro.cli.gateway_client import failure_of
from nekro.cli.output import Output, one_line
from nekro.cli.running import ExitCode
from nekro.cli.views.line_reader import BackgroundContext, InputReader
from nekro_agent.errors import LLMError, NekroError, NotFoundError, UsageError
from nekro_client.event_types import EventType
from nekro_client.sse import LiveMessage, is_restart

if TYPE_CHECKING:
    from nekro.cli.api import SystemApi
    from nekro_client.models import Event, FileInfo

__all__ = [
    "ChatSession",
]


_NOTICE_COLUMNS: Final = 120

_COMMANDS: Final = "/file PATH [TEXT], /save PATH [FILE], /help, /quit"

_ENDS: Final = frozenset({"/quit", "exit", "quit"})


class ChatSession:
    """Reads lines in the main thread; sends them and prints what follows on the loop beside it."""

    def __init__(
        self,
        beside: BackgroundContext[SystemApi],
        reader: InputReader,
        output: Output,
        *,
        chat_key: str,
        user_id: str,
        save: Path | None,
    ) -> None:
        """Begin; ``save``: folder that gets the files that the agent sends, None for none."""
        self._beside, self._reader, self._output = beside, reader, output
        self._api = beside.value.api
        self._chat = self._api.chat(chat_key)
        self._chat_key, self._user_id = chat_key, user_id
        self._folder = save
        #: Number of the last event that was shown.
        self._seen = beside.run(self._chat.last_event_number())
        #: What the model writes, as far as it was shown; a pipe gets whole messages only.
        self._live = LiveMessage()
        #: Exit code of the last turn.
        self._code: int = ExitCode.OK

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
        """Carry out a line; a mistake in one does not end the chat."""
        try:
            with self._beside.value.errors():
                self._carry_out(line)
        except NekroError as exc:
            self._output.error(exc)

    def _carry_out(self, line: str) -> None:
        """Run a line that begins with a command of this program, or send it."""
        name, _, rest = line.partition(" ")
        match name:
            case "/help":
                self._output.words(_COMMANDS)
            case "/file":
                path, text = _arguments(rest, usage="/file PATH [TEXT]")
                stored = self._beside.run(self._chat.files.store(_file(path)))
                self._output.words(f"· sends {stored.path}")
                self._send(text, [stored])
            case "/save":
                path, target = _arguments(rest, usage="/save PATH [FILE]")
                name = path.rpartition("/")[2]
                written, size = self._beside.run(self._save(path, Path(target or name).expanduser()))
                self._output.words(f"· wrote {size} bytes to {written}")
            case _:
                self._send(line[1:] if line.startswith("//") else line, [])

    def _send(self, text: str, files: Sequence[FileInfo]) -> None:
        posted = self._beside.run(
            self._chat.send(text or None, stored=files, user_id=self._user_id, user_name=self._user_id)
        )
        if posted.message is None:
            self._output.words("· a plugin's hook blocked this message")
            return
        self._code = ExitCode.OK
        failure = self._follow(posted.turn_id)
        if failure is not None:
            self._output.error(failure)
            self._code = ExitCode.LLM

    def _follow(self, turn_id: str | None) -> LLMError | None:
        """Show what follows from a message, up to the end of its turn if it starts one.

        Returns:
            Why the turn failed; None also if Ctrl-C stopped it.
        """
        showing = self._beside.begin(self._show_events(turn_id))
        try:
            showing.result()
        except KeyboardInterrupt:
            self._output.words("\nstopping the turn; Ctrl-C again ends")
            try:
                if turn_id is not None:
                    self._beside.run(self._api.turns.cancel(turn_id))
                showing.result()
            except BaseException:
                showing.cancel()
                raise
            return None
        return None if turn_id is None else failure_of(self._beside.run(self._api.turns.get(turn_id)))

    async def _show_events(self, turn_id: str | None) -> None:
        # A message without a turn may still be answered by a plugin's hook.
        last = await self._chat.last_event_number() if turn_id is None else None
        if last == self._seen:
            return
        async with self._chat.events(after=self._seen) as events:
            async for event in events:
                if event.number is None:
                    if event.type == EventType.MESSAGE_DELTA:
                        self._show_words(event.round_id, event.data)
                    continue
                self._seen = event.number
                await self._show(event)
                if event.number == last or (event.type == EventType.TURN_ENDED and event.turn_id == turn_id):
                    return

    async def _show(self, event: Event) -> None:
        text = str(event.data.get("text", ""))
        if event.type == EventType.MESSAGE_NOTED:
            self._output.words(f"· {one_line(text, limit=_NOTICE_COLUMNS)}")
        elif event.type in (EventType.MESSAGE_SENT, EventType.FILE_SENT):
            self._show_text(text, event.round_id)
            if (path := event.data.get("file_path")) is not None:
                await self._show_file(str(path))
        elif event.type in (EventType.MESSAGE_WITHDRAWN, EventType.ROUND_ENDED) or is_restart(event):
            self._end_words(event.round_id, begins=is_restart(event))

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

    def _show_text(self, text: str, round_id: str | None) -> None:
        """Show a text that the agent sent.

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

    async def _show_file(self, path: str) -> None:
        if self._folder is None:
            self._output.words(f"· file {path}; `/save {path}` copies it here")
            return
        try:
            written, size = await self._save(path, _free_name(self._folder / Path(path).name))
        except NekroError as exc:
            self._output.words(f"· file {path} was not saved: {exc}")
        else:
            self._output.words(f"· file {path}: wrote {size} bytes to {written}")

    async def _save(self, path: str, target: Path) -> tuple[Path, int]:
        """Copy a file of the chat to this host; returns the written file and its size in bytes."""
        from nekro_agent.tools.path_convertor import absolute_sandbox_path

        wanted = str(absolute_sandbox_path(path))
        found = next((file for file in await self._chat.files.list() if file.path == wanted), None)
        if found is None:
            raise NotFoundError(f"the chat has no file {path}; `nekro files list` lists its files")
        target = _in_folder(target, Path(path).name)
        try:
            return target, await self._chat.files.download(found.id, target)
        except FileExistsError as exc:
            raise UsageError(f"{target} exists; name another file") from exc
        except OSError as exc:
            raise UsageError(f"cannot write {target}: {exc.strerror}") from exc


def _in_folder(path: Path, name: str) -> Path:
    return path / name if path.is_dir() else path


def _file(path: str) -> Path:
    """Return a file of this host.

    Raises:
        UsageError: it is none.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise UsageError(f"{path} {'is not an ordinary file' if file.exists() else 'does not exist'}")
    return file


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
