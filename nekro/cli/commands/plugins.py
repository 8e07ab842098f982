"""`nekro plugins`: list, enable, disable, wake and create plugins, or delete a plugin's data."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from broker_config.settings import Settings
from nekro.cli.command import Deps, arg, json_flag, whole_number
from nekro.cli.gateway_client import open_client
from nekro.cli.plugin_files import find_data, purge, write_plugin
from nekro.cli.running import ExitCode, run_async
from nekro.cli.services.database import open_database
from nekro.cli.views.catalogue import load_catalogue, say_what_is_listed, say_which_names_clash
from nekro_agent.errors import StorageError, UsageError
from storage.driver.urls import exists

if TYPE_CHECKING:
    from nekro.plugins.entries import PluginEntry

__all__ = [
    "EPILOG",
    "Args",
    "run",
    "run_over_gateway",
    "show_list",
]


EPILOG: Final = """\
examples:
  nekro plugins
  nekro plugins list --json
  nekro plugins disable Ada.weather
  nekro plugins enable Ada.weather
  nekro plugins --load
  nekro plugins new weather --dir my_plugins
  nekro plugins purge you.weather
  nekro plugins list --chat onebot_v11-group_1
  nekro plugins wake Ada.weather --chat onebot_v11-group_1 --turns 5

`disable` takes effect on all workers within a second, also on those that start later; so does `enable`. The
plugin's on_disabled or on_enabled hooks run once. A plugin that NEKRO_PLUGINS__DISABLED names stays disabled.

`new` writes weather.py and a test that passes, test_weather.py. `purge` deletes a plugin's stored values, its
data directory and its configuration; it asks first, or needs --yes. Stop the workers before, as they may
store data again; `purge` does not remove the plugin's code.

A plugin that declares allow_sleep or sleep_brief is shown in prompts by that brief until the agent or `wake`
wakes it in the chat, for the next --turns turns or until `sleep`. `list --chat` shows these plugins.

