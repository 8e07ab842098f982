"""`nekro keys` over a gateway; for keys with the scope admin."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from nekro.cli.command import Deps
from nekro.cli.commands.keys import Args, check, show_created, show_list, show_revoked
from nekro.cli.remote.target import open_client

__all__ = ["run"]


def run(args: Args, deps: Deps) -> int:
    """Run the action."""
    check(args)
    with open_client() as client:
        if args.action == "list":
            show_list([key.model_dump() for key in client.keys.list()], args, deps)
        elif args.action == "revoke":
            show_revoked(client.keys.revoke(args.name or "").model_dump(), args, deps)
        else:
            created = client.keys.create(
                scopes=args.scope,
                name=args.name or "",
                chats=args.chats,
                user_id=args.user_id,
                requests_per_minute=args.rate,
                cost_per_day=args.cost_per_day,
                tokens_per_day=args.tokens_per_day,
                stored_bytes_limit=args.stored_bytes_limit,
                expires_at=None if args.days is None else datetime.now(UTC) + timedelta(days=args.days),
            )
            show_created(created.model_dump(), args, deps)
    return 0
