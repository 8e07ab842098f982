"""`nekro chat` over a gateway."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path, PurePosixPath

from nekro.cli.command import Deps
from nekro.cli.commands.chat import Args
from nekro.cli.remote.files import find, save
from nekro.cli.remote.messages import failure_of
from nekro.cli.remote.target import open_client
from nekro.cli.views.conversation import Conversation, LineReader
from nekro_agent.errors import UsageError
from nekro_client import Chat, Client
from nekro_client.models import Event, EventType, FileInfo
from nekro_client.sse import is_restart

__all__ = ["run"]


def run(args: Args, deps: Deps) -> int:
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
        return save(self._chat.files, find(self._chat.files, path), target)

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
