"""`nekro approvals`: list calls that wait for approval, and decide on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from broker_config.settings import Settings
from nekro.cli.command import (
    Deps,
    action_option,
    arg,
    chat_key,
    chosen_id,
    confirm,
    json_flag,
    not_blank,
    operator,
    positive_int,
)
from nekro.cli.commands.call import parse_arguments
from nekro.cli.gateway_client import newest, open_client
from nekro.cli.output import one_line
from nekro.cli.running import run_async
from nekro.cli.services.database import open_database
from nekro.cli.services.system import open_services
from nekro_agent.errors import UsageError

if TYPE_CHECKING:
    from nekro.wire.values import Arguments
    from nekro_client import Client, models
    from storage.accounts.approvals import Approval
    from storage.transaction import Transaction

__all__ = [
    "EPILOG",
    "Args",
    "check",
    "chosen",
    "edited_arguments",
    "run",
    "run_over_gateway",
    "show_decided",
    "show_list",
    "show_one",
]


EPILOG: Final = """\
examples:
  nekro approvals
  nekro approvals list --all --chat-key group_1 --json
  nekro approvals show 17
  nekro approvals approve 17
  nekro approvals approve 17 --scope chat --yes
  nekro approvals approve 17 --args '["ada@example.org", "Hello"]' --yes
  nekro approvals deny 17 --reason 'wrong recipient'
  nekro approvals revoke 17

