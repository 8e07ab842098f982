"""`nekro history`: print a chat's messages and, with ``--trace``, its rounds; or its summary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from nekro.cli.api import all_of, open_api
from nekro.cli.command import Deps, arg, chat_key, json_flag, positive_int
from nekro.cli.output import one_line
from nekro.cli.running import run_async
from nekro.cli.views.round_text import describe_round, round_lines
from nekro_agent.tools.visible_text import visible_lines

if TYPE_CHECKING:
    from nekro_client.models import Message, Summary, TurnSummary

__all__ = [
    "EPILOG",
    "Args",
    "describe_message",
    "run",
    "show",
    "show_summaries",
]


EPILOG: Final = """\
examples:
  nekro history cli
  nekro history cli --trace
  nekro history cli --limit 5 --json
  nekro history cli --summary

`--json` prints a list of messages {id, at, kind, sender, text, data, call_id, plugin}; with --trace an
object {messages, rounds, waits}, each round with its trigger, prompt size, model, tokens, cost, code, calls
{id, method, type, lane, worker, requested_at, started_at, finished_at, duration_ms, error, follow_up},
output and stop type, and each turn that waits: {turn, approvals, waits}. Without --json, what turns wait for
are the last lines. Messages from before a reset are shown with --all only.
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
    run_async(_run(args, deps))
    return 0


async def _run(args: Args, deps: Deps) -> None:
    from nekro_client.models import TurnState

    async with open_api(deps, asks_up=True) as api:
        chat = api.chat(args.chat_key)
        if args.summary:
            show_summaries(await chat.summaries(), args, deps)
            return
        messages = await all_of(partial(chat.messages, with_past=args.all), limit=args.limit)
        rounds = await all_of(chat.rounds, limit=args.limit) if args.trace else []
        turns = await all_of(partial(chat.turns, state=TurnState.WAITING), limit=args.limit)
    described = [describe_message(message) for message in reversed(messages)]
    waits = [turn for turn in reversed(turns) if turn.waits or turn.waits_for]
    show(described, [describe_round(entry) for entry in reversed(rounds)], waits, args, deps)


def show_summaries(versions: Sequence[Summary], args: Args, deps: Deps) -> None:
    """Print the newest summary; ``--json`` prints all."""
    if args.json:
        deps.output.json([version.model_dump() for version in versions])
        return
    if not versions:
        deps.output.report(f"chat {args.chat_key} has no summary")
        return
    newest = versions[0]
    estimated = " (estimated)" if newest.tokens_estimated else ""
    deps.output.report(
        f"version {newest.version}, {newest.created_at:%Y-%m-%d %H:%M:%S}, of messages up to "
        f"{newest.newest_at:%Y-%m-%d %H:%M:%S}, by {one_line(newest.model)} (group {newest.group}), "
        f"{newest.prompt_tokens or 0} + {newest.answer_tokens or 0} tokens{estimated}, cost {newest.cost:.6g}"
    )
    deps.output.report("\n    ".join(["", *visible_lines(newest.text)]).lstrip("\n"))


def show(
    messages: Sequence[Mapping[str, Any]],
    rounds: Sequence[Mapping[str, Any]],
    waits: Sequence[TurnSummary],
    args: Args,
    deps: Deps,
) -> None:
    """Print what ``describe_message`` and ``describe_round`` return, and turns that wait."""
    if args.json:
        waiting = [
            {"turn": turn.id, "approvals": turn.waits_for, "waits": [one.model_dump() for one in turn.waits]}
            for turn in waits
        ]
        whole = {"messages": messages, "rounds": rounds, "waits": waiting}
        deps.output.json(whole if args.trace else messages)
        return
    for message in messages:
        speaker = one_line(message["sender"] or message["kind"])
        deps.output.report(f"{message['at']:%Y-%m-%d %H:%M:%S}  {speaker}: {_text(message)}")
    for entry in rounds:
        deps.output.report("")
        for line in round_lines(entry):
            deps.output.report(line)
    for turn in waits:
        deps.output.report(f"turn {turn.id[:8]} waits {'; '.join(_waits_of(turn))}")


def _waits_of(turn: TurnSummary) -> list[str]:
    from nekro.cli.views.turn_text import wait_text

    return [*(f"for approval {approval_id}" for approval_id in turn.waits_for), *map(wait_text, turn.waits)]


def describe_message(message: Message) -> dict[str, Any]:
    """Return one message as ``--json`` prints it."""
    return {
        "id": message.id,
        "at": message.created_at,
        "kind": message.kind,
        "sender": message.sender_name or message.sender_id,
        "text": message.text,
        "data": message.data,
        "call_id": message.call_id,
        "plugin": message.plugin,
    }


def _text(message: Mapping[str, Any]) -> str:
    # Indented, so that no line of a message looks like another message.
    lines = visible_lines(message["text"].rstrip("\n"))
    from nekro.app.chats.attachments import attachments_of

    lines += [one_line(f"[{file.kind} {file.path}]") for file in attachments_of(message["data"])]
    return "\n    ".join(lines)
