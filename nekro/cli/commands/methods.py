"""`nekro methods`: list the catalogue with the lane of each method, and override lanes."""

from __future__ import annotations

from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, cast

from nekro.cli.api import open_api
from nekro.cli.command import Deps, arg, json_flag
from nekro.cli.output import one_line
from nekro.cli.running import run_async
from nekro.cli.views.catalogue import CatalogueServices, say_what_is_listed
from nekro_agent.errors import UsageError

if TYPE_CHECKING:
    from nekro_client.models import Method

__all__ = ["EPILOG", "Args", "run"]

_DOC_COLUMNS = 60

EPILOG: Final = """\
examples:
  nekro methods
  nekro methods nekro.notes
  nekro methods --json
  nekro methods pin Ada.weather.forecast long
  nekro methods unpin Ada.weather.forecast
  nekro methods pin Ada.weather pinned

The watchdog moves a method that blocks its event loop to lane `long`; LANE then shows `long!`, and the
reason follows the table. `pin` sets the lane permanently, `unpin` removes both overrides. Running workers
apply a change within a second.
`pin PLUGIN pinned` runs a whole plugin in one process of the fleet; restart the workers afterwards, unless
the plugin's cleanup ends everything that its init started.
`--json` prints a list of {name, task, plugin, type, lane, signature, doc}; lane_reason where the lane is
overridden.
"""


@dataclass(frozen=True, kw_only=True)
class Args:
    """Arguments of `nekro methods`."""

    words: list[str] = arg(
        nargs="*",
        metavar="TEXT",
        help="only methods whose full name contains it; or `pin METHOD methods|long`, `pin PLUGIN pinned`, "
        "`unpin NAME`",
    )
    json: bool = json_flag()


def run(args: Args, deps: Deps) -> int:
    """List the methods that code may call, or override the lane of one."""
    run_async(_action(args, deps))
    return 0


def _action(args: Args, deps: Deps) -> Coroutine[Any, Any, None]:
    match args.words:
        case ["pin", name, lane]:
            return _pin(name, lane, deps)
        case ["unpin", name]:
            return _unpin(name, deps)
        case []:
            return _list("", args, deps)
        case [text] if text not in ("pin", "unpin"):
            return _list(text, args, deps)
    raise UsageError(
        "write `nekro methods [TEXT]`, `nekro methods pin METHOD methods|long` or `… unpin METHOD`"
    )


async def _list(text: str, args: Args, deps: Deps) -> None:
    async with open_api(deps, services=CatalogueServices) as api:
        listed = [_described(method) for method in await api.methods() if text in method.task]
        if args.json:
            deps.output.json(listed)
        else:
            _show(listed, deps)
        await say_what_is_listed(api, deps.output)


def _show(listed: Sequence[Mapping[str, Any]], deps: Deps) -> None:
    rows = [
        (
            m["name"],
            m["type"],
            m["lane"] + ("!" if "lane_reason" in m else ""),
            m["signature"],
            m["plugin"],
            one_line(_first_line(m["doc"]), limit=60),
        )
        for m in listed
    ]
    deps.output.table(("NAME", "TYPE", "LANE", "SIGNATURE", "PLUGIN", "WHAT IT DOES"), rows)
    for method in listed:
        if "lane_reason" in method:
            deps.output.words(f"{method['task']} runs in lane {method['lane']}: {method['lane_reason']}")


def _described(method: Method) -> dict[str, str | None]:
    """Return one method as ``--json`` prints it."""
    names = {"name", "task", "plugin", "type", "lane", "signature", "doc"}
    overridden = set() if method.lane_reason is None else {"lane_reason"}
    return method.model_dump(include=names | overridden)


async def _pin(name: str, lane: str, deps: Deps) -> None:
    if lane not in ("methods", "long", "pinned"):
        raise UsageError(f"there is no lane {lane!r} for methods; choose methods or long")
    async with open_api(deps, services=CatalogueServices) as api:
        state = await api.set_lane(name, lane=cast("Any", lane))
    deps.output.words(f"{state.name} runs in lane {lane} from now on")


async def _unpin(name: str, deps: Deps) -> None:
    async with open_api(deps, services=CatalogueServices) as api:
        state = await api.clear_lane(name)
    deps.output.words(
        f"{state.name} runs in the lane of its plugin again"
        if state.is_changed
        else f"{state.name} has no lane override"
    )


def _first_line(text: str | None) -> str:
    return one_line(text.strip().partition("\n")[0], limit=_DOC_COLUMNS) if text else ""
