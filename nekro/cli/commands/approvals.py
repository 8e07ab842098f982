"""`nekro approvals`: list calls that wait for approval, and decide on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final, Literal

from nekro.cli.api import SystemNeed, all_of, find, open_api
from nekro.cli.command import Deps, action_option, arg, chat_key, confirm, json_flag, not_blank, positive_int
from nekro.cli.commands.call import parse_arguments
from nekro.cli.output import one_line
from nekro.cli.running import run_async
from nekro_agent.errors import UsageError

if TYPE_CHECKING:
    from nekro.wire.values import Arguments
    from nekro_client.models import Approval

__all__ = ["EPILOG", "Args", "run", "show_decided", "show_list", "show_one"]


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
    scope: Literal["once", "turn", "chat"] = arg(
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
    if (args.approval_id is None) != (args.action == "list"):
        raise UsageError("write `nekro approvals list` or `nekro approvals show|approve|deny|revoke ID`")
    if args.action != "approve" and (args.args is not None or args.scope != "once"):
        raise UsageError("--args and --scope belong to `nekro approvals approve ID`")
    run_async(_run(args, deps))
    return 0


async def _run(args: Args, deps: Deps) -> None:
    edited = None if args.args is None else parse_arguments(args.args)
    # A decision sends the call, and publishes its event.
    system = SystemNeed(command="approvals") if args.action in ("approve", "deny") else None
    async with open_api(deps, system=system, asks_up=True) as api:
        approvals = api.approvals
        if args.action == "list":
            page = partial(approvals.list, chat_key=args.chat_key, state=None if args.all else "pending")
            show_list(await all_of(page, limit=args.limit), args, deps)
            return
        approval_id = await find(
            approvals.list, str(args.approval_id), noun="approval", listing="nekro approvals list --all"
        )
        if args.action == "show":
            show_one(await approvals.get(approval_id), args, deps)
        elif args.action == "deny":
            show_decided(await approvals.deny(approval_id, reason=args.reason), args, deps)
        elif args.action == "revoke":
            show_decided(await approvals.revoke(approval_id), args, deps)
        else:
            _ask(await approvals.get(approval_id), edited, args, deps)
            positional, named = (None, None) if edited is None else edited
            decided = await approvals.approve(
                approval_id, scope=args.scope, reason=args.reason, args=positional, kwargs=named
            )
            show_decided(decided, args, deps)


def _ask(asked: Approval, edited: Arguments | None, args: Args, deps: Deps) -> None:
    """Show the call, or how ``--args`` changes it, and ask whether it may run."""
    call = asked.call or asked.method
    if edited is not None:
        from nekro.app.approvals.shown import compared, shown_call
        from nekro.wire.values import encode_arguments

        changed = shown_call(asked.method, encode_arguments(*edited))
        deps.output.words(compared(call, changed) or "--args changes nothing")
    elif not args.json:
        deps.output.words(call)
    confirm(f"approve this call in chat {asked.chat_key}?", assumed=args.yes, deps=deps)


def show_list(listed: Sequence[Approval], args: Args, deps: Deps) -> None:
    """Print approvals."""
    if args.json:
        deps.output.json([item.model_dump() for item in listed])
        return
    rows = [
        (
            str(item.number or ""),
            item.chat_key,
            item.state,
            one_line(item.summary or item.method, limit=_CALL_COLUMNS),
            f"{item.requested_at:%Y-%m-%d %H:%M:%S} UTC",
            f"{item.expires_at:%Y-%m-%d %H:%M:%S} UTC",
            item.decided_by or "",
            item.id,
        )
        for item in listed
    ]
    deps.output.table(("NUMBER", "CHAT", "STATE", "CALL", "REQUESTED", "EXPIRES", "DECIDED BY", "ID"), rows)


def show_one(item: Approval, args: Args, deps: Deps) -> None:
    """Print one approval in full."""
    if args.json:
        deps.output.json(item.model_dump())
        return
    for name in ("number", "id", "state", "chat_key", "turn_id", "user_id", "requested_at", "expires_at",
                 "scope", "grant_until", "revoked_at", "decided_by", "decided_at", "reason", "digest",
                 "call_id", "call_state"):  # fmt: skip
        value = getattr(item, name)
        if value is not None:
            deps.output.data(f"{name:13} {one_line(str(value), limit=2000)}")
    if item.call_error is not None:
        text = one_line(f"{item.call_error.code}: {item.call_error.text}", limit=2000)
        deps.output.data(f"{'call_error':13} {text}")
    deps.output.data(item.call or item.method)
    if item.difference is not None:
        deps.output.data(item.difference)


def show_decided(item: Approval, args: Args, deps: Deps) -> None:
    """Print what became of an approval."""
    if args.json:
        deps.output.json(item.model_dump())
    elif args.action == "revoke":
        deps.output.words(f"approval {item.number or item.id} permits no further calls")
    elif item.state == "approved":
        deps.output.words(f"approved: call {item.call_id} of {item.method} runs as a job (`nekro jobs`)")
    else:
        deps.output.words(f"denied: call {item.call_id} of {item.method} does not run")
