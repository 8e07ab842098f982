"""`nekro send`: send one message into a chat, as a user."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from nekro.cli.command import Deps, arg, chat_key, json_flag
from nekro.cli.commands.history import describe_message
from nekro.cli.gateway_client import failure_of, open_client
from nekro.cli.output import PartialError, one_line
from nekro.cli.running import run_async
from nekro.cli.services.system import ROUND_LANES, open_services
from nekro.cli.views.turns import (
    last_sequence,
    messages_after,
    require_model,
    require_success,
    wait_for_quiet,
)
from nekro_agent.errors import LLMError, UsageError
from nekro_agent.ports import MessageKind

if TYPE_CHECKING:
    from nekro.app.chats.attachments import Attachment
    from nekro.app.services import Services
    from storage.engine import Database

__all__ = [
    "DEFAULT_USER",
    "EPILOG",
    "Args",
    "run",
    "run_over_gateway",
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
    settings = deps.load_settings()

    async def work() -> int:
        from nekro.app import use_cases
        from nekro.operations.chats import message_answer

        async with open_services(
            settings,
            command="send",
            lanes=ROUND_LANES,
            output=deps.output,
            before_start=require_model,
            needs_workers=False,
        ) as (system, services):
            files = await _stored(services, args)
            before = await last_sequence(services.database, args.chat_key)
            message_id = await use_cases.receive_message(
                services,
                args.chat_key,
                args.text,
                user_id=args.user_id,
                user_name=args.user_name or args.user_id,
                is_tome=not args.overheard,
                adapter_key=args.adapter,
                channel_id=args.channel_id,
                channel_type=args.channel_type,
                channel_name=args.channel_name,
                files=files,
            )
            if message_id is None:
                raise UsageError(f"a plugin's hook blocks messages of {args.user_id}; nothing was recorded")
            waits = args.wait or system.own
            if waits:
                seconds = settings.agent.turn_seconds
                await wait_for_quiet(services.database, args.chat_key, seconds=seconds)
            news = await messages_after(services.database, args.chat_key, sequence=before)
            failure = await _failure(services.database, message_id) if waits else None
        answers = [message for message in news if waits and message.kind is MessageKind.ASSISTANT]
        shown = [describe_message(message_answer(answer, services.file_ids)) for answer in answers]
        described = {"id": message_id, "answers": shown}
        if args.json and failure is None:
            deps.output.json(described)
        if not (args.json or waits):
            deps.output.data(message_id)
        if not args.json:
            show_answers(shown, deps)
        if failure is not None:
            raise PartialError(failure, described)
        return 0

    return run_async(work())


def show_answers(answers: Sequence[Mapping[str, Any]], deps: Deps) -> None:
    """Print messages as ``describe_message`` returns them: texts as they are, files by their paths."""
    from nekro.app.chats.attachments import attachments_of

    for answer in answers:
        files = attachments_of(answer["data"])
        if answer["text"] or not files:
            deps.output.data(answer["text"])
        for file in files:
            deps.output.data(one_line(f"[{file.kind} {file.path}]"))


async def _stored(services: Services, args: Args) -> list[Attachment]:
    if not args.files:
        return []
    area = services.files_of(await services.chat(args.chat_key))
    return [await asyncio.to_thread(area.add_file, path) for path in args.files]


async def _failure(database: Database, message_id: str) -> LLMError | None:
    try:
        await require_success(database, message_id=message_id)
    except LLMError as exc:
        return exc
    return None


def run_over_gateway(args: Args, deps: Deps) -> int:
    """Send the message; with ``--wait`` until its turn has ended."""
    if not args.text.strip() and not args.files:
        raise UsageError("the message is empty; write a text or --file PATH")
    stated = {"--adapter": args.adapter, "--channel-id": args.channel_id, "--channel-type": args.channel_type,
              "--channel-name": args.channel_name}  # fmt: skip
    for option, value in stated.items():
        if value is not None:
            raise UsageError(f"{option} is not stated over a gateway; the chat key names adapter and channel")
    with open_client() as client:
        posted = client.chat(args.chat_key).send(
            args.text or None,
            files=args.files,
            user_id=args.user_id,
            user_name=args.user_name,
            to_agent=not args.overheard,
        )
        if posted.message is None:
            raise UsageError(f"a plugin's hook blocks messages of {args.user_id}; nothing was recorded")
        turn = client.turns.wait(posted.turn_id) if args.wait and posted.turn_id else None
    answers = [message for message in turn.messages if message.kind == "assistant"] if turn else []
    shown = [describe_message(answer) for answer in answers]
    described = {"id": posted.message.id, "answers": shown}
    failure = None if turn is None else failure_of(turn)
    if args.json and failure is None:
        deps.output.json(described)
    if not (args.json or args.wait):
        deps.output.data(posted.message.id)
    if not args.json:
        show_answers(shown, deps)
    if failure is not None:
        raise PartialError(failure, described)
    return 0
