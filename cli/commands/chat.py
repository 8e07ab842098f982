"""`nekro chat`: talk to the agent in a terminal."""

from __future__ import annotations

import argparse
import asyncio
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cli.command import Deps, add_chat_key
from cli.commands.send import DEFAULT_USER
from cli.output import one_line
from cli.running import run_async
from cli.services.system import ROUND_LANES, open_services
from cli.views.turns import is_quiet, last_sequence, messages_after, require_model
from nekro_agent.durations import POLL_SECONDS
from nekro_agent.ports import MessageKind

if TYPE_CHECKING:
    from storage.repositories.messages import Message
    from workers.composition import Services

__all__ = ["Args", "register", "run"]

_EPILOG = """\
examples:
  NEKRO_LLM__BASE_URL=http://127.0.0.1:8000/v1 NEKRO_LLM__MODEL=qwen nekro chat
  nekro chat --chat-key group_1 --user-id ada

An empty line does nothing, Ctrl-D ends. What plugins add to the history is shown after a `·`.
"""
_NOTICE_COLUMNS = 120


@dataclass(frozen=True, kw_only=True)
class Args:
    """Arguments of `nekro chat`."""

    chat_key: str
    user_id: str


def register(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.epilog = _EPILOG
    add_chat_key(parser)
    parser.add_argument(
        "--user-id", metavar="U", default=DEFAULT_USER, help="id of the sender (default: %(default)s)"
    )


def run(args: Args, deps: Deps) -> int:
    """Read lines, send them, print the answers."""
    settings = deps.load_settings()

    async def work() -> int:
        async with open_services(
            settings,
            command="chat",
            lanes=ROUND_LANES,
            output=deps.output,
            before_start=require_model,
        ) as (_, services):
            await _converse(services, args, deps)
        return 0

    return run_async(work())


async def _converse(services: Services, args: Args, deps: Deps) -> None:
    seen = await last_sequence(services.database, args.chat_key)
    deps.output.words(f"chat {args.chat_key}; Ctrl-D ends")
    while True:
        line = await asyncio.to_thread(_ask, deps)
        if line is None:
            return
        if not line.strip():
            continue
        await services.receive_message(args.chat_key, line, user_id=args.user_id, user_name=args.user_id)
        seen = await _show_turn(services, args.chat_key, seen, deps)


async def _show_turn(services: Services, chat_key: str, seen: int, deps: Deps) -> int:
    """Print messages until no round waits or runs; returns the position of the last message."""
    quiet = False
    while True:
        news = await messages_after(services.database, chat_key, sequence=seen)
        for message in news:
            seen = message.sequence
            _show(message, deps)
        # Read once more after the end: a message may have arrived between the two queries.
        if quiet and not news:
            return seen
        quiet = await is_quiet(services.database, chat_key)
        if not quiet:
            await asyncio.sleep(POLL_SECONDS)


def _ask(deps: Deps) -> str | None:
    if sys.stdin.isatty():
        deps.output.stderr.write("> ")
        deps.output.stderr.flush()
    line = sys.stdin.readline()
    return line.rstrip("\n") if line else None


def _show(message: Message, deps: Deps) -> None:
    if message.kind is MessageKind.ASSISTANT:
        deps.output.data(message.text or str(message.data))
    elif message.kind is MessageKind.SYSTEM:
        deps.output.words(f"· {one_line(message.text, limit=_NOTICE_COLUMNS)}")
