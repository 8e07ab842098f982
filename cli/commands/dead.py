"""`nekro dead`: calls that were set aside because they end their workers, or because nobody can read them."""

from __future__ import annotations

import argparse
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from broker_config.call_messages import CallMessage
from broker_config.settings import Settings
from cli.command import Deps, add_json, positive_int
from cli.output import one_line
from cli.ownership import require_running
from cli.running import run_async
from nekro_agent.errors import NotFoundError, UsageError

if TYPE_CHECKING:
    from broker_config.dead_letters import DeadLetters, DeadMessage
    from broker_config.wire import Signer
    from storage.calls import Call
    from storage.engine import Database

__all__ = ["Args", "register", "run"]

_EPILOG = """\
examples:
  nekro dead
  nekro dead show 5f0c…
  nekro dead retry 5f0c…
  nekro dead drop all

A call is set aside when NEKRO_BROKER__MAX_DELIVERIES workers took it and none finished it, a message when no
worker can read it. `retry` sends a call again under its id, with a new deadline; nobody waits for its result
then. `--json` prints a list of {id, task, lane, source, reason, deliveries, bytes}, with `show` one of them.
"""
_ACTIONS: Final = ("list", "show", "retry", "drop")


@dataclass(frozen=True, kw_only=True)
class Args:
    """Arguments of `nekro dead`."""

    action: str
    id: str | None
    limit: int
    json: bool


def register(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.epilog = _EPILOG
    parser.add_argument("action", nargs="?", default="list", choices=_ACTIONS, help="default: list")
    parser.add_argument("id", metavar="ID", nargs="?", help="id of a call, or its beginning; `drop all`")
    parser.add_argument(
        "--limit",
        metavar="N",
        type=positive_int,
        default=1000,
        help="newest seen (default: %(default)s)",
    )
    add_json(parser)


def run(args: Args, deps: Deps) -> int:
    """Do it."""
    if (args.id is None) != (args.action == "list"):
        raise UsageError("say `nekro dead list`, or `nekro dead show|retry|drop ID`")
    settings = deps.load_settings()
    if settings.broker.url is None:
        require_running(settings.data_dir)
    return run_async(_run(args, settings, deps))


async def _run(args: Args, settings: Settings, deps: Deps) -> int:
    async with _opened(settings) as desk:
        found = await desk.all(limit=args.limit)
        if args.action == "list":
            _show_list(found, args, deps)
            return 0
        chosen = found if (args.action, args.id) == ("drop", "all") else [_chosen(found, args.id or "")]
        for item in chosen:
            if args.action == "show":
                _show(item, args, deps)
            elif args.action == "drop":
                await desk.drop(item)
                deps.output.words(f"dropped {item.id}")
            else:
                lane = await desk.retry(item)
                deps.output.words(f"sent {item.id} to lane {lane} again")
    return 0


@dataclass(frozen=True, kw_only=True)
class _Item:
    """One line: a message in the broker, or a row of the database."""

    id: str
    task: str | None
    lane: str | None
    reason: str
    deliveries: int
    size_bytes: int
    message: DeadMessage | None = None
    call: Call | None = None

    def described(self) -> dict[str, Any]:
        """As ``--json`` prints it."""
        return {
            "id": self.id,
            "task": self.task,
            "lane": self.lane,
            "source": "broker" if self.message is not None else "database",
            "reason": self.reason,
            "deliveries": self.deliveries,
            "bytes": self.size_bytes,
        }


class _Desk:
    """Both places where calls are set aside."""

    def __init__(self, letters: DeadLetters, database: Database, settings: Settings, signer: Signer) -> None:
        self._letters, self._database, self._settings, self._signer = letters, database, settings, signer

    async def all(self, *, limit: int) -> list[_Item]:
        """List what is there, the newest first, messages before rows."""
        messages = [
            _Item(
                id=message.id,
                task=message.task,
                lane=message.lane,
                reason=message.reason,
                deliveries=message.deliveries,
                size_bytes=message.size_bytes,
                message=message,
            )
            for message in self._letters.newest(limit=limit)
        ]
        async with self._database.read() as transaction:
            calls = await transaction.calls.dead(limit=limit)
        rows = [
            _Item(
                id=call.id,
                task=call.method,
                lane=call.lane,
                reason=call.error_message or "",
                deliveries=call.fence,
                size_bytes=0,
                call=call,
            )
            for call in calls
        ]
        return [*messages, *rows]

    async def drop(self, item: _Item) -> None:
        """Delete it."""
        if item.message is not None:
            self._letters.drop(item.message)
            return
        async with self._database.autocommit() as transaction:
            await transaction.calls.drop(item.id)

    async def retry(self, item: _Item) -> str:
        """Send it again; returns the lane."""
        seconds = self._settings.workers.call_timeout_seconds
        if item.lane == "long":
            seconds = self._settings.workers.long_timeout_seconds
        if item.message is not None:
            return self._letters.retry(item.message, timeout_seconds=seconds)
        stored = item.call.invocation if item.call is not None else None
        call = CallMessage.from_row(stored or {}, signer=self._signer)
        again = CallMessage.renewed(
            call.invocation, signer=self._signer, lane=call.lane, timeout_seconds=seconds
        )
        async with self._database.begin() as transaction:
            # The sweep sends it, as it does with every recorded call that nobody claims.
            await transaction.calls.requeue(item.id)
            await transaction.calls.keep_message(item.id, again.to_row())
        return call.lane


@asynccontextmanager
async def _opened(settings: Settings) -> AsyncIterator[_Desk]:
    from broker_config.app import create_app
    from broker_config.dead_letters import DeadLetters
    from broker_config.embedded import resolve_settings, resolve_signing_key
    from broker_config.wire import Signer
    from storage.engine import Database
    from storage.migrate import require_migrated

    settings = resolve_settings(settings)
    await require_migrated(settings.database, settings.data_dir)
    signer = Signer.from_text(resolve_signing_key(settings).get_secret_value())
    letters = DeadLetters(create_app(settings), signer=signer)
    database = Database(settings.database, settings.data_dir)
    try:
        yield _Desk(letters, database, settings, signer)
    finally:
        letters.close()
        await database.dispose()


def _chosen(found: list[_Item], prefix: str) -> _Item:
    near = [item for item in found if item.id.startswith(prefix)]
    exact = [item for item in near if item.id == prefix] or near
    if not exact:
        raise NotFoundError(f"nothing that was set aside has the id {prefix}; `nekro dead` lists what has")
    if len({item.id for item in exact}) > 1:
        raise UsageError(f"{len(exact)} ids begin with {prefix}; write more of it")
    return exact[0]


def _show_list(found: list[_Item], args: Args, deps: Deps) -> None:
    if args.json:
        deps.output.json([item.described() for item in found])
        return
    rows = [(item.id, item.task, item.lane, item.size_bytes, item.reason) for item in found]
    deps.output.table(("ID", "TASK", "LANE", "BYTES", "REASON"), rows)


def _show(item: _Item, args: Args, deps: Deps) -> None:
    if args.json:
        deps.output.json(item.described())
        return
    for name, value in item.described().items():
        deps.output.report(one_line(f"{name}: {value}"))
