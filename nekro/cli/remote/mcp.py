"""`nekro mcp` over a gateway."""

from __future__ import annotations

from nekro.cli.command import Deps
from nekro.cli.commands.mcp import ANSWERS, Args, check, declared, reply, show_list, show_test
from nekro.cli.remote.target import open_client
from nekro.cli.running import ExitCode, run_async
from nekro.extensions.mcp.answers import answer_key, is_asked_by
from nekro.extensions.mcp.declarations import parse
from nekro.extensions.mcp.servers import secret_warnings
from nekro_agent.errors import NotFoundError, UsageError
from nekro_client import Client, ClientError

__all__ = ["run"]


def run(args: Args, deps: Deps) -> int:
    """List, declare, test or remove MCP servers, answer a question of one, or relay to the gateway."""
    check(args)
    if args.action == "serve":
        return _serve(args)
    name = args.name or ""
    with open_client() as client:
        if args.action in ANSWERS:
            return _answer(client, args, deps)
        if args.action == "list":
            return show_list([server.model_dump(mode="json") for server in client.mcp_servers()], args, deps)
        if args.action == "test":
            return show_test(client.test_mcp_server(name).model_dump(mode="json"), args, deps)
        if args.action == "remove":
            client.remove_mcp_server(name)
            deps.output.words(f"{name}: removed from all workers within a second")
            return ExitCode.OK
        entry = declared(args)
        for warning in secret_warnings(name, parse(name, entry)[0]):
            deps.output.words(f"warning: {warning}")
        server = client.put_mcp_server(name, entry, is_enabled=not args.disabled)
    if args.json:
        deps.output.json(server.model_dump(mode="json"))
    else:
        deps.output.words(f"{name}: declared as plugin {server.plugin}; `nekro mcp test {name}` tries it")
    return ExitCode.OK


def _serve(args: Args) -> int:
    from nekro.cli.services.mcp_stdio import relay

    try:
        run_async(relay(chat_key=args.chat_key, user_id=args.user_id))
    except ClientError as exc:
        raise UsageError(str(exc)) from exc
    return ExitCode.OK


def _answer(client: Client, args: Args, deps: Deps) -> int:
    """Answer the question of an open call, whose id begins like that of the question."""
    name = args.name or ""
    cursor: str | None = None
    while True:
        page = client.jobs.list(open_only=True, cursor=cursor)
        for job in page.items:
            if is_asked_by(name, job.id):
                client.jobs.signal(job.id, answer_key(name), reply(args))
                deps.output.words(f"{name}: passed to call {job.id}")
                return ExitCode.OK
        cursor = page.next_cursor
        if cursor is None:
            break
    raise NotFoundError(f"no call waits for an answer to question {name}; it may be over")
