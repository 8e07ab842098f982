"""`nekro history`: print a chat's messages and, with ``--trace``, its rounds; or its summary."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from broker_config.settings import Settings
from nekro.cli.command import Deps, arg, chat_key, json_flag, positive_int
from nekro.cli.gateway_client import describe_api_message, newest, open_client
from nekro.cli.output import one_line
from nekro.cli.running import run_async
from nekro.cli.services.database import open_database
from nekro.cli.views.round_text import describe_round, round_lines
from nekro.cli.views.turns import newest_messages
from nekro_agent.errors import NotFoundError, UsageError
from nekro_agent.tools.visible_text import visible_lines

if TYPE_CHECKING:
    from nekro_client.models import Round
    from storage.repositories.chats import Summary
    from storage.repositories.messages import Message

__all__ = [
    "EPILOG",
    "Args",
    "describe_message",
    "describe_summary",
    "run",
    "run_over_gateway",
    "show",
]


EPILOG: Final = """\
examples:
  nekro history cli
  nekro history cli --trace
  nekro history cli --limit 5 --json
  nekro history cli --summary

`--json` prints a list of messages {id, at, kind, sender, text, data, call_id, plugin}; with --trace an
object {messages, rounds}, each round with its trigger, prompt size, model, tokens, cost, code, calls
{id, method, type, lane, worker, requested_at, started_at, finished_at, duration_ms, error, follow_up},
output and stop type. Messages from before a reset are shown with --all only.
--summary prints what prompts show in the place of older messages; with --json all kept versions, the newest
first: {chat_key, version, up_to, oldest_at, newest_at, text, group, model, prompt_tokens, answer_tokens,
tokens_estimated, cost, created_at}. `nekro models summarise` writes it again.
"""


@dataclass(frozen=True, kw_only=True)
class Args:
    """Arguments of `nekro history`."""

    chat_key: str = arg(metavar="K", type=chat_key, help="chat")
    trace: bool = arg(
        "--trace", action="store_true", help="also the rounds: prompt, model, cost, code, calls, stop type"
    )
    limit: int = arg(
        "--limit",
        metavar="N",
        type=positive_int,
        default=50,
        help="newest messages shown (default: %(default)s)",
    )
    all: bool = arg("--all", action="store_true", help="also messages from before the last reset")
    summary: bool = arg(
        "--summary", action="store_true", help="instead: the summary of older messages, if there is one"
    )
    json: bool = json_flag()


def run(args: Args, deps: Deps) -> int:
    """Print the chat."""
    if args.summary:
        return _show_summary(args, deps)
    messages, rounds = run_async(_read(args, deps.load_settings()))
    listed = [describe_message(message) for message in messages]
    show(listed, [describe_round(entry) for entry in rounds], args, deps)
    return 0


def _show_summary(args: Args, deps: Deps) -> int:
    versions = run_async(_read_summaries(args.chat_key, deps.load_settings()))
    if args.json:
        deps.output.json([describe_summary(version) for version in versions])
        return 0
    if not versions:
        deps.output.report(f"chat {args.chat_key} has no summary")
        return 0
    newest = versions[0]
    estimated = " (estimated)" if newest.tokens_estimated else ""
    deps.output.report(
        f"version {newest.version}, {newest.created_at:%Y-%m-%d %H:%M:%S}, of messages up to "
        f"{newest.newest_at:%Y-%m-%d %H:%M:%S}, by {one_line(newest.model)} (group {newest.group_name}), "
        f"{newest.prompt_tokens or 0} + {newest.answer_tokens or 0} tokens{estimated}, cost {newest.cost:.6g}"
    )
    deps.output.report("\n    ".join(["", *visible_lines(newest.text)]).lstrip("\n"))
    return 0


async def _read_summaries(chat_key: str, settings: Settings) -> list[Summary]:
    async with open_database(settings) as database, database.read() as transaction:
        await transaction.chats.get(chat_key)
        return await transaction.summaries.versions(chat_key)


def describe_summary(summary: Summary) -> dict[str, Any]:
    """Return one summary as ``--json`` prints it."""
    shown = dataclasses.asdict(summary)
    shown["group"] = shown.pop("group_name")
    return shown


def show(
    messages: Sequence[Mapping[str, Any]], rounds: Sequence[Mapping[str, Any]], args: Args, deps: Deps
) -> None:
    """Print messages and rounds as ``describe_message`` and ``describe_round`` return them."""
    if args.json:
        deps.output.json({"messages": messages, "rounds": rounds} if args.trace else messages)
        return
    for message in messages:
        speaker = one_line(message["sender"] or message["kind"])
        deps.output.report(f"{message['at']:%Y-%m-%d %H:%M:%S}  {speaker}: {_text(message)}")
    for entry in rounds:
        deps.output.report("")
        for line in round_lines(entry):
            deps.output.report(line)


async def _read(args: Args, settings: Settings) -> tuple[list[Message], list[Round]]:
    from nekro.operations.turns import read_rounds
    from storage.repositories.chats import ChatRepository

    async with open_database(settings) as database:
        async with database.read() as transaction:
            if await ChatRepository(transaction.connection).find(args.chat_key) is None:
                raise NotFoundError(f"there is no chat {args.chat_key!r}; `nekro send` creates one")
        messages = await newest_messages(database, args.chat_key, limit=args.limit, with_past=args.all)
        found = (
            await read_rounds(database, args.chat_key, limit=args.limit, before=None) if args.trace else []
        )
    return messages, [entry for _, entry in reversed(found)]


def describe_message(message: Message) -> dict[str, Any]:
    """Return one message as ``--json`` prints it."""
    return {
        "id": message.id,
        "at": message.created_at,
        "kind": message.kind.value,
        "sender": message.sender_name or message.sender_id,
        "text": message.text,
        "data": message.data,
        "call_id": message.call_id,
        "plugin": message.plugin_key,
    }


def _text(message: Mapping[str, Any]) -> str:
    # Indented, so that no line of a message looks like another message.
    lines = visible_lines(message["text"].rstrip("\n"))
    from nekro.app.chats.attachments import attachments_of

    lines += [one_line(f"[{file.kind} {file.path}]") for file in attachments_of(message["data"])]
    return "\n    ".join(lines)


def run_over_gateway(args: Args, deps: Deps) -> int:
    """Print the chat.

    Raises:
        UsageError: the summary is asked for, which is in the database only.
    """
    if args.summary:
        raise UsageError("`--summary` reads the database; unset NEKRO_URL, and run it on a host of the fleet")
    with open_client() as client:
        chat = client.chat(args.chat_key)
        messages = newest(
            lambda cursor, limit: chat.messages(cursor=cursor, limit=limit, with_past=args.all),
            limit=args.limit,
        )
        rounds = (
            newest(lambda cursor, limit: chat.rounds(cursor=cursor, limit=limit), limit=args.limit)
            if args.trace
            else []
        )
    shown = [describe_api_message(message) for message in reversed(messages)]
    show(shown, [describe_round(entry) for entry in reversed(rounds)], args, deps)
    return 0
