"""`nekro history`: a chat's messages, and how its rounds went."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from broker_config.settings import Settings
from cli.command import Deps, add_json, chat_key, positive_int
from cli.output import one_line
from cli.running import run_async
from cli.turns import newest_messages, newest_rounds
from nekro_agent.errors import NotFoundError

if TYPE_CHECKING:
    from storage.messages import Message
    from storage.rounds import Round

__all__ = ["Args", "register", "run"]

_EPILOG = """\
examples:
  nekro history cli
  nekro history cli --trace
  nekro history cli --limit 5 --json

`--json` prints a list of messages {id, at, kind, sender, text, data, call_id, plugin}; with --trace an
object {messages, rounds}. Messages from before a reset are shown with --all only.
"""
_TEXT_COLUMNS = 100


@dataclass(frozen=True, kw_only=True)
class Args:
    """Arguments of `nekro history`."""

    chat_key: str
    trace: bool
    limit: int
    all: bool
    json: bool


def register(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.epilog = _EPILOG
    parser.add_argument("chat_key", metavar="K", type=chat_key, help="chat")
    parser.add_argument(
        "--trace", action="store_true", help="also the rounds: trigger, worker, stop type, code"
    )
    parser.add_argument(
        "--limit",
        metavar="N",
        type=positive_int,
        default=50,
        help="newest messages shown (default: %(default)s)",
    )
    parser.add_argument("--all", action="store_true", help="also messages from before the last reset")
    add_json(parser)


def run(args: Args, deps: Deps) -> int:
    """Print the chat."""
    messages, rounds = run_async(_read(args, deps.load_settings()))
    if args.json:
        listed = [describe_message(message) for message in messages]
        traced = [describe_round(entry) for entry in rounds]
        deps.output.json({"messages": listed, "rounds": traced} if args.trace else listed)
        return 0
    for message in messages:
        speaker = message.sender_name or message.sender_id or message.kind.value
        deps.output.data(f"{message.created_at:%Y-%m-%d %H:%M:%S}  {speaker}: {_text(message)}")
    if args.trace:
        deps.output.data("")
        rows = [_row(entry) for entry in rounds]
        deps.output.table(("TURN", "ROUND", "TRIGGER", "STATE", "STOP", "SECONDS", "WORKER", "WHAT"), rows)
    return 0


async def _read(args: Args, settings: Settings) -> tuple[Sequence[Message], Sequence[Round]]:
    from storage.chats import ChatRepository
    from storage.engine import Database
    from storage.migrate import require_migrated

    await require_migrated(settings.database, settings.data_dir)
    database = Database(settings.database, settings.data_dir)
    try:
        async with database.read() as transaction:
            if await ChatRepository(transaction.connection).find(args.chat_key) is None:
                raise NotFoundError(f"there is no chat {args.chat_key!r}; `nekro send` begins one")
        messages = await newest_messages(database, args.chat_key, limit=args.limit, with_past=args.all)
        rounds = await newest_rounds(database, args.chat_key, limit=args.limit) if args.trace else []
    finally:
        await database.dispose()
    return messages, rounds


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


def describe_round(entry: Round) -> dict[str, Any]:
    """Return one round as ``--json --trace`` prints it."""
    return {
        "id": entry.id,
        "turn": entry.turn_id,
        "number": entry.number,
        "trigger": entry.trigger_kind.value,
        "state": entry.state.value,
        "stop_type": _stop_name(entry),
        "worker": entry.worker,
        "requested_at": entry.requested_at,
        "started_at": entry.started_at,
        "finished_at": entry.finished_at,
        "model": entry.model,
        "answer": entry.answer,
        "code": entry.code,
        "output": entry.output,
        "observation": entry.observation,
        "error": entry.error,
    }


def _row(entry: Round) -> tuple[object, ...]:
    lasted = ""
    if entry.started_at is not None and entry.finished_at is not None:
        lasted = f"{(entry.finished_at - entry.started_at).total_seconds():.2f}"
    what = entry.error or (entry.output or "").strip() or (entry.answer or "").strip()
    return (
        entry.turn_id[:8],
        entry.number,
        entry.trigger_kind.value,
        entry.state.value,
        _stop_name(entry) or "",
        lasted,
        entry.worker,
        one_line(what, limit=_TEXT_COLUMNS),
    )


def _stop_name(entry: Round) -> str | None:
    from sandbox.models import StopType

    return None if entry.stop_type is None else StopType(entry.stop_type).name


def _text(message: Message) -> str:
    # Lines of a message are indented, so that nobody can write a line that looks like another's message.
    lines = message.text.splitlines()
    path = (message.data or {}).get("file_path")
    if path:
        lines.append(f"[file {path}]")
    return "\n    ".join(lines)
