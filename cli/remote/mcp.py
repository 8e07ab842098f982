"""`nekro mcp` over a gateway."""

from __future__ import annotations

from cli.command import Deps
from cli.commands.mcp import Args, declared, show_list, show_test
from cli.exit_codes import ExitCode
from cli.remote.target import open_client
from nekro_agent.errors import UsageError

__all__ = ["run"]


def run(args: Args, deps: Deps) -> int:
    """List, declare, test or remove MCP servers."""
    if args.action != "list" and not args.name:
        raise UsageError(f"name the server: `nekro mcp {args.action} NAME`")
    name = args.name or ""
    with open_client() as client:
        if args.action == "list":
            return show_list([server.model_dump(mode="json") for server in client.mcp_servers()], args, deps)
        if args.action == "test":
            return show_test(client.test_mcp_server(name).model_dump(mode="json"), args, deps)
        if args.action == "remove":
            client.remove_mcp_server(name)
            deps.output.words(f"{name}: removed from all workers within a second")
            return ExitCode.OK
        server = client.put_mcp_server(name, declared(args), is_enabled=not args.disabled)
    if args.json:
        deps.output.json(server.model_dump(mode="json"))
    else:
        deps.output.words(f"{name}: declared as plugin {server.plugin}; `nekro mcp test {name}` tries it")
    return ExitCode.OK
