"""`nekro mcp`: declare MCP servers, whose tools become methods; and serve the system to MCP hosts."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from broker_config.settings import Settings
from nekro.cli.api import SystemNeed, is_over_gateway, open_api
from nekro.cli.command import Deps, arg, chat_key, json_flag, positive_number, read_text, user_id_option
from nekro.cli.doctor.service_checks import Check, CheckState
from nekro.cli.local_api import open_database
from nekro.cli.local_operations import Operation
from nekro.cli.running import ExitCode, run_async
from nekro.extensions.mcp.declarations import parse
from nekro.extensions.mcp.questions import content_of
from nekro.extensions.mcp.servers import describe_server, read_servers, secret_warnings
from nekro_agent.errors import StorageError, UsageError
from storage.driver.urls import exists

if TYPE_CHECKING:
    from nekro.operations.actor import Actor
    from nekro_client import AsyncClient
    from nekro_client.models import McpServer, McpTrial

__all__ = ["EPILOG", "OPERATIONS", "Args", "checks", "declared", "run", "show_test"]


EPILOG: Final = """\
examples:
  nekro mcp add time --command uvx mcp-server-time
  nekro mcp add files --file /srv/docs:rw --command npx -y @modelcontextprotocol/server-filesystem /srv/docs
  nekro mcp add search --env 'API_KEY=${SEARCH_KEY}' --network --command npx -y some-search-server
  nekro mcp add tracker --url https://mcp.example.org/mcp --header 'Authorization: Bearer ${TRACKER_TOKEN}'
  nekro mcp add other --declaration @other.json
  nekro mcp
  nekro mcp list --json
  nekro mcp test time
  nekro mcp remove time
  nekro mcp answer 3f2a9c1b-5d2e city=Rome
  nekro mcp decline 3f2a9c1b-5d2e
  nekro mcp serve
  nekro mcp serve --chat-key group_1 --user-id ada

A server is the plugin `mcp.NAME`, and each of its tools a method and a Celery task `mcp.NAME.TOOL`. Workers
have a change within a second. `${NAME}` in arguments, variables, headers and the URL is read from the
environment of the worker when the server starts; use it for every secret. A server with a command runs in a
sandbox: without network unless `--network`, and without files of the host besides `--file PATH` (read-only)
and `--file PATH:rw`. `mcp.json` in the data directory declares servers too, in the form that other hosts use;
where both declare a name, the file wins.

`test` connects with the server on the worker that uses it, and prints its tools with their signatures and how
it is confined; it ends with exit code 5 when the server does not work. `--json` prints a list of {name,
plugin, status, source, is_in_both, transport, declaration, tools, server, protocol, error, listed_at}; `test`
prints {name, plugin, error, about, confinement, tools}.

