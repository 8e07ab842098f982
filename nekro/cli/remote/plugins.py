"""`nekro plugins` over a gateway."""

from __future__ import annotations

from nekro.cli.command import Deps
from nekro.cli.commands import plugins as here
from nekro.cli.commands.plugins import Args, show_list
from nekro.cli.remote.target import open_client
from nekro.cli.running import ExitCode
from nekro_agent.errors import UsageError

__all__ = ["run"]


def run(args: Args, deps: Deps) -> int:
    """List the plugins that the workers serve, or enable or disable one."""
    if args.action == "new":
        return here.run(args, deps)
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
