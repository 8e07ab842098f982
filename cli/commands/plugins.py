"""`nekro plugins`: what is loaded and what is not, a new plugin, a plugin's data."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from broker_config.settings import Settings
from cli.catalogue import load_catalogue
from cli.command import Deps, add_json
from cli.exit_codes import ExitCode
from cli.running import run_async
from nekro_agent.errors import UsageError

if TYPE_CHECKING:
    from workers.loader import PluginRecord

__all__ = ["Args", "register", "run"]

_EPILOG = """\
examples:
  nekro plugins
  nekro plugins list --json
  nekro plugins new weather --dir my_plugins
  nekro plugins purge you.weather --yes

`list` ends with exit code 5 when a plugin failed to load; the others work all the same.
`--json` prints a list of {key, status, path, version, error, placeholders}; status is ok, degraded (it uses
names that do not exist here: `placeholders`), failed or disabled.
"""


@dataclass(frozen=True, kw_only=True)
class Args:
    """Arguments of `nekro plugins`."""

    action: str
    name: str | None
    dir: Path
    yes: bool
    json: bool


def register(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.epilog = _EPILOG
    parser.add_argument(
        "action",
        nargs="?",
        choices=("list", "new", "purge"),
        default="list",
        help="`list` (default); `new` writes a plugin to begin with; `purge` deletes what a plugin stored",
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help="new: module name; purge: plugin key")
    parser.add_argument(
        "--dir", type=Path, default=Path(), metavar="DIR", help="new: folder to write to (default: here)"
    )
    parser.add_argument("--yes", action="store_true", help="purge: really delete")
    add_json(parser)


def run(args: Args, deps: Deps) -> int:
    """List, write or purge."""
    if args.action == "new":
        return _new(args, deps)
    if args.action == "purge":
        return _purge(args, deps)
    return _list(args, deps)


def describe(record: PluginRecord) -> dict[str, Any]:
    """Return one plugin as ``--json`` prints it."""
    return {
        "key": record.key,
        "status": record.status.value,
        "path": record.path,
        "version": record.version,
        "error": record.error,
        "placeholders": record.placeholders,
    }


def _list(args: Args, deps: Deps) -> int:
    listed = [describe(record) for record in load_catalogue(deps.load_settings()).loaded.records]
    if args.json:
        deps.output.json(listed)
    else:
        rows = [
            (p["key"], p["status"], p["version"], p["error"] or ", ".join(p["placeholders"]), p["path"])
            for p in listed
        ]
        deps.output.table(("KEY", "STATUS", "VERSION", "WHAT IS WRONG", "PATH"), rows)
    return ExitCode.PLUGIN if any(plugin["status"] == "failed" for plugin in listed) else ExitCode.OK


def _new(args: Args, deps: Deps) -> int:
    name = args.name or ""
    if not name.isidentifier() or not name.isascii():
        raise UsageError(f"{name!r} is no module name; write letters, digits and _, as in `new weather`")
    path = args.dir / f"{name}.py"
    if path.exists():
        raise UsageError(f"{path} exists; choose another name")
    args.dir.mkdir(parents=True, exist_ok=True)
    path.write_text(_TEMPLATE.format(name=name, title=name.replace("_", " ").capitalize()), "utf-8")
    deps.output.data(str(path))
    deps.output.words(f"try it: NEKRO_PLUGINS__DIRS={args.dir} nekro call greet_{name} --args '[\"Ada\"]'")
    return ExitCode.OK


def _purge(args: Args, deps: Deps) -> int:
    if not args.name:
        raise UsageError("name the plugin: `nekro plugins purge author.module --yes`")
    if not args.yes:
        raise UsageError(f"this deletes every stored value of {args.name} for good; add --yes to do it")
    deleted = run_async(_purge_store(deps.load_settings(), args.name))
    deps.output.words(f"{deleted} stored values of {args.name} deleted; its files are kept")
    return ExitCode.OK


async def _purge_store(settings: Settings, plugin_key: str) -> int:
    from storage.engine import Database
    from storage.kv import SqlKeyValueStore
    from storage.migrate import require_migrated

    await require_migrated(settings.database, settings.data_dir)
    database = Database(settings.database, settings.data_dir)
    try:
        return await SqlKeyValueStore(database, settings.store).purge(plugin_key)
    finally:
        await database.dispose()


_TEMPLATE = '''"""{title}: say here what the plugin is for; models and people read it."""

from nekro_agent.api.plugin import NekroPlugin, SandboxMethodType
from nekro_agent.api.schemas import AgentCtx

plugin = NekroPlugin(
    name="{title}",
    module_name="{name}",
    description="Says what the plugin does.",
    version="0.1.0",
    author="you",
    url="",
)


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "greet_{name}", "Greets a person")
async def greet_{name}(_ctx: AgentCtx, name: str) -> str:
    """Greet a person.

    Args:
        name: whom to greet.

    Returns:
        The greeting.
    """
    return f"Hello, {{name}}!"
'''
