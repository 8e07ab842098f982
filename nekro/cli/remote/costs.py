"""`nekro costs` over a gateway; for keys with the scope admin."""

from __future__ import annotations

from typing import Any

from nekro.cli.command import Deps
from nekro.cli.commands.costs import PAGE, Args, show
from nekro.cli.remote.target import open_client

__all__ = ["run"]


def run(args: Args, deps: Deps) -> int:
    """Read and print."""
    items: list[dict[str, Any]] = []
    budgets: list[dict[str, Any]] = []
    cursor: str | None = None
    with open_client() as client:
        while True:
            page = client.costs(by=args.by, since=args.since, until=args.until, cursor=cursor, limit=PAGE)
            items += [one.model_dump() for one in page.items]
            budgets += [one.model_dump() for one in page.budgets]
            cursor = page.next_cursor
            if cursor is None:
                break
    show(items, budgets, args, deps)
    return 0
