"""`nekro flower`: Flower on our broker."""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
from dataclasses import dataclass

from cli.command import Deps, add_supervisor_fd, port_number
from nekro_agent.errors import UsageError

__all__ = ["Args", "flower_arguments", "register", "run"]

_EPILOG = """\
examples:
  nekro flower
  FLOWER_BASIC_AUTH=ada:secret nekro flower --address 0.0.0.0 --port 5555

Whoever reaches Flower can revoke tasks and read their arguments: it listens on loopback unless told
otherwise, and beyond loopback it wants FLOWER_BASIC_AUTH=user:password in the environment.
"""


@dataclass(frozen=True, kw_only=True)
class Args:
    """Arguments of `nekro flower`."""

    address: str
    port: int
    supervisor_fd: int | None


def register(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.epilog = _EPILOG
    parser.add_argument("--address", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument(
        "--port", type=port_number, default=5555, help="port to listen on (default: %(default)s)"
    )
    add_supervisor_fd(parser)


def flower_arguments(*, address: str, port: int) -> list[str]:
    """Arguments of Celery's command line that start Flower.

    Raises:
        UsageError: Flower is not installed, or would be open to everybody.
    """
    if importlib.util.find_spec("flower") is None:
        raise UsageError("Flower is not installed; run `pip install nekro-workers[flower]`")
    if address not in ("127.0.0.1", "::1", "localhost") and not os.environ.get("FLOWER_BASIC_AUTH"):
        raise UsageError(
            f"{address} is reachable from elsewhere; set FLOWER_BASIC_AUTH=user:password or use 127.0.0.1"
        )
    return ["flower", f"--address={address}", f"--port={port}"]


def run(args: Args, deps: Deps) -> int:
    """Serve Flower until Ctrl-C."""
    settings = deps.load_settings()
    arguments = flower_arguments(address=args.address, port=args.port)
    from broker_config.app import create_app
    from broker_config.embedded import resolve_settings
    from cli.ownership import require_running
    from cli.process import attach_to_supervisor

    if settings.broker.url is None and args.supervisor_fd is None:
        require_running(settings.data_dir)
    if args.supervisor_fd is not None:
        attach_to_supervisor(args.supervisor_fd, lambda: os.kill(os.getpid(), signal.SIGTERM))("")
    deps.output.words(f"Flower listens on http://{args.address}:{args.port}")
    create_app(resolve_settings(settings)).start(argv=arguments)
    return 0
