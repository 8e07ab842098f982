"""`nekro tail`: print a chat's events as they happen."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections import deque
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from broker_config.settings import Settings
from nekro.cli.command import Deps, arg, chat_key, positive_int, positive_number
from nekro.cli.gateway_client import open_client
from nekro.cli.output import one_line
from nekro.cli.running import run_async
from nekro.cli.services.ownership import require_running
from nekro.cli.services.presence import require_broker
from nekro_agent.durations import FRESH_SECONDS, POLL_SECONDS, PROGRAM_SECONDS
from nekro_agent.tools.visible_text import visible_lines

if TYPE_CHECKING:
    from storage.engine import Database
    from storage.repositories.events import ChatEvent

__all__ = [
    "EPILOG",
    "Args",
    "chat_events",
    "run",
    "run_over_gateway",
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
#: Events of one reading.
_PAGE: Final = 200
#: Live events that wait to be shown; of more the oldest are dropped.
_MOST_LIVE: Final = 1_000
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
    settings = deps.load_settings()
    if settings.broker.url is None:
        require_running(settings.data_dir)
    else:
        require_broker(settings)
    with contextlib.suppress(KeyboardInterrupt):  # the way to end it
        run_async(_tail(args, settings, deps))
    return 0


async def _tail(args: Args, settings: Settings, deps: Deps) -> None:
    from broker_config.embedded import resolve_settings
    from storage.engine import Database

    settings = resolve_settings(settings)
    shown = 0
    async with (
        Database(settings.database, settings.data_dir) as database,
        contextlib.aclosing(chat_events(settings, database, args.chat_key, seconds=args.seconds)) as batches,
    ):
        await anext(batches)
        deps.output.words(f"watching chat {args.chat_key}; Ctrl-C ends")
        async for batch in batches:
            for event in batch:
                if "number" not in event:
                    show_output(event, args, deps)
                    continue
                show(event, args, deps)
                shown += 1
                if shown == args.count:
                    return


async def chat_events(
    settings: Settings, database: Database, chat_key: str, *, seconds: float | None = None
) -> AsyncGenerator[list[dict[str, Any]], None]:
    """Yield the events of a chat from now on, live ones too, in batches, as ``--json`` prints them.

    The first batch is empty: events from then on are received. Later ones are empty when nothing happened for
    a while.

    Args:
        seconds: how long; None: without end.

    Raises:
        BrokerUnavailableError: the broker does not answer.
    """
    from broker_config.embedded import resolve_settings
    from nekro.broker.announcements import Announcements
    from nekro.broker.publishing import unavailable

    woken = asyncio.Event()
    live: deque[dict[str, Any]] = deque(maxlen=_MOST_LIVE)

    def on_added(key: str, _number: int, _types: frozenset[str]) -> None:
        if key == chat_key:
            woken.set()

    def on_live(key: str, event: Mapping[str, Any]) -> None:
        if key == chat_key:
            live.append(dict(event))
            woken.set()

    announcements = Announcements(
        resolve_settings(settings), on_added=on_added, on_live=on_live, on_begun=woken.set
    )
    announcements.need(True)
    try:
        while not await announcements.listening(seconds=POLL_SECONDS):
            if announcements.failure is not None:
                raise unavailable(announcements.url, announcements.failure)
        last = await _newest(database, chat_key)
        yield []
        answered_at = time.monotonic()
        end = answered_at + seconds if seconds is not None else float("inf")
        while (now := time.monotonic()) < end:
            with contextlib.suppress(TimeoutError):  # also without an announcement, which may be lost
                async with asyncio.timeout(min(FRESH_SECONDS, end - now)):
                    await woken.wait()
            woken.clear()
            if announcements.failure is None:
                answered_at = time.monotonic()
            elif time.monotonic() - answered_at > PROGRAM_SECONDS:
                raise unavailable(announcements.url, announcements.failure)
            events = await _read(database, chat_key, after=last)
            last = events[-1].number if events else last
            batch = [*live, *map(_values, events)]
            live.clear()
            yield batch
            await asyncio.sleep(POLL_SECONDS)
    finally:
        await announcements.close()


async def _newest(database: Database, chat_key: str) -> int:
    async with database.read() as transaction:
        return (await transaction.events.newest_numbers([chat_key])).get(chat_key, 0)


async def _read(database: Database, chat_key: str, *, after: int) -> list[ChatEvent]:
    async with database.read() as transaction:
        return await transaction.events.after(chat_key, number=after, limit=_PAGE)


def _values(event: ChatEvent) -> dict[str, Any]:
    """Return an event as ``--json`` prints it."""
    return {
        "number": event.number,
        "type": event.type,
        "at": event.created_at,
        "chat_key": event.chat_key,
        "turn_id": event.turn_id,
        "round_id": event.round_id,
        "call_id": event.call_id,
        "message_id": event.message_id,
        "data": event.data,
    }


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


def run_over_gateway(args: Args, deps: Deps) -> int:
    """Print events until Ctrl-C, ``--count`` or ``--seconds``."""
    with open_client() as client, contextlib.suppress(KeyboardInterrupt):  # the way to end it
        last = client.chat(args.chat_key).last_event_number()
        deps.output.words(f"watching chat {args.chat_key}; Ctrl-C ends")
        run_async(_tail_over_gateway(args, deps, last))
    return 0


async def _tail_over_gateway(args: Args, deps: Deps, last: int) -> None:
    from nekro_client import AsyncClient

    shown = 0
    async with AsyncClient() as client:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(args.seconds), client.chat(args.chat_key).events(after=last) as events:
                async for event in events:
                    if event.number is None:
                        show_output(event.model_dump(), args, deps)
                        continue
                    show(event.model_dump(), args, deps)
                    shown += 1
                    if shown == args.count:
                        return
