"""`nekro trace`: print one turn as a tree."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from broker_config.settings import Settings
from cli.command import Deps
from cli.output import one_line
from cli.running import run_async
from cli.services.database import open_database
from nekro_agent.durations import FRESH_SECONDS

if TYPE_CHECKING:
    from nekro_client.models import Turn
    from storage.engine import Database
    from workers.chats.file_ids import FileIds

__all__ = ["Args", "TurnPrinter", "register", "run"]

_EPILOG = """\
examples:
  nekro trace 4f1c2a
  nekro trace 4f1c2a --follow
  nekro trace 4f1c2a --json

Shows what the console shows of a turn: the message, the rounds with their attempts, the requests to the
model with tokens and cost, code with line numbers, calls with waiting and running time, arguments, results
and errors, output, messages, jobs, and the turns that followed. Beside the workers the beginning of an id is
enough; `nekro history CHAT --trace` shows ids. `--follow` goes on until the turn has
ended; with `--json` it prints one object per line, each the whole turn. The object is that of
`GET /turns/{id}`. The exit code is 0 also for a turn that failed.
"""


@dataclass(frozen=True, kw_only=True)
class Args:
    """Arguments of `nekro trace`."""

    turn_id: str
    follow: bool
    json: bool


def register(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.epilog = _EPILOG
    parser.add_argument("turn_id", metavar="TURN", help="id of the turn")
    parser.add_argument(
        "--follow", action="store_true", help="go on until the turn has ended; Ctrl-C ends it"
    )
    parser.add_argument("--json", action="store_true", help="print the turn as JSON")


def run(args: Args, deps: Deps) -> int:
    """Print the turn."""
    with contextlib.suppress(KeyboardInterrupt):  # the way to end --follow
        run_async(_trace(args, deps.load_settings(), deps))
    return 0


class TurnPrinter:
    """Prints a turn, and what is new of it each time."""

    def __init__(self, args: Args, deps: Deps) -> None:
        self._args, self._deps = args, deps
        self._printed: set[str] = set()
        self._last = ""

    def show(self, turn: Turn) -> bool:
        """Print what is new; returns whether to look again."""
        from cli.views.turn_text import is_over, tell_turn

        if self._args.json:
            text = turn.model_dump_json()
            if text != self._last and self._args.follow:
                self._deps.output.json_line(turn.model_dump(mode="json"))
            elif text != self._last:
                self._deps.output.json(turn.model_dump(mode="json"))
            self._last = text
        else:
            for line in tell_turn(turn):
                if line.key not in self._printed:
                    self._printed.add(line.key)
                    self._deps.output.report(line.text)
        return self._args.follow and not is_over(turn)


@dataclass(frozen=True, kw_only=True)
class _Source:
    database: Database
    file_ids: FileIds
    settings: Settings


async def _trace(args: Args, settings: Settings, deps: Deps) -> None:
    from broker_config.embedded import resolve_signing_key
    from gateway.streams.turn_tree import read_turn
    from workers.chats.file_ids import FileIds

    printer = TurnPrinter(args, deps)
    async with open_database(settings) as database:
        turn_id = await _whole_id(database, args.turn_id)
        ids = FileIds(resolve_signing_key(settings).get_secret_value())
        source = _Source(database=database, file_ids=ids, settings=settings)
        while printer.show(await read_turn(source, turn_id)):  # noqa: ASYNC110 - rows announce nothing
            await asyncio.sleep(FRESH_SECONDS)


async def _whole_id(database: Database, beginning: str) -> str:
    """Return the id of a turn that begins with a text.

    Raises:
        NotFoundError: there is none, or several.
    """
    from nekro_agent.errors import NotFoundError

    async with database.read() as transaction:
        found = await transaction.turn_listing.with_prefix(beginning, limit=2) if beginning.strip() else []
    if beginning in found:
        return beginning
    if len(found) != 1:
        what = "no turn has" if not found else "several turns have"
        raise NotFoundError(f"{what} an id that begins with {one_line(beginning, limit=40)!r}")
    return found[0]
