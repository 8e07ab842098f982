"""`nekro mcp` over a gateway."""

from __future__ import annotations

from cli.command import Deps
from cli.commands.mcp import Args, declared, require_name, show_list, show_test
from cli.exit_codes import ExitCode
from cli.remote.target import open_client
from cli.running import run_async
from nekro_agent.errors import UsageError
from nekro_client import ClientError

__all__ = ["run"]


def run(args: Args, deps: Deps) -> int:
    """List, declare, test or remove MCP servers; or relay to the gateway."""
    require_name(args)
    if args.action == "serve":
        return _serve(args)
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


def _serve(args: Args) -> int:
    from cli.services.mcp_relay import relay

    try:
        run_async(relay(chat_key=args.chat_key, user_id=args.user_id))
    except ClientError as exc:
        raise UsageError(str(exc)) from exc
    return ExitCode.OK
