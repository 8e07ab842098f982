"""`nekro methods`: list the catalogue with the lane of each method, and override lanes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from broker_config.settings import Settings
from nekro.cli.command import Deps, arg, json_flag
from nekro.cli.gateway_client import open_client
from nekro.cli.output import one_line
from nekro.cli.running import run_async
from nekro.cli.services.database import open_database
from nekro.cli.views.catalogue import Catalogue, load_catalogue, say_what_is_listed
from nekro_agent.errors import StorageError, UsageError
from nekro_agent.methods import Lane
from storage.driver.urls import exists

if TYPE_CHECKING:
    from nekro.plugins.entries import MethodEntry
    from nekro.plugins.entry_registry import Registry
    from nekro_client.models import Method
    from storage.caller_reads import LaneOverride

__all__ = [
    "EPILOG",
    "Args",
    "run",
    "run_over_gateway",
    "show_list",
]


_DOC_COLUMNS = 60
#: Lanes that a method can be sent to.
_LANES: Final = (Lane.METHODS, Lane.LONG)

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
    settings = deps.load_settings()
    catalogue = load_catalogue(settings)
    registry = catalogue.registry
    match args.words:
        case []:
            return _list(catalogue, "", args, deps, settings)
        case ["pin", name, lane]:
            return run_async(_pin(settings, registry, name, lane, deps))
        case ["unpin", name]:
            return run_async(_unpin(settings, registry, name, deps))
        case [text] if text not in ("pin", "unpin"):
            return _list(catalogue, text, args, deps, settings)
    raise UsageError(
        "write `nekro methods [TEXT]`, `nekro methods pin METHOD methods|long` or `… unpin METHOD`"
    )


def _list(catalogue: Catalogue, text: str, args: Args, deps: Deps, settings: Settings) -> int:
    overrides = run_async(_overrides(settings))
    pinned = {plugin.key for plugin in catalogue.plugins if plugin.pinned}
    pinned |= {*settings.workers.pinned_plugins, *overrides}
    listed = [
        describe(
            entry,
            overrides.get(entry.plugin_key) or overrides.get(entry.task),
            pinned=entry.plugin_key in pinned,
        )
        for entry in catalogue.registry.enabled()
        if text in entry.task
    ]
    show_list(listed, args, deps)
    say_what_is_listed(catalogue, deps.output)
    return 0


def show_list(listed: Sequence[Mapping[str, Any]], args: Args, deps: Deps) -> None:
    """Print methods as ``describe`` returns them."""
    if args.json:
        deps.output.json(listed)
        return
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


def describe(
    entry: MethodEntry, override: LaneOverride | None = None, *, pinned: bool = False
) -> dict[str, Any]:
    """Return one method as ``--json`` prints it."""
    lane = override.lane if override is not None else entry.lane.value
    described = {
        "name": entry.name,
        "task": entry.task,
        "plugin": entry.plugin_key,
        "type": entry.type.value,
        "lane": f"pinned.{entry.plugin_key}" if pinned else lane,
        "signature": entry.signature,
        "doc": entry.doc,
    }
    return described if override is None else described | {"lane_reason": str(override)}


async def _overrides(settings: Settings) -> dict[str, LaneOverride]:
    """Return the lane overrides by method or plugin; none when the database has not been created."""
    if not exists(settings.database, settings.data_dir):
        return {}
    from storage.caller_reads import lane_overrides
    from storage.engine import Database

    try:
        async with Database(settings.database, settings.data_dir) as database, database.read() as transaction:
            return await lane_overrides(transaction.connection)
    except StorageError:
        return {}


async def _pin(settings: Settings, registry: Registry, name: str, lane: str, deps: Deps) -> int:
    target = _plugin_key(registry, name) if lane == Lane.PINNED else registry.find(name).task
    if lane != Lane.PINNED and lane not in _LANES:
        raise UsageError(f"there is no lane {lane!r} for methods; choose methods or long")
    async with open_database(settings) as database, database.autocommit() as transaction:
        await transaction.lane_overrides.set_by_operator(
            target, lane=Lane(lane), reason="pinned by an operator"
        )
    deps.output.words(f"{target} runs in lane {lane} from now on")
    return 0


async def _unpin(settings: Settings, registry: Registry, name: str, deps: Deps) -> int:
    is_plugin = any(plugin.key == name for plugin in registry.plugins)
    target = name if is_plugin else registry.find(name).task
    async with open_database(settings) as database, database.autocommit() as transaction:
        was_overridden = await transaction.lane_overrides.clear(target)
    deps.output.words(
        f"{target} runs in the lane of its plugin again"
        if was_overridden
        else f"{target} has no lane override"
    )
    return 0


def _plugin_key(registry: Registry, name: str) -> str:
    if any(plugin.key == name for plugin in registry.plugins):
        return name
    known = ", ".join(plugin.key for plugin in registry.plugins)
    raise UsageError(f"only whole plugins can be pinned, and {name!r} is not a plugin; choose one of {known}")


def _first_line(text: str | None) -> str:
    return one_line(text.strip().partition("\n")[0], limit=_DOC_COLUMNS) if text else ""


def run_over_gateway(args: Args, deps: Deps) -> int:
    """List the methods that code may call."""
    if len(args.words) > 1 or args.words[:1] in (["pin"], ["unpin"]):
        raise UsageError(
            "lanes are not set over a gateway; run `nekro methods pin` where the workers' settings are"
        )
    text = args.words[0] if args.words else ""
    with open_client() as client:
        methods = [method for method in client.methods() if text in method.task]
    show_list([_describe(method) for method in methods], args, deps)
    return 0


def _describe(method: Method) -> dict[str, str | None]:
    names = {"name", "task", "plugin", "type", "lane", "signature", "doc"}
    overridden = set() if method.lane_reason is None else {"lane_reason"}
    return method.model_dump(include=names | overridden)
