"""`nekro flower`: serve Flower on the broker of the settings."""

from __future__ import annotations

import asyncio
import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from nekro.cli.command import Deps, arg, port_number, supervisor_fd_option
from nekro.cli.running import ExitCode
from nekro_agent.durations import CLOSE_STEP_SECONDS, PROGRAM_SECONDS
from nekro_agent.errors import ServiceError, UsageError

if TYPE_CHECKING:
    from broker_config.app import NekroApp
    from broker_config.settings import Settings

__all__ = ["EPILOG", "Args", "flower_arguments", "follow_methods", "run"]

#: How often Flower looks for methods that workers have published since.
_METHODS_SECONDS: Final = 1.0
#: The user of the password that Flower gets where the environment states none.
_USER: Final = "nekro"

EPILOG: Final = """\
examples:
  nekro flower
  FLOWER_BASIC_AUTH=ada:secret nekro flower --address 0.0.0.0 --port 5555

Flower lets its users revoke tasks and read tracebacks; it shows no arguments, and at most 64 characters of a
result. It listens on loopback by default; any other address requires FLOWER_BASIC_AUTH=user:password in the
environment, or FLOWER_BASIC_AUTH_FILE with the name of a file that holds it. Without one on loopback, the
user is nekro and the password is in secrets/monitoring.key of the data directory.
"""


@dataclass(frozen=True, kw_only=True)
class Args:
    """Arguments of `nekro flower`."""

    address: str = arg("--address", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    port: int = arg("--port", type=port_number, default=5555, help="port to listen on (default: %(default)s)")
    check: bool = arg(
        "--check",
        action="store_true",
        help="start nothing; ask whether Flower answers on --port of this host",
    )
    supervisor_fd: int | None = supervisor_fd_option()


def flower_arguments(*, address: str, port: int) -> list[str]:
    """Arguments of Celery's command line that start Flower.

    Raises:
        UsageError: Flower is not installed, or would be reachable from other hosts without a password.
    """
    if importlib.util.find_spec("flower") is None:
        raise UsageError("Flower is not installed; run `pip install nekro-workers[flower]`")
    if address not in ("127.0.0.1", "::1", "localhost") and not os.environ.get("FLOWER_BASIC_AUTH"):
        raise UsageError(
            f"{address} is reachable from other hosts; set FLOWER_BASIC_AUTH=user:password or use 127.0.0.1"
        )
    # Workers publish events anyway. Flower would send them a command that they refuse, every 5 seconds.
    return ["flower", f"--address={address}", f"--port={port}", "--enable_events=False"]


def run(args: Args, deps: Deps) -> int:
    """Serve Flower until Ctrl-C, or ask whether it is served."""
    if args.check:
        return _check(args.port)
    _take_password_from_file()
    settings = deps.load_settings()
    arguments = flower_arguments(address=args.address, port=args.port)
    hint = _require_password(settings)
    from broker_config.app import create_app
    from broker_config.embedded import resolve_settings
    from nekro.cli.local_api import follow_shared_time
    from nekro.cli.services.guarded_flower import guard_requests
    from nekro.cli.services.ownership import require_running
    from nekro.cli.services.presence import require_broker
    from nekro.cli.services.process import attach_to_supervisor, stop_without_parent

    if settings.broker.url is None and args.supervisor_fd is None:
        require_running(settings.data_dir)
    if settings.broker.url is not None:
        require_broker(settings)
    if args.supervisor_fd is not None:
        attach_to_supervisor(args.supervisor_fd, stop_without_parent).ready("")
    deps.output.words(f"Flower listens on http://{args.address}:{args.port}{hint}")
    settings = resolve_settings(settings)
    follow_shared_time(settings)  # workers refuse commands whose time is far from theirs
    app = create_app(settings)
    guard_requests()
    with follow_methods(app, settings):
        app.start(argv=arguments)
    return 0


@contextmanager
def follow_methods(app: NekroApp, settings: Settings) -> Iterator[None]:
    """Register every method by name, now and, during the block, when workers publish more.

    Flower sets limits only of tasks that its process has registered.
    """
    import threading

    from broker_config.app import checked_task_options
    from nekro.cli.views.catalogue import published

    def register() -> None:
        for plugin in asyncio.run(published(settings)).plugins:
            for task in {entry.task for entry in plugin.methods} - app.tasks.keys():
                app.task(**checked_task_options(name=task, typing=False, shared=False))(_runs_elsewhere)

    def follow() -> None:
        while not is_over.wait(_METHODS_SECONDS):
            register()

    register()
    is_over = threading.Event()
    thread = threading.Thread(target=follow, name="nekro-methods", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        # A reading that Python's end interrupts would print a traceback.
        thread.join(CLOSE_STEP_SECONDS)


def _runs_elsewhere(*_: object) -> None:
    """Stand in for a method, which only workers run."""


def _check(port: int) -> int:
    import http.client

    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PROGRAM_SECONDS)
    try:
        connection.request("GET", "/healthcheck")
        status = connection.getresponse().status
    except (OSError, http.client.HTTPException) as exc:
        raise ServiceError(f"Flower does not answer on port {port} ({exc})") from exc
    finally:
        connection.close()
    return ExitCode.OK if status == http.client.OK else ExitCode.FAILED


def _require_password(settings: Settings) -> str:
    """Make sure that Flower has a password; returns where it is, "" if the environment states one.

    Every user of this machine reaches a loopback port.
    """
    from broker_config.secret_files import monitoring_key

    if os.environ.get("FLOWER_BASIC_AUTH"):
        return ""
    path, key = monitoring_key(settings.data_dir)
    os.environ["FLOWER_BASIC_AUTH"] = f"{_USER}:{key}"
    return f"; user {_USER}, password in {path}"


def _take_password_from_file() -> None:
    path = os.environ.pop("FLOWER_BASIC_AUTH_FILE", None)
    if path is None:
        return
    try:
        text = Path(path).read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as exc:
        raise UsageError(f"FLOWER_BASIC_AUTH_FILE: cannot read {path}") from exc
    if ":" not in text:
        raise UsageError(f"FLOWER_BASIC_AUTH_FILE: {path} does not hold user:password")
    # Flower reads its options from the environment.
    os.environ["FLOWER_BASIC_AUTH"] = text
