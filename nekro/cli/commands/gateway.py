"""`nekro gateway`: serve the HTTP API, or probe one that runs."""

from __future__ import annotations

import argparse
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from broker_config.settings import GatewaySettings, Settings
from nekro.cli.command import Deps, arg, json_flag, port_or_any, supervisor_fd_option
from nekro.cli.running import ExitCode, run_async
from nekro.cli.services.presence import Probe
from nekro.cli.services.process import addresses
from nekro_agent.durations import PROGRAM_SECONDS
from nekro_agent.errors import ServiceError

if TYPE_CHECKING:
    import httpx

__all__ = ["EPILOG", "Args", "run"]

EPILOG: Final = """\
examples:
  nekro gateway
  nekro gateway --port 8700 --json
  nekro gateway --host 0.0.0.0 --port 8700
  nekro gateway --check --port 8700

Every request needs a key. On a loopback address the gateway also accepts the local key, which it creates in
secrets/api.key of the data directory, and prints a link that opens the console once. On other addresses and
Unix sockets it starts when there is a key of `nekro keys`. Any number of gateways may run beside each other.
`--json` prints {url, pid} in one line when it is ready.
SIGTERM or Ctrl-C stops gracefully: streams end, running requests end first. A second one stops at once.
"""


@dataclass(frozen=True, kw_only=True)
class Args:
    """Arguments of `nekro gateway`."""

    host: str | None = arg("--host", help="address to listen on (default: NEKRO_GATEWAY__HOST, 127.0.0.1)")
    port: int | None = arg(
        "--port",
        type=port_or_any,
        help="port to listen on; 0 chooses a free one (default: NEKRO_GATEWAY__PORT, 8600)",
    )
    socket: Path | None = arg(
        "--socket",
        metavar="PATH",
        type=Path,
        help="Unix socket to listen on instead of a port (default: NEKRO_GATEWAY__SOCKET)",
    )
    check: Probe | None = arg(
        "--check",
        nargs="?",
        type=Probe,
        choices=list(Probe),
        const=Probe.READY,
        help="start nothing; ask the gateway of that address whether it is ready (or only live), and exit "
        "with 0, 1 (it is not) or 13 (there is none)",
    )
    json: bool = json_flag()
    supervisor_fd: int | None = supervisor_fd_option()
    listen_fd: int | None = arg("--listen-fd", type=int, help=argparse.SUPPRESS)


def run(args: Args, deps: Deps) -> int:
    """Serve until a signal, or probe."""
    settings = _with_address(deps.load_settings(), args)
    if args.check is not None:
        return _check(args.check, settings.gateway, args, deps)
    from nekro.cli.services.ownership import require_running
    from nekro.cli.services.presence import require_broker

    if settings.broker.url is not None:
        require_broker(settings)
    elif args.supervisor_fd is None:
        require_running(settings.data_dir)
    _serve(settings, args, deps)
    return ExitCode.OK


def _with_address(settings: Settings, args: Args) -> Settings:
    stated = {"host": args.host, "port": args.port, "socket": args.socket}
    update: dict[str, object] = {name: value for name, value in stated.items() if value is not None}
    if args.socket is None and (args.host is not None or args.port is not None):
        update["socket"] = None
    return settings.model_copy(update={"gateway": settings.gateway.model_copy(update=update)})


def _serve(settings: Settings, args: Args, deps: Deps) -> None:
    import uvloop

    from broker_config.embedded import hold_redis, resolve_settings
    from nekro.app.processes import configure_logs
    from nekro.base.metrics import start_metrics
    from nekro.broker.tracing import traced
    from nekro.gateway.app import create_app
    from nekro.gateway.web.listener import listen
    from nekro.gateway.web.server import serve

    if args.supervisor_fd is not None:
        hold_redis(settings)
    settings = resolve_settings(settings)
    node = f"gateway-{os.getpid()}"
    configure_logs(settings, lane="gateway", worker=node)
    start_metrics()
    passed = args.listen_fd is not None
    opened = socket.socket(fileno=args.listen_fd) if passed else listen(settings.gateway)
    on_ready = _on_ready(settings, args, deps)
    with traced(settings.tracing, role="gateway", node=node), opened as listener:
        serving = serve(create_app(settings), listener, on_ready=on_ready)
        run_async(serving, loop_factory=uvloop.new_event_loop)


def _on_ready(settings: Settings, args: Args, deps: Deps) -> Callable[[str], None]:
    """Return what shows the address, or reports it to the parent."""
    if args.supervisor_fd is not None:
        from nekro.cli.services.process import attach_to_supervisor, stop_without_parent

        return attach_to_supervisor(args.supervisor_fd, stop_without_parent).ready

    def show(url: str) -> None:
        if args.json:
            deps.output.json_line({"url": url, "pid": os.getpid()})
        else:
            deps.output.words(f"{addresses(url, settings)}; Ctrl-C stops")

    return show


def _check(probe: Probe, gateway: GatewaySettings, args: Args, deps: Deps) -> int:
    import httpx

    from nekro_client.answer_limits import limited_blocking

    path = {Probe.READY: "/readyz", Probe.LIVE: "/healthz"}[probe]
    with httpx.Client(
        transport=_transport(gateway),
        base_url=_url(gateway),
        timeout=PROGRAM_SECONDS,
        event_hooks=limited_blocking(),
    ) as client:
        try:
            answer = client.get(path)
        except httpx.TransportError as exc:
            where = gateway.socket or f"{gateway.host}:{gateway.port}"
            raise ServiceError(f"no gateway answers on {where} ({type(exc).__name__})") from exc
    if args.json:
        deps.output.json({"ok": answer.is_success, "status": answer.status_code})
    else:
        deps.output.report(probe.value if answer.is_success else f"not {probe.value}: {answer.status_code}")
    return ExitCode.OK if answer.is_success else ExitCode.FAILED


def _transport(gateway: GatewaySettings) -> httpx.HTTPTransport:
    import httpx

    return httpx.HTTPTransport(uds=None if gateway.socket is None else str(gateway.socket))


def _url(gateway: GatewaySettings) -> str:
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(gateway.host, gateway.host)  # noqa: S104 - compared
    return f"http://[{host}]:{gateway.port}" if ":" in host else f"http://{host}:{gateway.port}"
