"""`nekro trace` over a gateway."""

from __future__ import annotations

import contextlib
import time

from cli.command import Deps
from cli.commands.trace import Args, TurnPrinter
from cli.remote.target import open_client
from nekro_agent.durations import FRESH_SECONDS

__all__ = ["run"]


def run(args: Args, deps: Deps) -> int:
    """Print the turn."""
    printer = TurnPrinter(args, deps)
    with open_client() as client, contextlib.suppress(KeyboardInterrupt):  # the way to end --follow
        while printer.show(client.turns.get(args.turn_id)):
            time.sleep(FRESH_SECONDS)
    return 0
