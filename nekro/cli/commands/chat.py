"""`nekro chat`: talk to the agent in a terminal."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from nekro.cli.api import SystemApi, SystemNeed, is_over_gateway, open_system_api
from nekro.cli.command import Deps, arg, chat_key_option
from nekro.cli.commands.send import DEFAULT_USER
from nekro.cli.services.system import ROUND_LANES
from nekro.cli.views.conversation import ChatSession
from nekro.cli.views.line_reader import InputReader, opened_in_background
from nekro.cli.views.turns import require_model
from nekro_agent.errors import UsageError

__all__ = [
    "EPILOG",
    "Args",
    "run",
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
    if args.save is not None and not args.save.is_dir():
        raise UsageError(f"--save: {args.save} is not a folder")
    reader = InputReader(deps.output, _history_file(deps))
    with closing(reader), opened_in_background(_opening(deps)) as beside, beside.value.errors():
        talk = ChatSession(
            beside, reader, deps.output, chat_key=args.chat_key, user_id=args.user_id, save=args.save
        )
        return talk.hold()


def _history_file(deps: Deps) -> Path:
    """Return where lines are kept; over a gateway not in the data directory, which is the fleet's."""
    if is_over_gateway():
        return Path.home() / ".local" / "state" / "nekro" / "chat_history"
    return deps.load_settings().data_dir / "chat_history"


def _opening(deps: Deps) -> AbstractAsyncContextManager[SystemApi]:
    system = SystemNeed(command="chat", lanes=ROUND_LANES, before_start=require_model, asks_up=True)
    return open_system_api(deps, system)
