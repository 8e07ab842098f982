"""`nekro trace` over a gateway."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from nekro.base.tasks import end_tasks
from nekro.cli.command import Deps
from nekro.cli.commands.trace import Args, TurnPrinter, is_ended
from nekro.cli.remote.target import open_client
from nekro.cli.running import run_async
from nekro_agent.durations import REFRESH_SECONDS
from nekro_client import AsyncClient
from nekro_client.models import Turn

__all__ = ["run"]


def run(args: Args, deps: Deps) -> int:
    """Print the turn."""
    printer = TurnPrinter(args, deps)
    with open_client() as client, contextlib.suppress(KeyboardInterrupt):  # the way to end --follow
        turn = client.turns.get(args.turn_id, with_prompts=args.prompts)
        if args.follow and not is_ended(turn):
            last = client.chat(turn.chat_key).last_event_number()
            # With the newest event, which comes when the gateway has begun to send also live ones.
            run_async(_follow(printer, turn, args, after=max(0, last - 1)))
        else:
            printer.show(turn)
    return 0


async def _follow(printer: TurnPrinter, turn: Turn, args: Args, *, after: int) -> None:
    async with AsyncClient() as client:

        async def read() -> Turn:
            return await client.turns.get(turn.id, with_prompts=args.prompts)

        async with aclosing(_batches(client, turn.chat_key, after=after)) as batches:
            await printer.follow(batches, read)


async def _batches(
    client: AsyncClient, chat_key: str, *, after: int
) -> AsyncGenerator[list[dict[str, Any]], None]:
    """Yield each event of a chat alone, and an empty batch when none came for a while.

    The first batch has an event: a program's output is not missed from then on.
    """
    async with client.chat(chat_key).events(after=after) as events:
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
