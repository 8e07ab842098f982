"""`nekro chat`: talk to the agent in a terminal."""

from __future__ import annotations

import argparse
import asyncio
import shlex
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from cli.command import Deps, add_chat_key
from cli.commands.files import save
from cli.commands.send import DEFAULT_USER
from cli.exit_codes import ExitCode
from cli.output import one_line
from cli.services.beside import Beside, opened_beside
from cli.services.system import ROUND_LANES, System, open_services
from cli.views.line_reader import LineReader
from cli.views.turns import is_quiet, last_sequence, messages_after, require_model, require_success
from nekro_agent.durations import POLL_SECONDS
from nekro_agent.errors import LLMError, NekroError, UsageError
from nekro_agent.ports import MessageKind

if TYPE_CHECKING:
    from storage.repositories.messages import Message
    from workers.chats.attachments import Attachment
    from workers.chats.files import ChatFiles
    from workers.composition import Services

__all__ = ["Args", "register", "run"]

_EPILOG = """\
examples:
  NEKRO_LLM__BASE_URL=http://127.0.0.1:8000/v1 NEKRO_LLM__MODEL=qwen nekro chat
  nekro chat --chat-key group_1 --user-id ada
  nekro chat --save downloads

  /file PATH [TEXT]    send a file of this host, with a text (quote a path with spaces)
  /save PATH [FILE]    copy a file of the chat, such as one that the agent sent, to this host
  /help                list these commands
  /quit                end; Ctrl-D does the same

Lines can be edited and recalled; they are kept in <data dir>/chat_history. A line that begins with // is sent
without its first /. An empty line does nothing. Ctrl-C stops the running turn; a second one ends the command,
as do two at the prompt. What plugins add to the history is shown after a `·`. The reason of a failed turn
goes to stderr; if it was the last one, the exit code is 12.
"""
_NOTICE_COLUMNS: Final = 120
_COMMANDS: Final = "/file PATH [TEXT], /save PATH [FILE], /help, /quit"


@dataclass(frozen=True, kw_only=True)
class Args:
    """Arguments of `nekro chat`."""

    chat_key: str
    user_id: str
    save: Path | None


def register(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.epilog = _EPILOG
    add_chat_key(parser)
    parser.add_argument(
        "--user-id", metavar="U", default=DEFAULT_USER, help="id of the sender (default: %(default)s)"
    )
    parser.add_argument(
        "--save", metavar="DIR", type=Path, default=None, help="copy the files that the agent sends to DIR"
    )


def run(args: Args, deps: Deps) -> int:
    """Read lines, send them, print the answers."""
    settings = deps.load_settings()
    if args.save is not None and not args.save.is_dir():
        raise UsageError(f"--save: {args.save} is not a folder")
    opening = open_services(
        settings,
        command="chat",
        lanes=ROUND_LANES,
        output=deps.output,
        before_start=require_model,
        needs_workers=False,
    )
    reader = LineReader(deps.output, settings.data_dir / "chat_history")
    with closing(reader), opened_beside(opening) as beside:
        services = beside.value[1]
        chat = beside.run(services.chat(args.chat_key))
        return _Conversation(beside, reader, services.files_of(chat), args, deps).hold()


class _Conversation:
    """One run of the command: the main thread reads lines, the services work beside it."""

    def __init__(
        self,
        beside: Beside[tuple[System, Services]],
        reader: LineReader,
        files: ChatFiles,
        args: Args,
        deps: Deps,
    ) -> None:
        self._beside = beside
        self._services = beside.value[1]
        self._reader = reader
        self._files = files
        self._args = args
        self._output = deps.output
        self._seen = 0
        #: Exit code of the last turn.
        self._code: int = ExitCode.OK

    def hold(self) -> int:
        """Talk until the input ends; returns the exit code."""
        database, chat_key = self._services.database, self._args.chat_key
        self._seen = self._beside.run(last_sequence(database, chat_key))
        self._output.words(f"chat {chat_key}; Ctrl-D ends, /help lists commands")
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
            if line is None or line.strip() == "/quit":
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
                    stored = self._files.add_file(Path(path).expanduser())
                    self._output.words(f"· sends {stored.path}")
                    self._send(text, files=[stored])
                case "/save":
                    path, target = _arguments(rest, usage="/save PATH [FILE]")
                    name = path.rpartition("/")[2]
                    written, size = save(self._files, path, Path(target or name).expanduser())
                    self._output.words(f"· wrote {size} bytes to {written}")
                case _:
                    self._send(line[1:] if line.startswith("//") else line)
        except (UsageError, NekroError) as exc:
            # A mistake in one line does not end the chat.
            self._output.error(exc)

    def _send(self, text: str, *, files: Sequence[Attachment] = ()) -> None:
        user = self._args.user_id
        message_id = self._beside.run(
            self._services.receive_message(
                self._args.chat_key, text, user_id=user, user_name=user, files=files
            )
        )
        if message_id is None:
            self._output.words("· a plugin's hook blocked this message")
            return
        turn = self._beside.begin(self._show_turn())
        try:
            turn.result()
        except KeyboardInterrupt:
            self._output.words("\nstopping the turn; Ctrl-C again ends")
            try:
                self._beside.run(self._stop())
                turn.result()
            except BaseException:
                turn.cancel()
                raise
            self._code = ExitCode.OK
            return
        self._code = self._outcome(message_id)

    def _outcome(self, message_id: str) -> int:
        try:
            self._beside.run(require_success(self._services.database, message_id=message_id))
        except LLMError as exc:
            self._output.error(exc)
            return ExitCode.LLM
        return ExitCode.OK

    async def _stop(self) -> None:
        stopper, seconds = self._services.stopper, self._services.settings.agent.lease_seconds
        await stopper.stop(self._args.chat_key, reason="stopped by Ctrl-C", wait_seconds=seconds)

    async def _show_turn(self) -> None:
        """Print messages until no round waits or runs."""
        database, chat_key, quiet = self._services.database, self._args.chat_key, False
        while True:
            news = await messages_after(database, chat_key, sequence=self._seen)
            for message in news:
                self._seen = message.sequence
                await asyncio.to_thread(self._show, message)
            # Read once more after the end: a message may have arrived between the two queries.
            if quiet and not news:
                return
            quiet = await is_quiet(database, chat_key)
            if not quiet:
                await asyncio.sleep(POLL_SECONDS)

    def _show(self, message: Message) -> None:
        path = (message.data or {}).get("file_path")
        if message.kind is MessageKind.SYSTEM:
            self._output.words(f"· {one_line(message.text, limit=_NOTICE_COLUMNS)}")
        elif message.kind is MessageKind.ASSISTANT:
            if message.text or not path:
                self._output.data(message.text or str(message.data))
            if path:
                self._show_file(str(path))

    def _show_file(self, path: str) -> None:
        folder = self._args.save
        if folder is None:
            self._output.words(f"· file {path}; `/save {path}` copies it here")
            return
        try:
            written, size = save(self._files, path, _free_name(folder / Path(path).name))
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
