"""`nekro dead`: list, show, retry and drop dead letters.

A message becomes a dead letter when it ends its workers repeatedly, cannot be read, or is refused.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from nekro.cli.api import all_of, find, is_over_gateway, open_api
from nekro.cli.command import Deps, arg, json_flag, not_blank, positive_int, positive_number
from nekro.cli.output import one_line
from nekro.cli.running import run_async
from nekro.cli.services.ownership import require_running
from nekro_agent.errors import NotFoundError, UsageError

if TYPE_CHECKING:
    from nekro_client.models import DeadLetter

__all__ = ["EPILOG", "Args", "run", "show_list", "show_one"]


EPILOG: Final = """\
examples:
  nekro dead
  nekro dead show 5f0c…
  nekro dead retry 5f0c… --timeout 60
  nekro dead drop all

A call becomes a dead letter when NEKRO_BROKER__MAX_DELIVERIES workers took it and none finished it, any
message when no worker can read it or its signature is not valid. `show` and `retry` verify the signatures:
`retry` prints what will run and sends it again under its id, with `--timeout` under a new deadline; no
caller waits for its result. Altered or refused messages cannot be sent again. `--json` prints a list of {id,
task, lane, source, reason, deliveries, bytes}, with `show` one of them and {signature, chat_key, deadline}.
"""

_ACTIONS: Final = ("list", "show", "retry", "drop")
#: Fields that a list leaves out, because it verifies nothing.
_CHECKED: Final = {"signature", "summary", "chat_key", "deadline"}


@dataclass(frozen=True, kw_only=True)
class Args:
    """Arguments of `nekro dead`."""

    action: str = arg(nargs="?", default="list", choices=_ACTIONS, help="default: list")
    id: str | None = arg(
        metavar="ID", nargs="?", type=not_blank, help="id of a call, or its beginning; `drop all`"
    )
    limit: int = arg(
        "--limit",
        metavar="N",
        type=positive_int,
        default=1000,
        help="list, drop all: newest dead letters (default: %(default)s)",
    )
    timeout: float | None = arg(
        "--timeout",
        metavar="SECONDS",
        type=positive_number,
        help="with `retry`: give the call this long, from now; without it the call keeps its deadline",
    )
    json: bool = json_flag()


def run(args: Args, deps: Deps) -> int:
    """Run the action."""
    if (args.id is None) != (args.action == "list"):
        raise UsageError("write `nekro dead list` or `nekro dead show|retry|drop ID`")
    if args.timeout is not None and args.action != "retry":
        raise UsageError("--timeout is for `nekro dead retry ID`")
    if not is_over_gateway():
        settings = deps.load_settings()
        if settings.broker.url is None:
            require_running(settings.data_dir)
    run_async(_run(args, deps))
    return 0


async def _run(args: Args, deps: Deps) -> None:
    async with open_api(deps, asks_up=True) as api:
        letters = api.dead_letters
        if args.action == "list":
            show_list(await all_of(letters.list, limit=args.limit), args, deps)
            return
        if (args.action, args.id) == ("drop", "all"):
            for letter in await all_of(letters.list, limit=args.limit):
                with contextlib.suppress(NotFoundError):  # sent again or dropped meanwhile
                    await letters.drop(letter.id)
                    deps.output.words(f"dropped {letter.id}")
            return
        letter_id = await find(letters.list, str(args.id), noun="dead letter", listing="nekro dead")
        if args.action == "show":
            show_one(await letters.get(letter_id), args, deps)
        elif args.action == "drop":
            await letters.drop(letter_id)
            deps.output.words(f"dropped {letter_id}")
        else:
            _show_what_runs(await letters.get(letter_id), args, deps)
            sent = await letters.retry(letter_id, timeout_seconds=args.timeout)
            deps.output.words(f"sent {letter_id} to lane {sent.lane} again")


def _show_what_runs(letter: DeadLetter, args: Args, deps: Deps) -> None:
    """Print what a retry sends; without a valid signature it is refused."""
    if letter.summary is None:
        return
    until = ""
    if letter.deadline is not None:
        at = f"until {letter.deadline:%Y-%m-%d %H:%M:%S} UTC"
        until = f", {at if args.timeout is None else f'for at most {args.timeout:g} s'}"
    deps.output.words(f"runs {letter.summary}{until}")


def show_list(found: Sequence[DeadLetter], args: Args, deps: Deps) -> None:
    """Print dead letters."""
    if args.json:
        deps.output.json([item.model_dump(exclude=_CHECKED) for item in found])
        return
    rows = [(item.id, item.task, item.lane, item.bytes, item.reason) for item in found]
    deps.output.table(("ID", "TASK", "LANE", "BYTES", "REASON"), rows)


def show_one(letter: DeadLetter, args: Args, deps: Deps) -> None:
    """Print a dead letter whose signatures were checked."""
    deadline = letter.deadline and letter.deadline.isoformat()
    described = letter.model_dump(exclude={"summary"}) | {"deadline": deadline}
    if args.json:
        deps.output.json(described)
        return
    for name, value in described.items():
        deps.output.report(one_line(f"{name}: {value}"))
