"""`nekro chat`: talk to the agent in a terminal."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import aclosing, closing, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Final

from nekro.base.tasks import end_tasks
from nekro.cli.command import Deps, arg, chat_key_option
from nekro.cli.commands.files import download, find_file, save
from nekro.cli.commands.send import DEFAULT_USER
from nekro.cli.gateway_client import failure_of, open_client
from nekro.cli.local_events import chat_events
from nekro.cli.services.system import ROUND_LANES, System, open_services
from nekro.cli.views.conversation import BackgroundContext, Conversation, LineReader, opened_in_background
from nekro.cli.views.turns import is_quiet, last_sequence, messages_after, require_model, require_success
from nekro_agent.durations import POLL_SECONDS
from nekro_agent.errors import BrokerUnavailableError, UsageError
from nekro_agent.ports import MessageKind
from nekro_client.models import Event, EventType, FileInfo
from nekro_client.sse import is_restart

if TYPE_CHECKING:
    from nekro.app.chats.attachments import Attachment
    from nekro.app.chats.files import ChatFiles
    from nekro.app.services import Services
    from nekro_client import Chat, Client
    from storage.repositories.messages import Message

__all__ = [
    "EPILOG",
    "Args",
    "run",
    "run_over_gateway",
]


EPILOG: Final = """\
examples:
  NEKRO_LLM__BASE_URL=http://127.0.0.1:8000/v1 NEKRO_LLM__MODEL=qwen nekro chat
  nekro chat --chat-key group_1 --user-id ada
  nekro chat --save downloads

  /file PATH [TEXT]    send a file of this host, with a text (quote a path with spaces)
  /save PATH [FILE]    copy a file of the chat, such as one that the agent sent, to this host
  /help                list these commands
  /quit                end; exit, quit and Ctrl-D do the same

Lines can be edited and recalled; they are kept in <data dir>/chat_history. A line that begins with // is sent
without its first /. An empty line does nothing. Ctrl-C stops the running turn; a second one ends the command,
as do two at the prompt. What plugins add to the history is shown after a `·`. The reason of a failed turn
goes to stderr; if it was the last one, the exit code is 12.
"""


@dataclass(frozen=True, kw_only=True)
class Args:
    """Arguments of `nekro chat`."""

    chat_key: str = chat_key_option()
    user_id: str = arg(
        "--user-id", metavar="U", default=DEFAULT_USER, help="id of the sender (default: %(default)s)"
    )
    save: Path | None = arg(
        "--save", metavar="DIR", type=Path, help="copy the files that the agent sends to DIR"
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
    with closing(reader), opened_in_background(opening) as beside:
        services = beside.value[1]
        chat = beside.run(services.chat(args.chat_key))
        return _Local(beside, reader, services.files_of(chat), args, deps).hold()


class _Local(Conversation["Attachment"]):
    """On the system of the settings: the main thread reads lines, the services work beside it."""

    def __init__(
        self,
        beside: BackgroundContext[tuple[System, Services]],
        reader: LineReader,
        files: ChatFiles,
        args: Args,
        deps: Deps,
    ) -> None:
        super().__init__(reader, deps.output, chat_key=args.chat_key, save=args.save)
        self._beside = beside
        self._services = beside.value[1]
        self._files = files
        self._user_id = args.user_id
        #: Held by what writes to the terminal: messages and live words.
        self._showing = asyncio.Lock()
        self._seen = beside.run(last_sequence(self._services.database, args.chat_key))

    def _put(self, path: Path) -> tuple[Attachment, str]:
        stored = self._files.add_file(path)
        return stored, stored.path

    def _save(self, path: str, target: Path) -> tuple[Path, int]:
        return save(self._files, path, target)

    def _post(self, text: str, files: Sequence[Attachment]) -> str | None:
        from nekro.app import use_cases

        user = self._user_id
        return self._beside.run(
            use_cases.receive_message(
                self._services, self._chat_key, text, user_id=user, user_name=user, files=files
            )
        )

    def _follow(self, posted: str, *, on_interrupt: Callable[[], None]) -> bool:
        turn = self._beside.begin(self._show_turn())
        try:
            turn.result()
        except KeyboardInterrupt:
            on_interrupt()
            try:
                self._beside.run(self._stop())
                turn.result()
            except BaseException:
                turn.cancel()
                raise
            return False
        return True

    def _require_success(self, posted: str) -> None:
        self._beside.run(require_success(self._services.database, message_id=posted))

    async def _stop(self) -> None:
        stopper, seconds = self._services.stopper, self._services.settings.agent.lease_seconds
        await stopper.stop(self._chat_key, reason="stopped by Ctrl-C", wait_seconds=seconds)

    async def _show_turn(self) -> None:
        """Print messages until no round waits or runs; at a terminal also what the model writes."""
        live = asyncio.create_task(self._show_live()) if self._output.is_terminal else None
        try:
            await self._show_messages()
        finally:
            await end_tasks(live)

    async def _show_messages(self) -> None:
        database, chat_key, quiet = self._services.database, self._chat_key, False
        while True:
            news = await messages_after(database, chat_key, sequence=self._seen)
            for message in news:
                self._seen = message.sequence
                async with self._showing:
                    await asyncio.to_thread(self._show, message)
            # Read once more after the end: a message may have arrived between the two queries.
            if quiet and not news:
                return
            quiet = await is_quiet(database, chat_key)
            if not quiet:
                await asyncio.sleep(POLL_SECONDS)

    def _show(self, message: Message) -> None:
        if message.kind is MessageKind.SYSTEM:
            self._show_notice(message.text)
        elif message.kind is MessageKind.ASSISTANT:
            path = (message.data or {}).get("file_path")
            text = message.text or ("" if path else str(message.data))
            self._show_answer(text, None if path is None else str(path), message.round_id)

    async def _show_live(self) -> None:
        """Show what the model writes, until it is cancelled."""
        from nekro.operations.actor import LOCAL, Actor

        actor = Actor(services=self._services, identity=LOCAL)
        with suppress(BrokerUnavailableError):  # the messages follow
            async with aclosing(chat_events(actor, self._chat_key)) as events:
                async for event in events:
                    async with self._showing:
                        await asyncio.to_thread(self._show_event, event)

    def _show_event(self, event: Event) -> None:
        if event.type == EventType.MESSAGE_DELTA:
            self._show_words(event.round_id, event.data)
        elif event.type == EventType.MESSAGE_WITHDRAWN or is_restart(event):
            self._end_words(event.round_id, begins=is_restart(event))


def run_over_gateway(args: Args, deps: Deps) -> int:
    """Read lines, send them, print the answers."""
    if args.save is not None and not args.save.is_dir():
        raise UsageError(f"--save: {args.save} is not a folder")
    reader = LineReader(deps.output, _history_file())
    with closing(reader), open_client() as client:
        return _Remote(client, reader, args, deps).hold()


def _history_file() -> Path:
    """Return where lines are kept; not in the data directory, which is the fleet's."""
    return Path.home() / ".local" / "state" / "nekro" / "chat_history"


