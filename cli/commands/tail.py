"""`nekro tail`: print a chat's events as they happen."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from broker_config.settings import Settings
from cli.command import Deps, chat_key, positive_int, positive_seconds
from cli.output import one_line
from cli.running import run_async
from cli.services.ownership import require_running
from cli.services.presence import require_broker
from nekro_agent.durations import POLL_SECONDS, PROGRAM_SECONDS
from nekro_agent.errors import BrokerUnavailableError

if TYPE_CHECKING:
    from messaging.event_watch import EventWatcher, WatchedEvent
    from storage.engine import Database

__all__ = ["Args", "register", "run"]

_EPILOG = """\
examples:
  nekro tail group_1
  nekro tail group_1 --json --count 3
  nekro tail group_1 --seconds 60

Binds a queue of its own to the exchange `agent.events` and prints its events: round.requested,
round.started, round.ended, message.added. Past events are not shown (`nekro history` shows the past), and
publishers never wait for it: when more than 1000 events wait in its queue, they are dropped and counted.
Ctrl-C, --count and --seconds end it with exit code 0. `--json` prints one object per line: {at, event,
chat_key, …}.
"""
_TEXT_COLUMNS: Final = 100


@dataclass(frozen=True, kw_only=True)
class Args:
    """Arguments of `nekro tail`."""

    chat_key: str
    count: int | None
    seconds: float | None
    json: bool


def register(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.epilog = _EPILOG
    parser.add_argument("chat_key", metavar="K", type=chat_key, help="chat")
    parser.add_argument("--count", metavar="N", type=positive_int, help="end after N events")
    parser.add_argument("--seconds", metavar="S", type=positive_seconds, help="end after S seconds")
    parser.add_argument("--json", action="store_true", help="print one JSON object per line")


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
    from broker_config.app import create_app
    from broker_config.embedded import resolve_settings
    from messaging.event_watch import EventWatcher
    from storage.engine import Database

    settings = resolve_settings(settings)
    database = Database(settings.database, settings.data_dir)
    shown = 0
    try:
        with EventWatcher(create_app(settings), settings.broker, chat_key=args.chat_key) as watcher:
            deps.output.words(f"watching chat {args.chat_key}; Ctrl-C ends")
            async for event in _events(watcher, deps, seconds=args.seconds):
                values = await _values(event, args, database)
                if args.json:
                    deps.output.json_line(values)
                else:
                    deps.output.report(_line(values))
                shown += 1
                if shown == args.count:
                    return
    finally:
        await database.dispose()


async def _events(watcher: EventWatcher, deps: Deps, *, seconds: float | None) -> AsyncIterator[WatchedEvent]:
    """Yield events as they arrive, for ``seconds``; None: without end."""
    end = time.monotonic() + seconds if seconds is not None else float("inf")
    answered_at, reported = time.monotonic(), 0
    while time.monotonic() < end:
        try:
            events = await _polled(watcher)
            answered_at = time.monotonic()
        except BrokerUnavailableError:
            if time.monotonic() - answered_at > PROGRAM_SECONDS:
                raise
            events = []
        for event in events:
            yield event
        if watcher.dropped > reported:
            deps.output.words(f"{watcher.dropped - reported} events came too fast and are not shown")
            reported = watcher.dropped
        await asyncio.sleep(POLL_SECONDS)


async def _polled(watcher: EventWatcher) -> list[WatchedEvent]:
    poll = asyncio.ensure_future(asyncio.to_thread(watcher.poll))
    try:
        return await asyncio.shield(poll)
    except asyncio.CancelledError:
        # The watcher is not thread-safe, and this thread is about to close it: let the poll end first.
        await asyncio.wait({poll})
        poll.exception()  # retrieved, as asyncio would log it otherwise
        raise


async def _values(event: WatchedEvent, args: Args, database: Database) -> dict[str, Any]:
    """Return one event as ``--json`` prints it."""
    body = dict(event.body)
    if event.name == "message.added":
        body |= await _message(database, str(body.get("id", "")))
    ours = {"at": datetime.now(UTC), "event": event.name, "chat_key": args.chat_key}
    return {**ours, **body, **ours}  # these keys come first, and an event cannot override them


def _line(values: dict[str, Any]) -> str:
    """Format an event as one line."""
    body = {name: value for name, value in values.items() if name not in ("at", "event", "chat_key")}
    name = one_line(str(values["event"]), limit=_TEXT_COLUMNS)
    return f"{values['at']:%H:%M:%S}  {name:<16}  {_words(name, body)}".rstrip()


async def _message(database: Database, message_id: str) -> dict[str, Any]:
    """Return sender and text, which the event does not carry, from the message's row."""
    async with database.read() as transaction:
        message = await transaction.messages.find(message_id)
    if message is None:
        return {}
    return {"sender": message.sender_name or message.sender_id, "text": message.text}


def _words(name: str, body: dict[str, Any]) -> str:
    """Summarise a known event; for other events, return the body."""
    if name == "message.added":
        return one_line(
            f"{body.get('sender') or body.get('kind')}: {body.get('text', '')}", limit=_TEXT_COLUMNS
        )
    if name in ("round.started", "round.ended"):
        parts = [f"round {body.get('number')}", body.get("trigger"), body.get("state"), body.get("stop_type")]
        parts += [f"on {body['worker']}" if body.get("worker") else None]
        return one_line("  ".join(str(part) for part in parts if part), limit=_TEXT_COLUMNS)
    return one_line(json.dumps(body, ensure_ascii=False), limit=_TEXT_COLUMNS) if body else ""
