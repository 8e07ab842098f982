"""`nekro tail`: print a chat's events as they happen."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from broker_config.settings import Settings
from nekro.cli.api import is_over_gateway, open_api
from nekro.cli.command import Deps, arg, chat_key, positive_int, positive_number
from nekro.cli.output import one_line
from nekro.cli.running import run_async
from nekro.cli.services.ownership import require_running
from nekro.cli.services.presence import require_broker
from nekro_agent.tools.visible_text import visible_lines

__all__ = [
    "EPILOG",
    "Args",
    "run",
    "show",
    "show_output",
]


EPILOG: Final = """\
examples:
  nekro tail group_1
  nekro tail group_1 --json --count 3
  nekro tail group_1 --seconds 60

Prints messages, turns, rounds, calls and jobs of the chat as they are recorded, with the code of rounds, what
it prints while it runs, and the arguments and results of calls. Past events are not shown
(`nekro history` shows the past). They are read from the database; a channel of Redis only announces new rows.
Ctrl-C, --count and --seconds end it with exit code 0. `--json` prints one object per line: {number, type, at,
chat_key, turn_id, round_id, call_id, message_id, data}.
"""

_TEXT_COLUMNS: Final = 100
#: Lines of a round's code that are shown.
_CODE_LINES: Final = 40
#: Data of rounds, calls and jobs that a line shows.
_SHOWN: Final = ("method", "type", "state", "stop_type", "percent", "message", "model")


@dataclass(frozen=True, kw_only=True)
class Args:
    """Arguments of `nekro tail`."""

    chat_key: str = arg(metavar="K", type=chat_key, help="chat")
    count: int | None = arg("--count", metavar="N", type=positive_int, help="end after N events")
    seconds: float | None = arg("--seconds", metavar="S", type=positive_number, help="end after S seconds")
    json: bool = arg("--json", action="store_true", help="print one JSON object per line")


def run(args: Args, deps: Deps) -> int:
    """Print events until Ctrl-C, ``--count`` or ``--seconds``."""
    if not is_over_gateway():
        _require_broker(deps.load_settings())
    with contextlib.suppress(KeyboardInterrupt):  # the way to end it
        run_async(_tail(args, deps))
    return 0


def _require_broker(settings: Settings) -> None:
    """Return if a broker announces events; raises as the functions that it calls."""
    if settings.broker.url is None:
        require_running(settings.data_dir)
    else:
        require_broker(settings)


async def _tail(args: Args, deps: Deps) -> None:
    shown = 0
    async with open_api(deps) as api:
        chat = api.chat(args.chat_key)
        last = await chat.last_event_number()
        deps.output.words(f"watching chat {args.chat_key}; Ctrl-C ends")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(args.seconds), chat.events(after=last) as events:
                async for event in events:
                    if event.number is None:
                        show_output(event.model_dump(), args, deps)
                        continue
                    show(event.model_dump(), args, deps)
                    shown += 1
                    if shown == args.count:
                        return


def show(event: Mapping[str, Any], args: Args, deps: Deps) -> None:
    """Print an event, given as ``--json`` prints it."""
    if args.json:
        deps.output.json_line(event)
        return
    data = event["data"]
    words = one_line(_words(event["type"], data), limit=_TEXT_COLUMNS)
    deps.output.report(f"{event['at']:%H:%M:%S}  {event['type']:<16}  {words}".rstrip())
    for line in _details(data):
        deps.output.report(f"{'':10}{one_line(line, limit=_TEXT_COLUMNS)}".rstrip())


def show_output(event: Mapping[str, Any], args: Args, deps: Deps) -> None:
    """Print what a program has just written, from its live event; ``--json`` prints kept events only."""
    data = event.get("data")
    if args.json or event.get("type") != "output.chunk" or not isinstance(data, Mapping):
        return
    for line in visible_lines(str(data.get("text", "")).rstrip("\n")):
        deps.output.report(f"{'':10}| {one_line(line, limit=_TEXT_COLUMNS)}".rstrip())


def _words(kind: str, data: dict[str, Any]) -> str:
    """Summarise an event's data."""
    if kind.startswith(("message.", "file.")):
        text = data.get("text") or data.get("file_path", "")
        return f"{data.get('sender_name') or data.get('sender_id') or data.get('kind')}: {text}"
    parts = [data.get(name) for name in _SHOWN]
    if "number" in data:
        parts.insert(0, f"round {data['number']}")
    if data.get("worker"):
        parts.append(f"on {data['worker']}")
    error = data.get("error")
    parts.append(error.get("text") if isinstance(error, dict) else error)
    return "  ".join(str(part) for part in parts if part not in (None, ""))


def _details(data: Mapping[str, Any]) -> list[str]:
    """Return the lines below an event: the code of a round, the arguments and the result of a call."""
    if isinstance(data.get("code"), str):
        lines: list[str] = data["code"].rstrip("\n").split("\n")
        rest = len(lines) - _CODE_LINES
        return lines if rest <= 0 else [*lines[:_CODE_LINES], f"({rest} more lines)"]
    return [line for name in ("arguments", "value") if (line := _kept_value(name, data))]


def _kept_value(name: str, data: Mapping[str, Any]) -> str:
    """Return a kept value as JSON, or the length of one that was too long to be kept; else ``""``."""
    if name in data:
        return f"{name}: {json.dumps(data[name], ensure_ascii=False)}"
    size = data.get(f"{name}_bytes")
    return "" if size is None else f"{name}: {size} bytes, not kept"
