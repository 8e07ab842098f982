"""`nekro cancel`: stop what the agent is doing in a chat."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from nekro.cli.api import open_api
from nekro.cli.command import Deps, arg, chat_key, json_flag, positive_number
from nekro.cli.output import PartialError
from nekro.cli.running import run_async
from nekro_agent.errors import ServiceError

if TYPE_CHECKING:
    from nekro_client.models import Reset

__all__ = [
    "EPILOG",
    "Args",
    "run",
    "show",
]


EPILOG: Final = """\
examples:
  nekro cancel group_1
  nekro cancel group_1 --seconds 60 --json

Waiting rounds are cancelled. The running round is stopped: its sandbox is killed and its calls are revoked,
which cancels their coroutines on the workers; the command returns once that is recorded. Effects of the
round up to that moment remain. Calls that wait for approval, or in which programs wait, are withdrawn.
`--json` prints {cancelled, stopped, still_running, waits}: lists of rounds {id, number, state, worker}, and
the ids of the withdrawn calls; with `error` added when a round still runs.
"""


@dataclass(frozen=True, kw_only=True)
class Args:
    """Arguments of `nekro cancel`."""

    chat_key: str = arg(metavar="K", type=chat_key, help="chat")
    seconds: float = arg(
        "--seconds",
        metavar="S",
        type=positive_number,
        default=10.0,
        help="how long to wait until the running round has stopped, at most 300 (default: %(default)g)",
    )
    json: bool = json_flag()


def run(args: Args, deps: Deps) -> int:
    """Stop the chat's rounds."""
    from nekro.operations.pages import MOST_WAIT_SECONDS

    args = replace(args, seconds=min(args.seconds, MOST_WAIT_SECONDS))
    show(run_async(_cancel(args, deps)).model_dump(), args, deps)
    return 0


async def _cancel(args: Args, deps: Deps) -> Reset:
    # The request is a row, which the worker that runs the round reads; it needs no running system.
    async with open_api(deps, asks_up=True) as api:
        return await api.chat(args.chat_key).cancel(wait=args.seconds)


def show(described: Mapping[str, Any], args: Args, deps: Deps) -> None:
    """Print the rounds that were cancelled, were stopped, or still run.

    Raises:
        PartialError: one still runs.
    """
    if not args.json:
        _show_cancelled(described, args, deps)
    if described["still_running"]:
        item = described["still_running"][0]
        error = ServiceError(
            f"round {item['id']} on {item['worker']} has not stopped within {args.seconds:g} s; it stops as"
            " soon as its worker reads the request or its lease expires"
        )
        raise PartialError(error, described)
    if args.json:
        deps.output.json(described)


def _show_cancelled(described: Mapping[str, Any], args: Args, deps: Deps) -> None:
    stopped, cancelled, waits = described["stopped"], described["cancelled"], described["waits"]
    if stopped or cancelled:
        deps.output.words(f"stopped {len(stopped)} running, cancelled {len(cancelled)} waiting")
    if waits:
        deps.output.words(f"withdrew {len(waits)} calls that waited; their programs do not go on")
    if not (stopped or cancelled or waits or described["still_running"]):
        deps.output.words(f"no round waits or runs in chat {args.chat_key}")
