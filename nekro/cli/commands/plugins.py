"""`nekro plugins`: list, enable, disable, wake and create plugins, or delete a plugin's data."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from nekro.cli.api import is_over_gateway, open_api
from nekro.cli.command import Deps, arg, json_flag, whole_number
from nekro.cli.plugin_files import find_data, purge, write_plugin
from nekro.cli.running import ExitCode, run_async
from nekro.cli.views.catalogue import CatalogueServices, say_what_is_listed
from nekro_agent.errors import NotFoundError, UsageError

if TYPE_CHECKING:
    from nekro_client import AsyncClient
    from nekro_client.models import ChatPlugin, Plugin

__all__ = ["EPILOG", "Args", "run"]


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
data directory and its configuration, with files in a store those of all hosts; it asks first, or needs
--yes. Stop the workers before, as they may store data again; `purge` does not remove the plugin's code.

A plugin that declares allow_sleep or sleep_brief is shown in prompts by that brief until the agent or `wake`
wakes it in the chat, for the next --turns turns or until `sleep`. `list --chat` shows these plugins.

`list` shows what the workers serve, and which of them run other files than the others. Without a worker it
shows what the last ones served, or, if no broker is set, imports the plugins of this host as `--load` does.
It ends with exit code 5 when a plugin failed to load; the other plugins still work.
Names of methods and commands that two plugins have are reported here only.
Where hosts share no disk (NEKRO_FILES__URL), it also shows what becomes of each plugin's data directory, and
why: unused, synced, pinned or local. NEKRO_FILES__PLUGIN_DIRS replaces a choice.
`--json` prints a list of {key, status, path, version, error, placeholders, files, files_reason}; files and
files_reason are null where hosts share a disk; status is ok, degraded (it uses
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
    """Run the action."""
    _check(args)
    if args.action == "new":
        return _new(args, deps)
    if args.action == "purge":
        return _purge(args, deps)
    return run_async(_run(args, deps))


def _check(args: Args) -> None:
    """Return if the arguments fit together.

    Raises:
        UsageError: they do not.
    """
    if args.turns is not None and args.action != "wake":
        raise UsageError(f"--turns belongs to `nekro plugins wake`, not to `{args.action}`")
    if args.chat is not None and args.action not in ("list", "wake", "sleep"):
        raise UsageError(f"`nekro plugins {args.action}` takes no --chat")
    if args.chat is None and args.action in ("wake", "sleep"):
        raise UsageError(f"name the chat: `nekro plugins {args.action} {args.name or 'KEY'} --chat KEY`")
    if args.action in ("enable", "disable") and not args.name:
        raise UsageError(f"name the plugin: `nekro plugins {args.action} author.module`")
    if is_over_gateway() and (args.action == "purge" or args.load):
        what = "--load" if args.load else args.action
        raise UsageError(f"`nekro plugins {what}` works on this host only; unset NEKRO_URL to run it here")


async def _run(args: Args, deps: Deps) -> int:
    if args.action in ("enable", "disable"):
        await _decide(args, deps, is_enabled=args.action == "enable")
        return ExitCode.OK
    async with open_api(deps, services=partial(CatalogueServices, of_this_host=args.load)) as api:
        if args.action != "list":
            await _wake(api, args, deps, is_awake=args.action == "wake")
        elif args.chat is not None:
            _show_of_chat(await api.chat(args.chat).plugins(), args, deps)
        else:
            return await _list(api, args, deps)
    return ExitCode.OK


async def _list(api: AsyncClient, args: Args, deps: Deps) -> int:
    plugins = await api.plugins()
    if args.json:
        names = {"key", "status", "path", "version", "error", "placeholders", "files", "files_reason"}
        deps.output.json([plugin.model_dump(include=names) for plugin in plugins])
    else:
        rows = [(p.key, p.status, p.version, p.error or ", ".join(p.placeholders), p.path) for p in plugins]
        deps.output.table(("KEY", "STATUS", "VERSION", "WHAT IS WRONG", "PATH"), rows)
        if kept := [(p.key, p.files, p.files_reason) for p in plugins if p.files]:
            deps.output.table(("KEY", "FILES", "WHY"), kept)
    await say_what_is_listed(api, deps.output, names=True)
    return ExitCode.PLUGIN if any(plugin.status == "failed" for plugin in plugins) else ExitCode.OK


async def _decide(args: Args, deps: Deps, *, is_enabled: bool) -> None:
    name = str(args.name)
    known: list[Plugin] = []
    try:
        async with open_api(deps, services=CatalogueServices) as api:
            known = await api.plugins()
            state = await api.enable_plugin(name, is_enabled=is_enabled)
    except NotFoundError as exc:
        raise _unknown(name, known) from exc
    if state.is_changed:
        deps.output.words(f"{name}: {args.action}d on all workers within a second")
    else:
        deps.output.words(f"{name} is {args.action}d already")


def _unknown(name: str, plugins: Sequence[Plugin]) -> UsageError:
    near = difflib.get_close_matches(name, [plugin.key for plugin in plugins], n=3)
    hint = f"did you mean {' or '.join(near)}?" if near else "`nekro plugins` lists all plugins"
    return UsageError(f"there is no plugin {name!r}; {hint}")


async def _wake(api: AsyncClient, args: Args, deps: Deps, *, is_awake: bool) -> None:
    from nekro.app.rounds.sleeping_plugins import MOST_TURNS

    if args.turns is not None and not 1 <= args.turns <= MOST_TURNS:
        raise UsageError(f"--turns {args.turns} must be from 1 to {MOST_TURNS}")
    name, chat = args.name or "", str(args.chat)
    plugins = await api.plugins()
    if name not in {plugin.key for plugin in plugins}:
        raise _unknown(name, plugins)
    state = await api.chat(chat).set_plugin(name, is_awake=is_awake, turns=args.turns)
    until = "until `sleep`" if args.turns is None else f"for {args.turns} turns"
    words = f"is awake in {chat} from the next turn on, {until}" if is_awake else f"sleeps in {chat}"
    deps.output.words(f"{name} {words}{'' if state.is_changed else ' already'}")


def _show_of_chat(plugins: Sequence[ChatPlugin], args: Args, deps: Deps) -> None:
    if args.json:
        deps.output.json([plugin.model_dump() for plugin in plugins])
    else:
        rows = [(plugin.key, _state(plugin), plugin.brief) for plugin in plugins]
        deps.output.table(("KEY", "STATE", "BRIEF"), rows)


def _state(plugin: ChatPlugin) -> str:
    if not plugin.is_awake:
        return "asleep"
    return "awake" if plugin.turns_left is None else f"awake, {plugin.turns_left} turns left"


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