`list` shows what the workers serve, and which of them run other files than the others. Without a worker it
shows what the last ones served, or, if no broker is set, imports the plugins of this host as `--load` does.
It ends with exit code 5 when a plugin failed to load; the other plugins still work.
Names of methods and commands that two plugins have are reported here only.
`--json` prints a list of {key, status, path, version, error, placeholders}; status is ok, degraded (it uses
names that do not exist here, needs a setting that is unset, or does without a package: `placeholders`),
starting (its import or init takes long), failed or disabled. With --chat it prints a list of
{key, name, is_awake, turns_left, brief}; turns_left is null without a limit.
"""


@dataclass(frozen=True, kw_only=True)
class Args:
    """Arguments of `nekro plugins`."""

    action: str = arg(
        nargs="?",
        choices=("list", "enable", "disable", "wake", "sleep", "new", "purge"),
        default="list",
        help="`list` (default); `enable` and `disable` a plugin on all workers; `wake` a plugin in a chat, "
        "or let it `sleep`; `new` writes a plugin to start from; `purge` deletes a plugin's data",
    )
    name: str | None = arg(nargs="?", metavar="NAME", help="new: module name; others: plugin key")
    dir: Path = arg(
        "--dir", type=Path, default=Path(), metavar="DIR", help="new: folder to write to (default: .)"
    )
    chat: str | None = arg(
        "--chat", metavar="KEY", help="wake, sleep: the chat; list: the plugins that may sleep in it"
    )
    turns: int | None = arg(
        "--turns",
        type=whole_number,
        metavar="N",
        help="wake: for the next N turns, at most 20 (default: until `sleep`)",
    )
    yes: bool = arg("--yes", action="store_true", help="purge: delete without asking")
    load: bool = arg(
        "--load",
        action="store_true",
        help="list: import the plugins that the settings of this host name, whatever the workers run",
    )
    json: bool = json_flag()


def run(args: Args, deps: Deps) -> int:
    """List, write or purge."""
    if args.turns is not None and args.action != "wake":
        raise UsageError(f"--turns belongs to `nekro plugins wake`, not to `{args.action}`")
    if args.chat is not None or args.action in ("wake", "sleep"):
        return _sleepers(args, deps)
    if args.action == "new":
        return _new(args, deps)
    if args.action == "purge":
        return _purge(args, deps)
    if args.action in ("enable", "disable"):
        return _decide(args, deps, is_enabled=args.action == "enable")
    return _list(args, deps)


def describe(plugin: PluginEntry) -> dict[str, Any]:
    """Return one plugin as ``--json`` prints it."""
    return {
        "key": plugin.key,
        "status": plugin.status.value,
        "path": plugin.path,
        "version": plugin.version,
        "error": plugin.error,
        "placeholders": list(plugin.placeholders),
    }


def _list(args: Args, deps: Deps) -> int:
    settings = deps.load_settings()
    catalogue = load_catalogue(settings, of_this_host=args.load)
    listed = [describe(plugin) for plugin in catalogue.plugins]
    if not catalogue.is_live and exists(settings.database, settings.data_dir):
        disabled = run_async(_disabled(settings))
        listed = [p | ({"status": "disabled"} if p["key"] in disabled else {}) for p in listed]
    code = show_list(listed, args, deps)
    say_what_is_listed(catalogue, deps.output)
    say_which_names_clash(catalogue, deps.output)
    return code


def show_list(listed: Sequence[Mapping[str, Any]], args: Args, deps: Deps) -> int:
    """Print plugins as ``describe`` returns them; returns the exit code."""
    if args.json:
        deps.output.json(listed)
    else:
        rows = [
            (p["key"], p["status"], p["version"], p["error"] or ", ".join(p["placeholders"]), p["path"])
            for p in listed
        ]
        deps.output.table(("KEY", "STATUS", "VERSION", "WHAT IS WRONG", "PATH"), rows)
    return ExitCode.PLUGIN if any(plugin["status"] == "failed" for plugin in listed) else ExitCode.OK


def _decide(args: Args, deps: Deps, *, is_enabled: bool) -> int:
    if not args.name:
        raise UsageError(f"name the plugin: `nekro plugins {args.action} author.module`")
    settings = deps.load_settings()
    known = [plugin.key for plugin in load_catalogue(settings).plugins]
    if args.name not in known:  # no worker may have published it yet
        known = sorted({*known, *(p.key for p in load_catalogue(settings, of_this_host=True).plugins)})
    if args.name not in known:
        raise _unknown(args.name, known)
    if is_enabled and args.name in settings.plugins.disabled:
        raise UsageError(
            f"NEKRO_PLUGINS__DISABLED names {args.name}, so that workers keep it disabled; remove it there"
        )
    if run_async(_record(settings, args.name, is_enabled=is_enabled)):
        deps.output.words(f"{args.name}: {args.action}d on all workers within a second")
    else:
        deps.output.words(f"{args.name} is {args.action}d already")
    return ExitCode.OK


def _unknown(name: str, known: Sequence[str]) -> UsageError:
    near = difflib.get_close_matches(name, known, n=3)
    hint = f"did you mean {' or '.join(near)}?" if near else "`nekro plugins` lists all plugins"
    return UsageError(f"there is no plugin {name!r}; {hint}")


def _sleepers(args: Args, deps: Deps) -> int:
    """List the plugins that may sleep in a chat, or change whether one is awake there."""
    from nekro.app.rounds.sleeping_plugins import MOST_TURNS, may_sleep
    from nekro.cli.services.database import change_sleeper as change
    from nekro.cli.services.database import read_sleepers as read

    if args.action not in ("list", "wake", "sleep"):
        raise UsageError(f"`nekro plugins {args.action}` takes no --chat")
    if args.chat is None:
        raise UsageError(f"name the chat: `nekro plugins {args.action} {args.name or 'KEY'} --chat KEY`")
    if args.turns is not None and not 1 <= args.turns <= MOST_TURNS:
        raise UsageError(f"--turns {args.turns} must be from 1 to {MOST_TURNS}")
    settings = deps.load_settings()
    plugins = load_catalogue(settings, of_this_host=args.load).plugins
    sleepers = [p for p in plugins if may_sleep(p, keep_awake=settings.plugins.keep_awake)]
    if args.action == "list":
        listed = run_async(read(settings, args.chat, sleepers))
        if args.json:
            deps.output.json(listed)
        else:
            rows = [(one["key"], _state(one), one["brief"]) for one in listed]
            deps.output.table(("KEY", "STATE", "BRIEF"), rows)
        return ExitCode.OK
    if args.name not in [plugin.key for plugin in plugins]:
        raise _unknown(args.name or "", [plugin.key for plugin in plugins])
    if args.name not in [plugin.key for plugin in sleepers]:
        raise UsageError(
            f"{args.name} is always awake: it declares no sleep, or NEKRO_PLUGINS__KEEP_AWAKE names it"
        )
    is_awake = args.action == "wake"
    is_changed = run_async(change(settings, args.chat, args.name, is_awake=is_awake, turns=args.turns))
    until = "until `sleep`" if args.turns is None else f"for {args.turns} turns"
    state = (
        f"is awake in {args.chat} from the next turn on, {until}" if is_awake else f"sleeps in {args.chat}"
    )
    deps.output.words(f"{args.name} {state}{'' if is_changed else ' already'}")
    return ExitCode.OK


def _state(described: Mapping[str, Any]) -> str:
    if not described["is_awake"]:
        return "asleep"
    left = described["turns_left"]
    return "awake" if left is None else f"awake, {left} turns left"


async def _record(settings: Settings, key: str, *, is_enabled: bool) -> bool:
    async with open_database(settings) as database, database.autocommit() as transaction:
        return await transaction.plugin_states.set(key, is_enabled=is_enabled)


async def _disabled(settings: Settings) -> set[str]:
    """Return the plugins that an operator disabled; none where there is no database yet."""
    from storage.engine import Database

    try:
        async with Database(settings.database, settings.data_dir) as database, database.read() as transaction:
            return {s.plugin_key for s in await transaction.plugin_states.all() if not s.is_enabled}
    except StorageError:
        return set()


def _new(args: Args, deps: Deps) -> int:
    plugin, test = write_plugin(args.name or "", args.dir)
    deps.output.data(str(plugin))
    deps.output.data(str(test))
    deps.output.words(f"test it: pytest {test}")
    deps.output.words(
        f"call it: NEKRO_PLUGINS__DIRS={args.dir} nekro call greet_{args.name} --args '[\"Ada\"]'"
    )
    return ExitCode.OK


def _purge(args: Args, deps: Deps) -> int:
    if not args.name:
        raise UsageError("name the plugin: `nekro plugins purge author.module`")
    settings = deps.load_settings()
    data = run_async(find_data(settings, args.name))
    described = str(data)
    if not data:
        deps.output.words(f"{args.name} has no data in {settings.data_dir}")
        return ExitCode.OK
    if not args.yes and not deps.output.confirms(f"permanently delete the data of {args.name}: {described}?"):
        raise UsageError(f"nothing was deleted; --yes deletes the data of {args.name}: {described}")
    run_async(purge(settings, data))
    deps.output.words(f"deleted: {described}")
    return ExitCode.OK


def run_over_gateway(args: Args, deps: Deps) -> int:
    """List the plugins that the workers serve, or enable or disable one."""
    if args.action == "new":
        return run(args, deps)
    if args.action in ("purge", "wake", "sleep") or args.load or args.chat is not None:
        raise UsageError("this needs the workers' host; unset NEKRO_URL there")
    if args.action == "list":
        with open_client() as client:
            plugins = client.plugins()
        names = {"key", "status", "version", "error", "placeholders"}
        return show_list(
            [plugin.model_dump(include=names) | {"path": None} for plugin in plugins], args, deps
        )
    if not args.name:
        raise UsageError(f"name the plugin: `nekro plugins {args.action} author.module`")
    with open_client() as client:
        state = client.enable_plugin(args.name, is_enabled=args.action == "enable")
    suffix = (
        f"{args.action}d on all workers within a second" if state.is_changed else f"is {args.action}d already"
    )
    deps.output.words(f"{args.name}: {suffix}" if state.is_changed else f"{args.name} {suffix}")
    return ExitCode.OK
