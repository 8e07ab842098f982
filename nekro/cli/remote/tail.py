"""`nekro tail` over a gateway."""

from __future__ import annotations

import asyncio
import contextlib

from nekro.cli.command import Deps
from nekro.cli.commands.tail import Args, show, show_output
from nekro.cli.remote.target import open_client
from nekro.cli.running import run_async
from nekro_client import AsyncClient

__all__ = ["run"]


def run(args: Args, deps: Deps) -> int:
    """Print events until Ctrl-C, ``--count`` or ``--seconds``."""
    with open_client() as client, contextlib.suppress(KeyboardInterrupt):  # the way to end it
        last = client.chat(args.chat_key).last_event_number()
        deps.output.words(f"watching chat {args.chat_key}; Ctrl-C ends")
        run_async(_tail(args, deps, last))
    return 0


async def _tail(args: Args, deps: Deps, last: int) -> None:
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
