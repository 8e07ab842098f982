"""`nekro costs`: what was spent, and what is left of budgets."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from typing import Any, Final, get_args

from nekro.cli.api import open_api
from nekro.cli.command import Deps, arg, json_flag
from nekro.cli.output import one_line
from nekro.cli.running import run_async
from nekro_client.models import CostGroup

__all__ = [
    "EPILOG",
    "PAGE",
    "Args",
    "run",
    "show",
]


EPILOG: Final = """\
examples:
  nekro costs
  nekro costs --by chat --since 7d
  nekro costs --by model --since 2026-05-01 --until 2026-05-31 --json

What rounds, runs of code, summaries and plugins' requests to models used, as long as the rows are kept
(NEKRO_RETENTION__ROUNDS_DAYS), and how much of today's budgets (NEKRO_BUDGETS__…) is used; both with the
estimates of what is running. `--by plugin` names the plugins that asked models themselves, or whose results
woke the agent. A day is one of UTC. ESTIMATED counts the requests whose tokens and cost are estimated: the
endpoint reported none, or the request is running, or its worker died (the last two are not in REQUESTS).
`--json` prints {items, budgets}: items is a list of {key, rounds, requests, estimated_requests,
prompt_tokens, completion_tokens, cost, sandbox_seconds}, budgets one of {scope, id, measure, period, limit,
used, estimated_requests, renews_at, state}; scope is turn, chat, user, key or day (the whole system), state
ok, warned or exhausted, and renews_at is null for a turn and for `stored_bytes`, what a key keeps stored.
"""

_GROUPS: Final = get_args(CostGroup)
#: Sums that are read at once.
PAGE: Final = 200

_TEXT_COLUMNS: Final = 60


def day(text: str) -> date:
    """Parse an ISO date, or a number of days that end with today, as ``7d``."""
    if text.endswith("d") and text[:-1].isascii() and text[:-1].isdigit():
        try:
            return datetime.now(UTC).date() - timedelta(days=max(int(text[:-1]) - 1, 0))
        except OverflowError:
            raise argparse.ArgumentTypeError(f"{text} is before the year 1") from None
    try:
        return date.fromisoformat(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a day such as 2026-05-31 nor 7d") from None


@dataclass(frozen=True, kw_only=True)
class Args:
    """Arguments of `nekro costs`."""

    by: CostGroup = arg(
        "--by",
        choices=_GROUPS,
        default="day",
        metavar="GROUP",
        help=f"{', '.join(_GROUPS[:-1])} or {_GROUPS[-1]} (default: %(default)s)",
    )
    since: date | None = arg(
        "--since",
        metavar="DAY",
        type=day,
        help="first day, as 2026-05-31, or as 7d: that many days with today (default: all that is kept)",
    )
    until: date | None = arg(
        "--until", metavar="DAY", type=day, help="last day, in the same form (default: today)"
    )
    json: bool = json_flag()


def run(args: Args, deps: Deps) -> int:
    """Read and print."""
    items, budgets = run_async(_read(args, deps))
    show(items, budgets, args, deps)
    return 0


async def _read(args: Args, deps: Deps) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    items: list[dict[str, Any]] = []
    budgets: list[dict[str, Any]] = []
    cursor: str | None = None
    async with open_api(deps, asks_up=True) as api:
        while True:
            page = await api.costs(by=args.by, since=args.since, until=args.until, cursor=cursor, limit=PAGE)
            items += [one.model_dump() for one in page.items]
            budgets += [one.model_dump() for one in page.budgets]
            cursor = page.next_cursor
            if cursor is None:
                return items, budgets


def show(
    items: Sequence[Mapping[str, Any]], budgets: Sequence[Mapping[str, Any]], args: Args, deps: Deps
) -> None:
    """Print sums and budgets, as the API has them; what cost most comes first, days in order."""
    items = list(items)
    if args.by != "day":
        items.sort(key=lambda item: (-item["cost"], -item["prompt_tokens"], item["key"]))
    if args.json:
        deps.output.json({"items": items, "budgets": budgets})
        return
    if not items:
        deps.output.words("nothing was spent in this time")
    else:
        figures = ("ROUNDS", "REQUESTS", "ESTIMATED", "PROMPT TOKENS", "ANSWER TOKENS", "COST", "SANDBOX")
        deps.output.table((args.by.upper(), *figures), [_row(item) for item in items])
    if budgets:
        columns = ("BUDGET", "OF", "MEASURE", "USED", "LIMIT", "SHARE", "STATE", "RENEWS")
        deps.output.table(columns, [_budget_row(budget) for budget in budgets])


def _row(item: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        one_line(item["key"] or "-", limit=_TEXT_COLUMNS),
        str(item["rounds"]),
        str(item["requests"]),
        str(item["estimated_requests"] or "-"),
        _number(item["prompt_tokens"]),
        _number(item["completion_tokens"]),
        _number(item["cost"]),
        f"{item['sandbox_seconds']:.1f} s",
    )


def _budget_row(budget: Mapping[str, Any]) -> tuple[str, ...]:
    share = budget["used"] / budget["limit"] if budget["limit"] else 1.0
    return (
        budget["scope"],
        one_line(budget["id"] or "-", limit=_TEXT_COLUMNS),
        budget["measure"],
        _number(budget["used"]) + (" (estimated)" if budget["estimated_requests"] else ""),
        _number(budget["limit"]),
        f"{share:.0%}",
        budget["state"],
        _renewal(budget),
    )


def _renewal(budget: Mapping[str, Any]) -> str:
    if budget["renews_at"]:
        return f"{budget['renews_at']:%Y-%m-%d %H:%M} UTC"
    return "with the next turn" if budget["scope"] == "turn" else "as it is deleted"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 or value == int(value) else f"{value:.4g}"
