"""`nekro call`: call one plugin method through the queue."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from nekro.base.plain import to_plain
from nekro.cli.api import SystemNeed, open_system_api
from nekro.cli.command import (
    Deps,
    arg,
    chat_key_option,
    confirm,
    json_flag,
    positive_number,
    read_text,
    user_id_option,
)
from nekro.cli.gateway_client import invalid
from nekro.cli.running import run_async
from nekro.cli.services.presence import awaited_with_workers
from nekro.cli.services.system import CALL_LANES
from nekro_agent.errors import UsageError

if TYPE_CHECKING:
    from nekro.operations.actor import Actor
    from nekro.plugins.entries import MethodEntry
    from nekro_client.models import Call

__all__ = [
    "EPILOG",
    "Args",
    "parse_arguments",
    "run",
    "show",
]


EPILOG: Final = """\
examples:
  nekro call list_notes --user-id ada
  nekro call save_note --args '["shop", "Shopping", "milk"]' --chat-key group_1 --user-id ada
  nekro call nekro.notes.read_note --args '{"note_id": "shop"}' --user-id ada --json
  nekro call describe --args @arguments.json

`--json` prints {id, value, type, worker, duration_ms}, or {error: {type, message, frames}} for a failed call.
When a method raises, the last place in the plugin's own source is printed before the error: file, line,
function and code. `--debug` prints all of them; `--json` has them as `frames`, the innermost last.
A method that requires approval is asked for, unless --yes is given; over NEKRO_URL the key decides.
The value of an AGENT method is its text, of a MULTIMODAL_AGENT method its parts; no round follows.
"""


@dataclass(frozen=True, kw_only=True)
class Args:
    """Arguments of `nekro call`."""

    method: str = arg(metavar="METHOD", help="function name, or author.module.function")
    args: str = arg(
        "--args",
        metavar="JSON",
        default="[]",
        help="a list (positional) or an object (by name); @FILE reads it, - is stdin (default: none)",
    )
    chat_key: str = chat_key_option()
    user_id: str | None = user_id_option()
    timeout: float | None = arg(
        "--timeout",
        metavar="SECONDS",
        type=positive_number,
        help="longest wait (default: the limit of the method's lane)",
    )
    yes: bool = arg(
        "--yes", action="store_true", help="approve the call, if its method requires that, without a question"
    )
    json: bool = json_flag()


def run(args: Args, deps: Deps) -> int:
    """Call the method and print its value."""
    positional, named = parse_arguments(args.args)
    call = run_async(_call(args, positional, named, deps))
    if call.approval_id is not None:
        deps.output.words(f"call {call.id} waits for approval {call.approval_id}; `nekro approvals` decides")
        return 0
    show(call.model_dump(include={"id", "value", "type", "worker", "duration_ms"}), args, deps)
    return 0


async def _call(args: Args, positional: tuple[Any, ...], named: dict[str, Any], deps: Deps) -> Call:
    system = SystemNeed(command="call", lanes=CALL_LANES, needs_workers=True)
    here = {"call": partial(_call_here, approve=partial(_approve, args, deps))}
    async with open_system_api(deps, system, here=here) as opened:
        return await opened.api.call(
            args.method,
            positional,
            named,
            chat_key=args.chat_key,
            user_id=args.user_id,
            timeout_seconds=args.timeout,
        )


async def _call_here(
    actor: Actor,
    method: str,
    positional: tuple[Any, ...],
    named: dict[str, Any],
    *,
    approve: Callable[[MethodEntry, tuple[Any, ...], dict[str, Any]], None],
    **given: Any,
) -> Call:
    """Call a method from this process, unless no worker serves its lane."""
    from nekro.operations.calls import call_method
    from nekro_client.models import CallBody

    services = actor.services
    entry = await services.find_method(method)
    if entry.requires_approval:
        approve(entry, positional, named)
    try:
        body = CallBody(method=method, args=list(positional), kwargs=named, **given)
    except ValueError as exc:
        raise invalid(exc) from exc
    lane = services.lanes.lane_of(entry)
    return await awaited_with_workers(call_method(actor, body), lambda: services.app, lane=lane)


def _approve(
    args: Args, deps: Deps, entry: MethodEntry, positional: tuple[Any, ...], named: dict[str, Any]
) -> None:
    """Show a call, and return if the user of the shell approves it.

    Raises:
        UsageError: the user does not, or there is no terminal to ask on.
    """
    from nekro.app.approvals.shown import shown_call
    from nekro.wire.values import encode_arguments

    deps.output.words(shown_call(entry.task, encode_arguments(positional, named)))
    confirm(f"{entry.name} requires approval; approve this call?", assumed=args.yes, deps=deps)


def parse_arguments(text: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Split ``--args`` into positional and named arguments.

    Raises:
        UsageError: it is not JSON, or neither a list nor an object.
    """
    source = "--args"
    if text == "-" or text.startswith("@"):
        source = text.removeprefix("@")
        text = read_text(Path(source))
    try:
        value = json.loads(text)
    except ValueError as exc:
        raise UsageError(f"{source} is not JSON ({exc}); write '[\"text\", 1]' or '{{\"name\": 1}}'") from exc
    if isinstance(value, list):
        return tuple(value), {}
    if isinstance(value, dict):
        return (), value
    raise UsageError(f"{source} is a JSON {type(value).__name__}; write a list, or an object by name")


def show(described: Mapping[str, Any], args: Args, deps: Deps) -> None:
    """Print the object that ``--json`` prints, or the value."""
    if args.json:
        deps.output.json(described)
        return
    value = described["value"]
    if value is not None:
        text = value if isinstance(value, str) else json.dumps(to_plain(value), ensure_ascii=False, indent=2)
        deps.output.data(text)
    deps.output.words(f"{described['type']} in {described['duration_ms']:.1f} ms on {described['worker']}")