`show` and `approve` print the call exactly as it will run, as Python source. `approve` asks before it
decides; --yes does not ask. --scope turn permits further calls of the method in the same turn, --scope chat
in the same chat, both for NEKRO_APPROVAL__GRANT_SECONDS; `revoke` ends that. --args replaces the arguments,
and the change is shown. Of two decisions on one call the second is refused and names the first. A list has
each call on one line, with long arguments cut; `show` is exact. A request is named by its number, by its id,
or by the beginning of its id. `--json` prints a list of approvals, else one, as `GET /approvals/{id}` does.
"""

_ACTIONS: Final = ("list", "show", "approve", "deny", "revoke")

_CALL_COLUMNS: Final = 100
#: Ids that are shown of a prefix with several.
_MOST_NEAR: Final = 3
#: Approvals among which a number or the beginning of an id is looked for.
_MOST_LISTED: Final = 1000
#: Characters of a whole id.
_ID_CHARS: Final = 32


@dataclass(frozen=True, kw_only=True)
class Args:
    """Arguments of `nekro approvals`."""

    action: str = action_option(_ACTIONS)
    approval_id: str | None = arg(
        nargs="?",
        metavar="ID",
        type=not_blank,
        help="number of the approval, its id, or the beginning of that; for all but list",
    )
    chat_key: str | None = arg("--chat-key", metavar="K", type=chat_key, help="list: only of this chat")
    all: bool = arg("--all", action="store_true", help="list: also those that were decided")
    limit: int = arg(
        "--limit", metavar="N", type=positive_int, default=100, help="list: most lines (default: %(default)s)"
    )
    scope: str = arg(
        "--scope",
        choices=("once", "turn", "chat"),
        default="once",
        help="approve: what else it permits (default: %(default)s, nothing)",
    )
    args: str | None = arg("--args", metavar="JSON", help="approve: arguments in place of those asked for")
    reason: str | None = arg("--reason", metavar="TEXT", help="approve, deny: kept with the decision")
    yes: bool = arg("--yes", action="store_true", help="approve: do not ask")
    json: bool = json_flag()


def run(args: Args, deps: Deps) -> int:
    """Run the action."""
    check(args)
    settings = deps.load_settings()
    actions = {"list": _list, "show": _show, "approve": _approve, "deny": _deny, "revoke": _revoke}
    run_async(actions[args.action](args, deps, settings))
    return 0


def check(args: Args) -> None:
    """Return if the arguments fit together.

    Raises:
        UsageError: they do not.
    """
    if (args.approval_id is None) != (args.action == "list"):
        raise UsageError("write `nekro approvals list` or `nekro approvals show|approve|deny|revoke ID`")
    if args.action != "approve" and (args.args is not None or args.scope != "once"):
        raise UsageError("--args and --scope belong to `nekro approvals approve ID`")


def edited_arguments(args: Args) -> Arguments | None:
    """Return the arguments of `--args`; None without it."""
    return None if args.args is None else parse_arguments(args.args)


async def _list(args: Args, deps: Deps, settings: Settings) -> None:
    from nekro.operations.approvals import approval_answer
    from storage.states import ApprovalState

    async with open_database(settings) as database, database.read() as transaction:
        rows = await transaction.approvals.newest(
            limit=args.limit,
            chat_key=args.chat_key,
            state=None if args.all else ApprovalState.PENDING,
        )
    show_list([approval_answer(row, in_full=False).model_dump() for row in rows], args, deps)


async def _show(args: Args, deps: Deps, settings: Settings) -> None:
    async with open_database(settings) as database, database.read() as transaction:
        described = await _described(transaction, await _find(transaction, str(args.approval_id)))
    show_one(described, args, deps)


async def _approve(args: Args, deps: Deps, settings: Settings) -> None:
    from storage.states import ApprovalScope

    edited = edited_arguments(args)
    async with open_services(
        settings, command="approvals", lanes=(), output=deps.output, needs_workers=False
    ) as (_, services):
        async with services.database.read() as transaction:
            row = await _find(transaction, str(args.approval_id))
        _ask(row, edited, args, deps)
        decided = await services.approval_decisions.approve(
            row.id,
            by=operator(),
            scope=ApprovalScope(args.scope),
            reason=args.reason,
            arguments=edited,
        )
        async with services.database.read() as transaction:
            described = await _described(transaction, decided)
    show_decided(described, args, deps)


def _ask(row: Approval, edited: Arguments | None, args: Args, deps: Deps) -> None:
    import dataclasses

    from nekro.app.approvals.shown import difference, shown_call
    from nekro.wire.values import encode_arguments

    if edited is not None:
        row = dataclasses.replace(row, edited_arguments=encode_arguments(*edited))
        deps.output.words(difference(row) or "--args changes nothing")
    elif not args.json:
        deps.output.words(shown_call(row.method, row.arguments))
    confirm(f"approve this call in chat {row.chat_key}?", assumed=args.yes, deps=deps)


async def _deny(args: Args, deps: Deps, settings: Settings) -> None:
    async with open_services(
        settings, command="approvals", lanes=(), output=deps.output, needs_workers=False
    ) as (_, services):
        async with services.database.read() as transaction:
            row = await _find(transaction, str(args.approval_id))
        decided = await services.approval_decisions.deny(row.id, by=operator(), reason=args.reason)
        async with services.database.read() as transaction:
            described = await _described(transaction, decided)
    show_decided(described, args, deps)


async def _revoke(args: Args, deps: Deps, settings: Settings) -> None:
    async with open_database(settings) as database:
        async with database.begin() as transaction:
            row = await _find(transaction, str(args.approval_id))
            await transaction.approvals.revoke(row.chat_key, approval_id=row.id)
        async with database.read() as transaction:
            described = await _described(transaction, await transaction.approvals.get(row.id))
    show_decided(described, args, deps)


async def _find(transaction: Transaction, name: str) -> Approval:
    """Return the approval that ``name`` names; raises as ``chosen_id``."""
    near = {row.id: row for row in await transaction.approvals.newest(name=name, limit=_MOST_NEAR)}
    return near[chosen({row.id: row.number for row in near.values()}, name)]


def chosen(numbers: Mapping[str, int | None], name: str) -> str:
    """Return the id of the approval that is named by its number, its id or the beginning of that.

    Args:
        numbers: the numbers of approvals by their ids.

    Raises:
        The errors of ``chosen_id``.
    """
    for approval_id, number in numbers.items():
        if number is not None and name.removeprefix("#") == str(number):
            return approval_id
    return chosen_id(numbers, name, noun="approval", listing="nekro approvals list --all")


async def _described(transaction: Transaction, row: Approval) -> dict[str, Any]:
    from nekro.operations.approvals import approval_answer

    call = await transaction.calls.find(row.call_id)
    return approval_answer(row, call).model_dump()


def show_list(listed: Sequence[Mapping[str, Any]], args: Args, deps: Deps) -> None:
    """Print approvals as ``nekro.operations.approvals.approval_answer`` returns them."""
    if args.json:
        deps.output.json(listed)
        return
    rows = [
        (
            str(item["number"] or ""),
            item["chat_key"],
            item["state"],
            one_line(item["summary"] or item["method"], limit=_CALL_COLUMNS),
            f"{item['requested_at']:%Y-%m-%d %H:%M:%S} UTC",
            f"{item['expires_at']:%Y-%m-%d %H:%M:%S} UTC",
            item["decided_by"] or "",
            item["id"],
        )
        for item in listed
    ]
    deps.output.table(("NUMBER", "CHAT", "STATE", "CALL", "REQUESTED", "EXPIRES", "DECIDED BY", "ID"), rows)


def show_one(item: Mapping[str, Any], args: Args, deps: Deps) -> None:
    """Print one approval in full."""
    if args.json:
        deps.output.json(item)
        return
    for name in ("number", "id", "state", "chat_key", "turn_id", "user_id", "requested_at", "expires_at",
                 "scope", "grant_until", "revoked_at", "decided_by", "decided_at", "reason", "digest",
                 "call_id", "call_state"):  # fmt: skip
        if item[name] is not None:
            deps.output.data(f"{name:13} {one_line(str(item[name]), limit=2000)}")
    if item["call_error"] is not None:
        error = item["call_error"]
        text = one_line(f"{error['code']}: {error['text']}", limit=2000)
        deps.output.data(f"{'call_error':13} {text}")
    deps.output.data(item["call"])
    if item["difference"] is not None:
        deps.output.data(item["difference"])


def show_decided(item: Mapping[str, Any], args: Args, deps: Deps) -> None:
    """Print what became of an approval."""
    if args.json:
        deps.output.json(item)
        return
    if args.action == "revoke":
        deps.output.words(f"approval {item['number'] or item['id']} permits no further calls")
    elif item["state"] == "approved":
        deps.output.words(
            f"approved: call {item['call_id']} of {item['method']} runs as a job (`nekro jobs`)"
        )
    else:
        deps.output.words(f"denied: call {item['call_id']} of {item['method']} does not run")


def run_over_gateway(args: Args, deps: Deps) -> int:
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
