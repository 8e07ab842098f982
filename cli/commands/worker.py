"""`nekro worker`: one worker process in the foreground."""

from __future__ import annotations

import argparse
import os
import signal
import warnings
from dataclasses import dataclass
from typing import Any

from cli.command import Deps, add_supervisor_fd, positive_int, warn_of_root
from nekro_agent.methods import Lane

__all__ = ["Args", "register", "run"]

_EPILOG = """\
examples:
  nekro worker --lane methods
  NEKRO_BROKER__URL=redis://queue:6379/0 nekro worker --lane long --concurrency 2

SIGTERM or Ctrl-C stops warmly: running calls end first. A second one, or SIGQUIT, stops at once.
"""


@dataclass(frozen=True, kw_only=True)
class Args:
    """Arguments of `nekro worker`."""

    lane: str
    concurrency: int | None
    name: str | None
    supervisor_fd: int | None


def register(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.epilog = _EPILOG
    parser.add_argument(
        "--lane", required=True, choices=[lane.value for lane in Lane], help="queue that the worker serves"
    )
    parser.add_argument(
        "--concurrency",
        metavar="N",
        type=positive_int,
        default=None,
        help="calls or rounds at the same time (default: NEKRO_WORKERS__<LANE>_CONCURRENCY)",
    )
    parser.add_argument("--name", metavar="NAME", help="name of the worker (default: lane and process id)")
    add_supervisor_fd(parser)


def run(args: Args, deps: Deps) -> int:
    """Serve one lane until told to stop."""
    from celery.platforms import SecurityWarning

    settings = deps.load_settings()
    if args.supervisor_fd is not None:
        _report_to(args.supervisor_fd)
    elif settings.broker.url is None:
        from cli.ownership import require_running

        require_running(settings.data_dir)
    if args.supervisor_fd is None:
        warn_of_root(deps.output)
    # Celery's own warning is about pickled messages, which our workers do not accept.
    warnings.filterwarnings("ignore", category=SecurityWarning)
    from workers.process import run_worker

    return int(run_worker(settings, lane=args.lane, concurrency=args.concurrency, name=args.name))


def _report_to(descriptor: int) -> None:
    from celery.signals import worker_ready

    from cli.process import attach_to_supervisor

    say_ready = attach_to_supervisor(descriptor, lambda: os.kill(os.getpid(), signal.SIGTERM))

    def ready(sender: Any, **_: Any) -> None:
        say_ready(str(sender.hostname))

    worker_ready.connect(ready, weak=False)