class _Remote(Conversation[FileInfo]):
    """Over a gateway: the event stream shows what happens."""

    def __init__(self, client: Client, reader: LineReader, args: Args, deps: Deps) -> None:
        super().__init__(reader, deps.output, chat_key=args.chat_key, save=args.save)
        self._client = client
        self._chat: Chat = client.chat(args.chat_key)
        self._user_id = args.user_id
        self._seen = self._chat.last_event_number()

    def _put(self, path: Path) -> tuple[FileInfo, str]:
        stored = self._chat.files.store(path)
        return stored, stored.path

    def _save(self, path: str, target: Path) -> tuple[Path, int]:
        return download(self._chat.files, find_file(self._chat.files, path), target)

    def _post(self, text: str, files: Sequence[FileInfo]) -> str | None:
        posted = self._chat.send(text or None, stored=files, user_id=self._user_id, user_name=self._user_id)
        return None if posted.message is None else posted.turn_id or ""

    def _follow(self, posted: str, *, on_interrupt: Callable[[], None]) -> bool:
        if not posted:
            return True  # the message starts no turn
        try:
            self._show_until_end(posted)
        except KeyboardInterrupt:
            on_interrupt()
            self._client.turns.cancel(posted)
            self._show_until_end(posted)
            return False
        return True

    def _require_success(self, posted: str) -> None:
        failure = failure_of(self._client.turns.get(posted)) if posted else None
        if failure is not None:
            raise failure

    def _show_until_end(self, turn_id: str) -> None:
        with self._chat.events(after=self._seen) as events:
            for event in events:
                if event.number is None:
                    if event.type == EventType.MESSAGE_DELTA:
                        self._show_words(event.round_id, event.data)
                    continue
                self._seen = event.number
                self._show(event)
                if event.type == EventType.TURN_ENDED and event.turn_id == turn_id:
                    return

    def _show(self, event: Event) -> None:
        text = str(event.data.get("text", ""))
        if event.type == EventType.MESSAGE_NOTED:
            self._show_notice(text)
        elif event.type in (EventType.MESSAGE_SENT, EventType.FILE_SENT):
            path = event.data.get("file_path")
            path = None if path is None else str(PurePosixPath(str(path)))
            self._show_answer(text, path, event.round_id)
        elif event.type in (EventType.MESSAGE_WITHDRAWN, EventType.ROUND_ENDED) or is_restart(event):
            self._end_words(event.round_id, begins=is_restart(event))
