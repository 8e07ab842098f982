"""`nekro trace`: print one turn as a tree."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from nekro.base.tasks import end_tasks
from nekro.cli.api import find, open_api
from nekro.cli.command import Deps, arg, not_blank
from nekro.cli.running import run_async
from nekro.cli.views.turn_text import RunningOutput
from nekro_agent.durations import REFRESH_SECONDS

if TYPE_CHECKING:
    from nekro_client import AsyncChat
    from nekro_client.models import Turn

__all__ = [
    "EPILOG",
    "Args",
    "TurnPrinter",
    "is_ended",
    "run",
]


OUTPUT_CHUNK: Final = "output.chunk"

EPILOG: Final = """\
examples:
  nekro trace 4f1c2a
  nekro trace 4f1c2a --follow
  nekro trace 4f1c2a --prompts
  nekro trace 4f1c2a --json

Shows what the console shows of a turn: the message, the rounds with their attempts, the requests to the
model with tokens and cost, code with line numbers, calls with waiting and running time, arguments, results
and errors, output, messages, jobs, and the turns that followed. The beginning of an id is enough;
`nekro history CHAT --trace` shows ids. `--follow` goes on until the turn has ended, as the events
of its chat show, and prints the output of running code at once; with `--json` it prints one object per
line, each the whole turn. The object is that of `GET /turns/{id}`. The exit code is 0 also for a turn that
failed.
"""


@dataclass(frozen=True, kw_only=True)
class Args:
    """Arguments of `nekro trace`."""

    turn_id: str = arg(metavar="TURN", type=not_blank, help="id of the turn")
    follow: bool = arg("--follow", action="store_true", help="go on until the turn has ended; Ctrl-C ends it")
    prompts: bool = arg(
        "--prompts",
        action="store_true",
        help="also what each round sent to the model, if NEKRO_AGENT__KEEP_PROMPTS keeps it",
    )
    json: bool = arg("--json", action="store_true", help="print the turn as JSON")


def run(args: Args, deps: Deps) -> int:
    """Print the turn."""
    with contextlib.suppress(KeyboardInterrupt):  # the way to end --follow
        run_async(_trace(args, deps))
    return 0


async def _trace(args: Args, deps: Deps) -> None:
    async with open_api(deps, asks_up=not args.follow) as api:
        listing = "nekro history CHAT --trace"
        whole_id = await find(api.turns.list, args.turn_id, noun="turn", listing=listing)
        args = dataclasses.replace(args, turn_id=whole_id)
        read = partial(api.turns.get, args.turn_id, with_prompts=args.prompts)
        printer = TurnPrinter(args, deps)
        turn = await read()
        if not args.follow or is_ended(turn):
            printer.show(turn)
            return
        chat = api.chat(turn.chat_key)
        # With the newest event, which comes when also live ones are received.
        after = max(0, await chat.last_event_number() - 1)
        async with aclosing(_batches(chat, after=after)) as batches:
            await printer.follow(batches, read)


class TurnPrinter:
    """Prints a turn, and what is new of it each time."""

    def __init__(self, args: Args, deps: Deps) -> None:
        self._args, self._deps = args, deps
        self._printed: set[str] = set()
        self._last: dict[str, Any] | None = None
        #: What was printed of the output of each round while its code ran.
        self._outputs: dict[str, RunningOutput] = {}

    async def follow(
        self, batches: AsyncIterator[Sequence[Mapping[str, Any]]], read: Callable[[], Awaitable[Turn]]
    ) -> None:
        """Print a turn until its end: its tree again after events, and output at once.

        Args:
            batches: new events of its chat, kept and live ones, as `nekro tail --json` prints them; now and
                then an empty one, for a reading that was put off.
            read: returns the turn.
        """
        is_due, read_at = True, float("-inf")
        async for batch in batches:
            for event in batch:
                if event.get("number") is not None:
                    is_due = True
                elif event.get("type") == OUTPUT_CHUNK and event.get("turn_id") == self._args.turn_id:
                    self._output(event)
            # A large turn takes long to read, and a program may cause a hundred events a second.
            if is_due and time.monotonic() - read_at >= REFRESH_SECONDS:
                is_due, read_at = False, time.monotonic()
                if not self.show(await read()):
                    return

    def _output(self, event: Mapping[str, Any]) -> None:
        data, round_id = event.get("data"), event.get("round_id")
        if self._args.json or not isinstance(round_id, str) or not isinstance(data, Mapping):
            return
        output = self._outputs.setdefault(round_id, RunningOutput())
        for line in output.add(int(data.get("offset", 0)), str(data.get("text", ""))):
            self._deps.output.report(line)

    def show(self, turn: Turn) -> bool:
        """Print what is new; returns whether to look again."""
        from nekro.cli.views.turn_text import is_over, turn_lines

        if self._args.json:
            plain = turn.model_dump(mode="json")
            if plain != self._last and self._args.follow:
                self._deps.output.json_line(plain)
            elif plain != self._last:
                self._deps.output.json(plain)
            self._last = plain
        else:
            shown = {entry.id for entry in turn.rounds if self._is_shown(entry.id, entry.output)}
            for line in turn_lines(turn, without_output=shown):
                if line.key not in self._printed:
                    self._printed.add(line.key)
                    self._deps.output.report(line.text)
        return self._args.follow and not is_over(turn)

    def _is_shown(self, round_id: str, output: str | None) -> bool:
        """Whether the whole output of a round was printed while its code ran."""
        if output is None:
            return False
        running = self._outputs.setdefault(round_id, RunningOutput())
        for line in running.finish(output):
            self._deps.output.report(line)
        return running.is_all_of(output)


def is_ended(turn: Turn) -> bool:
    """Whether nothing more will happen in a turn."""
    from nekro.cli.views.turn_text import is_over

    return is_over(turn)


async def _batches(chat: AsyncChat, *, after: int) -> AsyncGenerator[list[dict[str, Any]], None]:
    """Yield each event of a chat alone, and an empty batch when none came for a while.

    The first batch has an event: a program's output is not missed from then on.
    """
    async with chat.events(after=after) as events:
        coming = asyncio.ensure_future(anext(events))
        try:
            await asyncio.wait({coming})
            while True:
                await asyncio.wait({coming}, timeout=REFRESH_SECONDS)
                if not coming.done():
                    yield []
                    continue
                yield [(await coming).model_dump()]
                coming = asyncio.ensure_future(anext(events))
        finally:
            await end_tasks(coming)
