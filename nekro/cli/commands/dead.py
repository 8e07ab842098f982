"""`nekro dead`: list, show, retry and drop dead letters.

A message becomes a dead letter when it ends its workers repeatedly, cannot be read, or is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from broker_config.settings import Settings
from nekro.cli.command import Deps, arg, chosen_id, json_flag, not_blank, positive_int, positive_number
from nekro.cli.gateway_client import newest, open_client
from nekro.cli.output import one_line
from nekro.cli.services.ownership import require_running
from nekro_agent.errors import UsageError

if TYPE_CHECKING:
    from nekro.broker.dead_letters import DeadLetters, DeadMessage, VerifiedMessage

__all__ = [
    "EPILOG",
    "Args",
    "check",
    "chosen",
    "run",
    "run_over_gateway",
    "show_list",
    "show_one",
]


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
        help="newest dead letters that are read (default: %(default)s)",
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
    check(args)
    settings = deps.load_settings()
    if settings.broker.url is None:
        require_running(settings.data_dir)
    with _opened(settings) as letters:
        found = letters.newest(limit=args.limit)
        if args.action == "list":
            show_list([_described(item) for item in found], args, deps)
            return 0
        wanted = chosen([item.id for item in found], args)
        for message in (item for item in found if item.id in wanted):
            if args.action == "show":
                show_one(_checked(letters, message), args, deps)
            elif args.action == "drop":
                letters.drop(message)
                deps.output.words(f"dropped {message.id}")
            else:
                _retry(letters, message, args, deps)
    return 0


def check(args: Args) -> None:
    """Return if the arguments fit together.

    Raises:
        UsageError: they do not.
    """
    if (args.id is None) != (args.action == "list"):
        raise UsageError("write `nekro dead list` or `nekro dead show|retry|drop ID`")
    if args.timeout is not None and args.action != "retry":
        raise UsageError("--timeout is for `nekro dead retry ID`")


def _described(message: DeadMessage) -> dict[str, Any]:
    """Return one dead letter as ``--json`` prints it."""
    from nekro.operations.fleet import dead_letter_answer

    return dead_letter_answer(message).model_dump(exclude={"signature", "chat_key", "deadline"})


def _checked(letters: DeadLetters, message: DeadMessage) -> dict[str, Any]:
    """Return one dead letter with the fields that its signatures cover."""
    checked = letters.checked(message)
    at = checked["deadline"]
    return _described(message) | checked | {"deadline": None if at is None else at.isoformat()}


def _retry(letters: DeadLetters, message: DeadMessage, args: Args, deps: Deps) -> None:
    verified = letters.verify(message)
    deps.output.words(f"runs {_summary(verified, args.timeout)}")
    letters.retry(verified, timeout_seconds=args.timeout)
    deps.output.words(f"sent {message.id} to lane {verified.lane} again")


def _summary(verified: VerifiedMessage, timeout_seconds: float | None) -> str:
    call, where = verified.invocation, f"{verified.task} on lane {verified.lane}"
    if call is None:
        return f"{where}: processes the pending work that the database records"
    until = (
        f"until {call.deadline:%Y-%m-%d %H:%M:%S} UTC"
        if timeout_seconds is None
        else f"for at most {timeout_seconds:g} s"
    )
    user = "" if call.user_id is None else f" as user {call.user_id}"
    return f"{where} in chat {call.chat_key}{user}, {len(call.args)} bytes of arguments, {until}"


@contextmanager
def _opened(settings: Settings) -> Iterator[DeadLetters]:
    from broker_config.app import create_app
    from broker_config.embedded import resolve_settings, resolve_signing_key
    from nekro.broker.dead_letters import DeadLetters
    from nekro.cli.services.database import follow_shared_time
    from nekro.wire.invocation import Signer

    settings = resolve_settings(settings)
    follow_shared_time(settings)
    signer = Signer.from_text(resolve_signing_key(settings).get_secret_value())
    letters = DeadLetters(create_app(settings), signer=signer)
    try:
        yield letters
    finally:
        letters.close()


def chosen(ids: Sequence[str], args: Args) -> set[str]:
    """Return the ids that the arguments name: one by its beginning, as ``chosen_id``, or all."""
    if (args.action, args.id) == ("drop", "all"):
        return set(ids)
    return {chosen_id(set(ids), str(args.id), noun="dead letter", listing="nekro dead")}


def show_list(found: Sequence[Mapping[str, Any]], args: Args, deps: Deps) -> None:
    """Print dead letters."""
    if args.json:
        deps.output.json(found)
        return
    rows = [(item["id"], item["task"], item["lane"], item["bytes"], item["reason"]) for item in found]
    deps.output.table(("ID", "TASK", "LANE", "BYTES", "REASON"), rows)


def show_one(described: Mapping[str, Any], args: Args, deps: Deps) -> None:
    """Print a dead letter whose signatures were checked."""
    if args.json:
        deps.output.json(described)
        return
    for name, value in described.items():
        deps.output.report(one_line(f"{name}: {value}"))


_CHECKED = {"signature", "chat_key", "deadline"}


def run_over_gateway(args: Args, deps: Deps) -> int:
    """Run the action."""
    check(args)
    with open_client() as client:
        letters = client.dead_letters
        found = newest(lambda cursor, limit: letters.list(cursor=cursor, limit=limit), limit=args.limit)
        if args.action == "list":
            show_list([item.model_dump(exclude=_CHECKED) for item in found], args, deps)
            return 0
        for letter_id in sorted(chosen([item.id for item in found], args)):
            if args.action == "show":
                shown = letters.get(letter_id)
                deadline = shown.deadline and shown.deadline.isoformat()
                show_one(shown.model_dump() | {"deadline": deadline}, args, deps)
            elif args.action == "drop":
                letters.drop(letter_id)
                deps.output.words(f"dropped {letter_id}")
            else:
                sent = letters.retry(letter_id, timeout_seconds=args.timeout)
                deps.output.words(f"sent {letter_id} to lane {sent.lane} again")
    return 0