`serve` speaks MCP on stdin and stdout, for a host that starts it; logs and errors go to stderr. It serves the
running system, or its own, until the host closes stdin. Over NEKRO_URL it relays to `/mcp` of that gateway.
"""
#: Actions on a question.
_ANSWERS: Final = ("answer", "decline")


def _operation(name: str, *, body: str = "", is_whole: bool = False) -> Operation:
    target = f"nekro.extensions.mcp.operations.{name}"
    return Operation(target=target, body=body, is_whole=is_whole)


async def _test_server(actor: Actor, name: str) -> McpTrial:
    """Connect with a server on its worker, unless no worker serves its lane."""
    from nekro.cli.services.presence import awaited_with_workers
    from nekro.extensions.mcp.operations import declared_server, test_mcp_server

    services = actor.services
    lane = services.lanes.lane_of_plugin((await declared_server(services, name)).plugin_key)
    return await awaited_with_workers(test_mcp_server(actor, name), lambda: services.app, lane=lane)


#: Operations of this extension, by the names of the client's methods.
OPERATIONS: Final = {
    "mcp_servers": _operation("list_mcp_servers", is_whole=True),
    "put_mcp_server": _operation("put_mcp_server", body="McpServerBody"),
    "remove_mcp_server": _operation("delete_mcp_server"),
    "test_mcp_server": Operation(target=_test_server),
    "answer_mcp_question": _operation("answer_mcp_question", body="McpReplyBody"),
}

_APPROVALS: Final = {"all": True, "none": False}


@dataclass(frozen=True, kw_only=True)
class Args:
    """Arguments of `nekro mcp`."""

    action: str = arg(
        nargs="?",
        choices=("list", "add", "test", "remove", "answer", "decline", "serve"),
        default="list",
        help="`list` (default); `add` declares a server or replaces its declaration; `test`; `remove`; "
        "`answer` or `decline` a question of a server; `serve`: be an MCP server on stdin and stdout",
    )
    name: str | None = arg(
        nargs="?", metavar="NAME", help="name of the server; answer, decline: id of the question"
    )
    values: list[str] = arg(
        nargs="*",
        metavar="FIELD=VALUE",
        default=[],
        help="answer: fields of the answer, or the value of the only one",
    )
    command: list[str] = arg(
        "--command",
        nargs=argparse.REMAINDER,
        metavar="COMMAND",
        default=[],
        help="add: program that is the server, with its arguments; the last option",
    )
    env: list[str] = arg(
        "--env", action="append", default=[], metavar="K=V", help="add: variable of the command"
    )
    url: str | None = arg("--url", metavar="URL", help="add: address of a server with streamable HTTP")
    header: list[str] = arg(
        "--header", action="append", default=[], metavar="K: V", help="add: header of requests to the URL"
    )
    network: bool = arg("--network", action="store_true", help="add: give the command the host's network")
    file: list[str] = arg(
        "--file", action="append", default=[], metavar="PATH[:rw]", help="add: path that the command sees"
    )
    timeout: float | None = arg(
        "--timeout", type=positive_number, metavar="SECONDS", help="add: longest call of a tool"
    )
    approval: list[str] = arg(
        "--approval",
        action="append",
        default=[],
        metavar="WHICH",
        help="add: tools whose calls a person must approve: `all`, `none`, or a pattern of names; the "
        "default is those that do not declare that they only read",
    )
    sampling: str | None = arg(
        "--sampling",
        metavar="GROUP",
        help="add: let the server ask the models of this group (`default`: the agent's), at most 100,000 "
        "tokens per day",
    )
    elicitation: float | None = arg(
        "--elicitation",
        type=positive_number,
        metavar="SECONDS",
        help="add: let the server ask the people of the chat during a call, and wait so long for an answer",
    )
    declaration: str | None = arg(
        "--declaration", metavar="JSON", help="add: the whole entry of mcp.json; @FILE reads it, - is stdin"
    )
    disabled: bool = arg("--disabled", action="store_true", help="add: declare it without using it")
    chat_key: str | None = arg(
        "--chat-key",
        metavar="K",
        type=chat_key,
        help="serve: chat in which calls and code run (default: `mcp-local`, or that of the key)",
    )
    user_id: str | None = user_id_option()
    json: bool = json_flag()


def run(args: Args, deps: Deps) -> int:
    """Run the action."""
    _check(args)
    return run_async(_serve(args, deps) if args.action == "serve" else _run(args, deps))


async def _run(args: Args, deps: Deps) -> int:
    name = args.name or ""
    from nekro.cli.services.system import CALL_LANES

    need = SystemNeed(command="mcp", lanes=CALL_LANES, needs_workers=True)
    system = need if args.action == "test" else None
    async with open_api(deps, system=system, here=OPERATIONS) as api:
        if args.action == "answer":
            content = content_of(args.values)
            reply = await api.answer_mcp_question(name, action="accept", content=content)
            deps.output.words(f"{name}: passed to call {reply.call_id}")
        elif args.action == "decline":
            reply = await api.answer_mcp_question(name, action="decline")
            deps.output.words(f"{name}: passed to call {reply.call_id}")
        elif args.action == "add":
            await _add(api, name, args, deps)
        elif args.action == "remove":
            await api.remove_mcp_server(name)
            deps.output.words(f"{name}: removed from all workers within a second")
        elif args.action == "test":
            return show_test((await api.test_mcp_server(name)).model_dump(), args, deps)
        else:
            return _show_list(await api.mcp_servers(), args, deps)
    return ExitCode.OK


async def _serve(args: Args, deps: Deps) -> int:
    from nekro.extensions.mcp.serve import relay, serve

    if not is_over_gateway():
        settings = deps.load_settings()
        await serve(settings, chat_key=args.chat_key, user_id=args.user_id, output=deps.output)
        return ExitCode.OK
    from nekro_client import ClientError

    try:
        await relay(chat_key=args.chat_key, user_id=args.user_id)
    except ClientError as exc:
        raise UsageError(str(exc)) from exc
    return ExitCode.OK


def _check(args: Args) -> None:
    """Return if the arguments fit together.

    Raises:
        UsageError: they do not.
    """
    what = "the question" if args.action in _ANSWERS else "the server"
    if args.action not in ("list", "serve") and not args.name:
        raise UsageError(f"name {what}: `nekro mcp {args.action} {what.rpartition(' ')[2].upper()}`")
    if args.values and args.action != "answer":
        raise UsageError(f"{args.values[0]!r}: only `nekro mcp answer` takes values")


async def _add(api: AsyncClient, name: str, args: Args, deps: Deps) -> None:
    entry = declared(args)
    for warning in secret_warnings(name, parse(name, entry)[0]):
        deps.output.words(f"warning: {warning}")
    server = await api.put_mcp_server(name, declaration=entry, is_enabled=not args.disabled)
    if server.source == "file":
        deps.output.words(f"warning: the file mcp.json of the workers declares {name} too, and wins")
    if args.json:
        deps.output.json(server.model_dump())
    else:
        deps.output.words(f"{name}: declared as plugin {server.plugin}; `nekro mcp test {name}` tries it")


def declared(args: Args) -> dict[str, Any]:
    """Return the declaration that the arguments of `add` describe.

    Raises:
        UsageError: they contradict each other, or are not a declaration.
    """
    if args.declaration is not None:
        if args.command or args.url:
            raise UsageError(
                "--declaration is the whole declaration; give neither a command nor --url with it"
            )
        return _object(args.declaration)
    if bool(args.command) == bool(args.url):
        raise UsageError(
            "give the server's command with --command, or its address with --url: "
            "`nekro mcp add time --command uvx mcp-server-time`"
        )
    own = {
        "network": args.network or None,
        "files": dict(_access(text) for text in args.file) or None,
        "timeout_seconds": args.timeout,
        "approval": _approval(args.approval) if args.approval else None,
        "sampling": None if args.sampling is None else {"group": args.sampling},
        "elicitation_seconds": args.elicitation,
    }
    own = {key: value for key, value in own.items() if value is not None}
    entry: dict[str, Any] = {"command": args.command[0], "args": args.command[1:]} if args.command else {}
    if args.url:
        entry["url"] = args.url
    if args.env:
        entry["env"] = dict(_pair(text, "=", "--env", "K=V") for text in args.env)
    if args.header:
        entry["headers"] = dict(_pair(text, ":", "--header", "'K: V'") for text in args.header)
    return entry | ({"nekro": own} if own else {})


def _show_list(servers: Sequence[McpServer], args: Args, deps: Deps) -> int:
    """Print servers; returns the exit code."""
    if args.json:
        deps.output.json([server.model_dump() for server in servers])
    else:
        rows = [
            (
                server.name,
                server.status,
                server.transport or "",
                str(len(server.tools)),
                f"{server.source}{' (also in the database)' if server.is_in_both else ''}",
                server.error or _shown(server),
            )
            for server in servers
        ]
        deps.output.table(("NAME", "STATUS", "TRANSPORT", "TOOLS", "DECLARED IN", "SERVER OR ERROR"), rows)
    return ExitCode.PLUGIN if any(server.status == "failed" for server in servers) else ExitCode.OK


def _shown(server: McpServer) -> str:
    """Return what a server says about itself, with the number of notes on its tools."""
    notes = len(server.notes)
    more = f"{notes} note{'s' if notes > 1 else ''} on its tools, see `nekro mcp test {server.name}`"
    return "; ".join([*([server.server] if server.server else []), *([more] if notes else [])])


def show_test(answer: Mapping[str, Any], args: Args, deps: Deps) -> int:
    """Print what ``test`` found; returns the exit code."""
    code = ExitCode.OK if answer["error"] is None else ExitCode.PLUGIN
    if args.json:
        deps.output.json(answer)
        return code
    if answer["error"] is not None:
        deps.output.words(f"{answer['name']} does not work: {answer['error']}")
        return code
    about = answer["about"]
    deps.output.words(f"{answer['name']}: {about['name']} {about['version']}, protocol {about['protocol']}")
    deps.output.words(_confinement(answer["confinement"]))
    for tool in answer["tools"]:
        notes = [
            *(["needs approval"] if tool["requires_approval"] else []),
            "runs at most once" if tool["runs_once"] else "may run again",
        ]
        deps.output.data(f"{tool['method']}{tool['signature']}  # {', '.join(notes)}")
    for note in answer["notes"]:
        label = "left out" if note["is_left_out"] else "note"
        where = f" {note['tool']}" if note["tool"] else ""
        deps.output.words(f"{label}{where}: {note['reason']}")
    return code


def _confinement(confinement: Mapping[str, Any] | None) -> str:
    if confinement is None:
        return "it runs elsewhere; workers send it what code passes to its tools, and the declared headers"
    if not confinement["isolated"]:
        return "NOT confined: it runs with the rights of the worker (NEKRO_MCP__ALLOW_UNCONFINED)"
    files = ", ".join(confinement["files"]) or "none besides its own home"
    network = "the network of the host" if confinement["network"] else "no network"
    return (
        f"confined by bubblewrap: process {confinement['process']}, host user {confinement['user']}, "
        f"{network}; files: {files}; "
        f"memory bounded by {confinement['memory']}"
    )


def _object(text: str) -> dict[str, Any]:
    source = "--declaration"
    if text == "-" or text.startswith("@"):
        source = text.removeprefix("@")
        text = read_text(Path(source))
    try:
        value = json.loads(text)
    except ValueError as exc:
        raise UsageError(f"{source} is not JSON: {exc}") from exc
    if not isinstance(value, dict):
        raise UsageError(f'{source} must be an object, such as {{"command": "uvx", "args": […]}}')
    return value


def _pair(text: str, separator: str, option: str, form: str) -> tuple[str, str]:
    key, found, value = text.partition(separator)
    if not found or not key.strip():
        raise UsageError(f"{option} {key!r}: write {form}")
    return key.strip(), value.strip() if separator == ":" else value


def _access(text: str) -> tuple[str, str]:
    path, _, mode = text.rpartition(":")
    return (path, mode) if mode in ("ro", "rw") and path else (text, "ro")


def _approval(texts: Sequence[str]) -> bool | list[str]:
    if len(texts) == 1 and texts[0] in _APPROVALS:
        return _APPROVALS[texts[0]]
    return list(texts)


async def checks(settings: Settings) -> list[Check]:
    """Check the declared servers; none without a database, or without servers."""
    if not exists(settings.database, settings.data_dir):
        return []
    try:
        async with open_database(settings) as database:
            servers = await read_servers(settings, database)
    except StorageError:  # the database has a check of its own
        return []
    failed = [server.name for server in servers if describe_server(server)["status"] == "failed"]
    if failed:
        detail, fix = (
            f"failed: {', '.join(failed)}",
            "`nekro mcp` shows the errors, `nekro mcp test` tries one",
        )
        return [Check(name="mcp", verdict=CheckState.WARNING, detail=detail, fix=fix)]
    return [Check(name="mcp", verdict=CheckState.OK, detail=f"{len(servers)} servers")] if servers else []
