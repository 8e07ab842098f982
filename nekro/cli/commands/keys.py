"""`nekro keys`: create, list and revoke keys of the HTTP API."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final, get_args

from nekro.cli.api import open_api
from nekro.cli.command import Deps, arg, chosen_id, count, json_flag, not_blank, positive_number
from nekro.cli.running import run_async
from nekro_agent.errors import UsageError
from nekro_client.models import KeyScope

__all__ = [
    "EPILOG",
    "Args",
    "check",
    "run",
    "show_created",
    "show_list",
    "show_revoked",
]


EPILOG: Final = """\
examples:
  nekro keys create site --scope read --scope post --chats 'site-*'
  nekro keys create ada --scope read --scope post --user-id ada --rate 60 --cost-per-day 0.5 --days 90
  nekro keys
  nekro keys list --json
  nekro keys revoke 4be1c5f0a2d9e781

`create` prints the key, which is not stored and cannot be shown again. Scopes: read (messages, events, turns,
files), post (messages, files, cancelling turns), call (methods), run (code in sandboxes), approve (decisions
on calls that wait for approval; the key's own calls count as approved), admin (everything else). A gateway
on a loopback address also accepts the local key, secrets/api.key of the data directory: to replace that one,
delete the file and restart the gateway.
`revoke` is effective for the next request. `--json` prints a list of {id, name, scopes, chats, user_id,
requests_per_minute, cost_per_day, tokens_per_day, stored_bytes_limit, stored_bytes, created_at, expires_at,
revoked_at}, else one such object, with `key` for `create`.
"""


def _days(text: str) -> float:
    value = positive_number(text)
    try:
        datetime.now(UTC) + timedelta(days=value)
    except OverflowError:
        raise argparse.ArgumentTypeError(f"{text} days from now is after the year 9999") from None
    return value


@dataclass(frozen=True, kw_only=True)
class Args:
    """Arguments of `nekro keys`."""

    action: str = arg(nargs="?", default="list", choices=("list", "create", "revoke"), help="default: list")
    name: str | None = arg(
        nargs="?",
        metavar="NAME",
        type=not_blank,
        help="create: a name for lists; revoke: the key's id, or its beginning",
    )
    scope: list[KeyScope] = arg(
        "--scope", action="append", choices=get_args(KeyScope), default=[], help="repeatable"
    )
    chats: str = arg(
        "--chats",
        metavar="PATTERN",
        type=not_blank,
        default="*",
        help="chats that it may use (default: %(default)s)",
    )
    user_id: str | None = arg("--user-id", metavar="U", help="the only user for whom it acts (default: any)")
    rate: int | None = arg(
        "--rate",
        metavar="N",
        type=count,
        help="requests per minute; 0 does not limit them (default: NEKRO_GATEWAY__REQUESTS_PER_MINUTE)",
    )
    cost_per_day: float | None = arg(
        "--cost-per-day",
        metavar="COST",
        type=positive_number,
        help="largest cost of the turns that it starts in a day, UTC (default: no limit)",
    )
    tokens_per_day: int | None = arg(
        "--tokens-per-day", metavar="N", type=count, help="the same in tokens (default: no limit)"
    )
    stored_bytes_limit: int | None = arg(
        "--stored-bytes-limit",
        metavar="BYTES",
        type=count,
        help="most that it may keep stored; 0 does not limit it (default: NEKRO_DATABASE__KEY_BYTES)",
    )
    days: float | None = arg("--days", metavar="D", type=_days, help="days until it expires (default: never)")
    json: bool = json_flag()


def run(args: Args, deps: Deps) -> int:
    """Run the action."""
    check(args)
    run_async(_run(args, deps))
    return 0


async def _run(args: Args, deps: Deps) -> None:
    from nekro_agent.shared_clock import shared_time

    async with open_api(deps, asks_up=True) as api:
        if args.action == "list":
            show_list([key.model_dump() for key in await api.keys.list()], args, deps)
        elif args.action == "revoke":
            ids = [key.id for key in await api.keys.list()]
            key_id = chosen_id(ids, str(args.name), noun="key", listing="nekro keys")
            show_revoked((await api.keys.revoke(key_id)).model_dump(), args, deps)
        else:
            created = await api.keys.create(
                scopes=args.scope,
                name=args.name or "",
                chats=args.chats,
                user_id=args.user_id,
                requests_per_minute=args.rate,
                cost_per_day=args.cost_per_day,
                tokens_per_day=args.tokens_per_day,
                stored_bytes_limit=args.stored_bytes_limit,
                expires_at=None if args.days is None else shared_time() + timedelta(days=args.days),
            )
            show_created(created.model_dump(), args, deps)


def check(args: Args) -> None:
    """Return if the arguments fit together.

    Raises:
        UsageError: they do not.
    """
    if (args.name is None) != (args.action == "list"):
        raise UsageError("write `nekro keys list`, `nekro keys create NAME` or `nekro keys revoke ID`")
    if args.action == "create" and not args.scope:
        raise UsageError(f"a key needs at least one scope of {', '.join(get_args(KeyScope))}")


def show_list(keys: Sequence[Mapping[str, Any]], args: Args, deps: Deps) -> None:
    """Print keys."""
    if args.json:
        deps.output.json(keys)
        return
    rows = [
        (
            key["id"],
            key["name"],
            " ".join(key["scopes"]),
            key["chats"],
            key["user_id"] or "any",
            _stored(key),
            _state(key),
        )
        for key in keys
    ]
    deps.output.table(("ID", "NAME", "SCOPES", "CHATS", "USER", "STORED", "STATE"), rows)


def show_created(key: Mapping[str, Any], args: Args, deps: Deps) -> None:
    """Print a new key with its secret."""
    if args.json:
        deps.output.json(key)
        return
    deps.output.data(key["key"])
    deps.output.words(f"created key {key['id']}; it is not shown again")


def show_revoked(key: Mapping[str, Any], args: Args, deps: Deps) -> None:
    """Print a key that was revoked."""
    if args.json:
        deps.output.json(key)
    else:
        deps.output.words(f"revoked key {key['id']} ({key['name']})")


def _stored(key: Mapping[str, Any]) -> str:
    limit = key["stored_bytes_limit"]
    return f"{key['stored_bytes']:,}" + (f" of {limit:,}" if limit else "")


def _state(key: Mapping[str, Any]) -> str:
    if key["revoked_at"] is not None:
        return f"revoked {key['revoked_at']:%Y-%m-%d}"
    return "valid" if key["expires_at"] is None else f"until {key['expires_at']:%Y-%m-%d %H:%M} UTC"
