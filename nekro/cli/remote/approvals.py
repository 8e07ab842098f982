"""`nekro approvals` over a gateway."""

from __future__ import annotations

from typing import Any

from nekro.cli.command import Deps, confirm
from nekro.cli.commands.approvals import (
    Args,
    check,
    chosen,
    edited_arguments,
    show_decided,
    show_list,
    show_one,
)
from nekro.cli.remote.target import newest, open_client
from nekro_client import Client, models

__all__ = ["run"]

#: Approvals among which a number or the beginning of an id is looked for.
_MOST_LISTED = 1000
#: Characters of a whole id.
_ID_CHARS = 32


def run(args: Args, deps: Deps) -> int:
    """Run the action."""
    check(args)
    with open_client() as client:
        if args.action == "list":
            found = _newest(client, args, limit=args.limit, state=None if args.all else "pending")
            show_list([item.model_dump() for item in found], args, deps)
            return 0
        item = client.approvals.get(_id(client, args))
        if args.action == "show":
            show_one(item.model_dump(), args, deps)
        else:
            show_decided(_decided(client, item, args, deps).model_dump(), args, deps)
    return 0


def _decided(client: Client, item: models.Approval, args: Args, deps: Deps) -> models.Approval:
    if args.action == "deny":
        return client.approvals.deny(item.id, reason=args.reason)
    if args.action == "revoke":
        return client.approvals.revoke(item.id)
    edited = edited_arguments(args)
    if not args.json:
        deps.output.words(item.call or item.method)
    changed: dict[str, Any] = {}
    if edited is not None:
        changed = {"args": edited[0], "kwargs": edited[1]}
        deps.output.words(f"approved with the arguments of --args instead: {args.args}")
    confirm(f"approve this call in chat {item.chat_key}?", assumed=args.yes, deps=deps)
    return client.approvals.approve(item.id, scope=args.scope, reason=args.reason, **changed)  # type: ignore[arg-type]  # argparse checks the choices


def _newest(client: Client, args: Args, *, limit: int, state: str | None) -> list[models.Approval]:
    return newest(
        lambda cursor, size: client.approvals.list(
            chat_key=args.chat_key, state=state, cursor=cursor, limit=size
        ),
        limit=limit,
    )


def _id(client: Client, args: Args) -> str:
    name = str(args.approval_id)
    if len(name) >= _ID_CHARS:
        return name
    listed = _newest(client, args, limit=_MOST_LISTED, state=None)
    return chosen({item.id: item.number for item in listed}, name)
