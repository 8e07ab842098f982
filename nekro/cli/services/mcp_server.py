"""The local system as an MCP server on the standard streams."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final

from broker_config.settings import Settings
from nekro.cli.output import Output
from nekro.cli.services.mcp_stdio import host_streams
from nekro.cli.services.system import CALL_LANES, open_services
from nekro_agent.errors import ServiceError

if TYPE_CHECKING:
    from nekro.app.composition import Services
    from nekro.app.rounds.runs import CodeReport
    from nekro.extensions.mcp.server.callers import Caller

__all__ = ["serve"]

#: Chat of a host that names none; that of a gateway without keys too.
_CHAT_KEY: Final = "mcp-local"


async def serve(settings: Settings, *, chat_key: str | None, user_id: str | None, output: Output) -> None:
    """Serve the host until it closes stdin, with every right but that to approve calls.

    Args:
        chat_key: where calls and code run; None: a chat of its own.
        user_id: on whose behalf; None: no user.

    Raises:
        ServiceError: there is no SDK.
        The errors of ``open_services`` and ``host_streams``.
    """
    try:
        from mcp.server.stdio import stdio_server

        from nekro.extensions.mcp.server.server import McpServer
    except ImportError as exc:
        raise ServiceError("there is no MCP SDK; install it with `pip install 'nekro-workers[mcp]'`") from exc
    from nekro.extensions.mcp.server.callers import Caller
    from nekro.gateway.identity import LOCAL
    from nekro.gateway.streams.hub import EventHub

    caller = Caller(identity=LOCAL, chat_key=chat_key or _CHAT_KEY, user_id=user_id)
    async with (
        host_streams() as host,
        open_services(settings, command="mcp", lanes=CALL_LANES, output=output) as (_, services),
    ):
        hub = EventHub(services)
        hub.start()
        server = McpServer(services, hub, lambda _: caller, run=partial(_run, services))
        # The SDK's own reader waits in a thread, which would keep a process alive that is to end.
        streams: Any = host
        try:
            async with stdio_server(stdin=streams, stdout=streams) as (incoming, outgoing):
                await server.sdk.run(incoming, outgoing, server.sdk.create_initialization_options())
        finally:
            server.changes.close()
            await hub.close()


async def _run(services: Services, caller: Caller, code: str, _run_id: str) -> CodeReport:
    return await services.run_code(
        code, chat_key=caller.chat_key, user_id=caller.user_id, follow_up=False, file_name="<mcp>"
    )
