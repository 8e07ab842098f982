"""`nekro send`: send one message into a chat, as a user."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from nekro.cli.api import SystemApi, SystemNeed, open_system_api
from nekro.cli.command import Deps, arg, chat_key, json_flag
from nekro.cli.commands.history import describe_message
from nekro.cli.gateway_client import failure_of
from nekro.cli.output import PartialError, one_line
from nekro.cli.running import run_async
from nekro.cli.services.system import ROUND_LANES
from nekro.cli.views.turns import require_model
from nekro_agent.errors import UsageError

if TYPE_CHECKING:
    from nekro.app.services import Services
    from nekro_client.models import Turn

__all__ = [
    "DEFAULT_USER",
    "EPILOG",
    "Args",
    "run",
    "show_answers",
]


EPILOG: Final = """\
examples:
  nekro send group_1 'What is on today?'
  nekro send group_1 'What is on today?' --user-id ada --wait
  nekro send group_1 'What do they say?' --file report.pdf --file data.csv
  nekro send onebot_v11-group_1 'See you tomorrow' --overheard --channel-name Friends

A chat key such as onebot_v11-group_1 names adapter, channel and kind of channel. Options state them for
other keys; they are recorded.

--file stores files of this host in the chat's uploads; a file there that has the name is not replaced. The
agent sees pictures (PNG, JPEG, GIF, WebP) if its model does, and the paths of other files.

Prints the message's id; with --wait, the agent's answers once its turn has ended. Where no system runs,
one is started for the turn, which needs a language model, and --wait is implied. A turn that failed or was
cancelled ends --wait with exit code 12 and the reason. `--json` prints {id, answers}, then with `error`.
"""

DEFAULT_USER = "cli-user"


@dataclass(frozen=True, kw_only=True)
class Args:
    """Arguments of `nekro send`."""

    chat_key: str = arg(metavar="K", type=chat_key, help="chat")
    text: str = arg(metavar="TEXT", nargs="?", default="", help="the message; it may be left out with --file")
    files: list[Path] = arg(
        "--file",
        metavar="PATH",
        type=Path,
        action="append",
        default=[],
        help="picture or file of this host to send along; may be repeated",
    )
    user_id: str = arg(
        "--user-id", metavar="U", default=DEFAULT_USER, help="id of the sender (default: %(default)s)"
    )
    user_name: str | None = arg(
        "--user-name", metavar="NAME", help="name of the sender (default: the user id)"
    )
    wait: bool = arg("--wait", action="store_true", help="wait for the end of the turn")
    overheard: bool = arg(
        "--overheard",
        action="store_true",
        help="the message is not addressed to the agent (is_tome is 0); it starts a turn only if a plugin's "
        "hook returns FORCE_TRIGGER",
    )
    adapter: str | None = arg(
        "--adapter", metavar="KEY", help="adapter of the chat (default: from the chat key)"
    )
    channel_id: str | None = arg(
        "--channel-id", metavar="ID", help="channel within the adapter (default: from the chat key)"
    )
    channel_type: str | None = arg(
        "--channel-type", choices=("group", "private"), help="kind of channel (default: from the chat key)"
    )
    channel_name: str | None = arg(
        "--channel-name", metavar="NAME", help="name of the channel, as prompts show it"
    )
    json: bool = json_flag()


def run(args: Args, deps: Deps) -> int:
    """Send the message; wait for the turn with ``--wait`` or on services of its own."""
    if not args.text.strip() and not args.files:
        raise UsageError("the message is empty; write a text or --file PATH")
    run_async(_send(args, deps))
    return 0


async def _send(args: Args, deps: Deps) -> None:
    channel = _stated_channel(args)
    system = SystemNeed(command="send", lanes=ROUND_LANES, before_start=require_model, asks_up=not channel)
    async with open_system_api(deps, system) as opened:
        await _record_channel(opened.services, args.chat_key, channel)
        posted = await opened.api.chat(args.chat_key).send(
            args.text or None,
            files=args.files,
            user_id=args.user_id,
            user_name=args.user_name,
            to_agent=not args.overheard,
        )
        if posted.message is None:
            raise UsageError(f"a plugin's hook blocks messages of {args.user_id}; nothing was recorded")
        waits = args.wait or opened.own
        turns = await _ended(opened, posted.turn_id) if waits and posted.turn_id else []
    messages = [message for turn in turns for message in turn.messages]
    answers = [describe_message(message) for message in messages if message.kind == "assistant"]
    described = {"id": posted.message.id, "answers": answers}
    failure = failure_of(turns[0]) if turns else None
    if args.json and failure is None:
        deps.output.json(described)
    if not (args.json or waits):
        deps.output.data(posted.message.id)
    if not args.json:
        show_answers(answers, deps)
    if failure is not None:
        raise PartialError(failure, described)


def _stated_channel(args: Args) -> dict[str, str]:
    """Return what the options say of the chat."""
    stated = {
        "adapter_key": args.adapter,
        "channel_id": args.channel_id,
        "channel_type": args.channel_type,
        "channel_name": args.channel_name,
    }
    return {name: value for name, value in stated.items() if value is not None}


async def _record_channel(services: Services | None, chat_key: str, channel: Mapping[str, str]) -> None:
    """Record what the options say of the chat.

    Raises:
        UsageError: the message goes over a gateway, which takes that from the chat key.
    """
    if not channel:
        return
    if services is None:
        option = next(iter(channel)).removesuffix("_key").replace("_", "-")
        raise UsageError(f"--{option} is not stated over a gateway; the chat key names adapter and channel")
    from nekro.app.chats.writer import ensure_chat

    async with services.database.begin() as transaction:
        await ensure_chat(transaction, chat_key, **channel)


async def _ended(opened: SystemApi, turn_id: str) -> list[Turn]:
    """Wait for the end of a turn; returns it, and the one into which it was merged: that has the answers."""
    services = opened.services
    seconds = None if services is None else services.settings.agent.turn_seconds
    turn = await opened.api.turns.wait(turn_id, timeout_seconds=seconds)
    return [turn] if turn.merged_into is None else [turn, await opened.api.turns.get(turn.merged_into)]


def show_answers(answers: Sequence[Mapping[str, Any]], deps: Deps) -> None:
    """Print messages as ``describe_message`` returns them: texts as they are, files by their paths."""
    from nekro.app.chats.attachments import attachments_of

    for answer in answers:
        files = attachments_of(answer["data"])
        if answer["text"] or not files:
            deps.output.data(answer["text"])
        for file in files:
            deps.output.data(one_line(f"[{file.kind} {file.path}]"))
