"""`nekro worker`: run one worker process in the foreground, or probe the workers of this host."""

from __future__ import annotations

import argparse
import dataclasses
import gc
import socket
import sys
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from broker_config.settings import Settings
from broker_config.urls import without_password
from nekro.base.forks import show_command_line
from nekro.cli.command import (
    Deps,
    arg,
    args_from,
    declare,
    json_flag,
    positive_int,
    supervisor_fd_option,
    warn_of_root,
)
from nekro.cli.output import one_line
from nekro.cli.running import ExitCode
from nekro.cli.services.presence import Probe, ask_workers, wanted_of
from nekro_agent.errors import ServiceError, UsageError
from nekro_agent.methods import Lane

if TYPE_CHECKING:
    from nekro.cli.services.process import Supervised
    from nekro.plugins.loader import PreparedPlugins

__all__ = ["EPILOG", "Args", "run"]

EPILOG: Final = """\
examples:
  nekro worker --lane methods
  NEKRO_BROKER__URL=redis://queue:6379/0 nekro worker --lane long --concurrency 2
  nekro worker --check --lane methods
  nekro worker --check live
  nekro worker --check --name methods-1 --data-dir data

--check asks only the workers of the data directory and of the broker that are set (NEKRO_DATA_DIR or
--data-dir, NEKRO_BROKER__URL), so a container's health check is not answered by another one's worker.
SIGTERM or Ctrl-C stops gracefully: running calls end first. A second one, or SIGQUIT, stops at once.
"""


@dataclass(frozen=True, kw_only=True)
class Args:
    """Arguments of `nekro worker`."""

    #: None only with ``check``: every lane.
    lane: str | None = arg(
        "--lane", choices=[lane.value for lane in Lane], help="queue that the worker serves"
    )
    concurrency: int | None = arg(
        "--concurrency",
        metavar="N",
        type=positive_int,
        help="calls or rounds at the same time (default: NEKRO_WORKERS__<LANE>_CONCURRENCY)",
    )
    name: str | None = arg(
        "--name",
        metavar="NAME",
        help="name of the worker (default: lane and process id); with --check: only this one",
    )
    without_model: bool = arg(
        "--without-model",
        action="store_true",
        help="with --lane rounds: start without a language model; code of the HTTP API runs, rounds fail",
    )
    check: Probe | None = arg(
        "--check",
        nargs="?",
        type=Probe,
        choices=list(Probe),
        const=Probe.READY,
        help="start nothing; ask the workers of this host, of --lane and --name or all, whether they are "
        "ready to take calls (or only live), and exit with 0, 1 (one is not) or 13 (there is none)",
    )
    json: bool = json_flag()
    supervisor_fd: int | None = supervisor_fd_option()
    #: Only in the template of workers.
    template_fd: int | None = arg("--template-fd", type=int, help=argparse.SUPPRESS)


def run(args: Args, deps: Deps) -> int:
    """Serve one lane until a signal, or probe running workers."""
    if args.check is not None:
        return _check(args.check, args, deps)
    if args.template_fd is None and args.lane is None:
        raise UsageError("no lane was given; name one with --lane, or probe running workers with --check")
    settings, supervised = deps.load_settings(), None
    prepared: PreparedPlugins | None = None
    if args.template_fd is not None and args.supervisor_fd is not None:
        args, prepared = _forked(args.supervisor_fd, args.template_fd, settings)
    if args.supervisor_fd is not None:
        from broker_config.embedded import hold_redis

        supervised = _report_to(args.supervisor_fd)
        hold_redis(settings)
    elif settings.broker.url is None:
        from nekro.cli.services.ownership import require_running

        require_running(settings.data_dir)
    if args.supervisor_fd is None:
        warn_of_root(deps.output)
    gc.disable()  # imports leave little garbage; `keep_what_is_loaded` enables it again
    from nekro.broker.celery.names import pickle_warning

    warnings.filterwarnings("ignore", category=pickle_warning())  # our workers accept no pickled messages
    from nekro.broker.celery.worker import was_interrupted
    from workers.process import run_worker

    code = int(
        run_worker(
            settings,
            lane=args.lane or "",
            concurrency=args.concurrency,
            name=args.name,
            needs_model=not args.without_model,
            on_progress=_log_progress if supervised is None else supervised.does,
            prepared=prepared,
        )
    )
    return ExitCode.OK if was_interrupted() else code


def _check(probe: Probe, args: Args, deps: Deps) -> int:
    settings = deps.load_settings()
    answers = ask_workers(probe, wanted_of(settings, lane=args.lane, name=args.name))
    if not answers:
        meant = (
            f" named {args.name}" if args.name else "",
            f" of lane {args.lane}" if args.lane else "",
            f" on data directory {settings.data_dir}" if settings.is_data_dir_set else "",
            f" on broker {without_password(settings.broker.url)}" if settings.broker.url else "",
        )
        raise ServiceError(f"no worker{''.join(meant)} runs on this host as this user")
    if args.json:
        shown = ("lane", "worker", "pid", "ok", "faults")
        deps.output.json([{name: getattr(answer, name) for name in shown} for answer in answers])
    for answer in answers if not args.json else ():
        deps.output.report(one_line(f"{answer.worker}: {'; '.join(answer.faults) or probe.value}"))
    return ExitCode.OK if all(answer.ok for answer in answers) else ExitCode.FAILED


def _report_to(descriptor: int) -> Supervised:
    from celery.signals import worker_ready

    from nekro.broker.delivery.transport import holder
    from nekro.cli.services.process import attach_to_supervisor, stop_without_parent

    supervised = attach_to_supervisor(descriptor, stop_without_parent, holder=holder())

    def ready(sender: Any, **_: Any) -> None:
        supervised.ready(str(sender.hostname))

    worker_ready.connect(ready, weak=False)
    return supervised


def _forked(supervisor_fd: int, template_fd: int, settings: Settings) -> tuple[Args, PreparedPlugins]:
    """Be the template of workers; returns in its forks, each with its own arguments."""
    from nekro.cli.services.process import Supervised
    from workers.template import run_template

    with socket.socket(fileno=supervisor_fd) as channel, socket.socket(fileno=template_fd) as requests:
        for one in (channel, requests):
            one.setblocking(True)
            one.set_inheritable(False)
        supervised = Supervised(channel, holder="")
        order = run_template(
            settings, requests, on_progress=supervised.does, on_ready=lambda: supervised.ready("template")
        )
    show_command_line([*sys.orig_argv[: -len(sys.argv[1:])], *order.arguments])
    sys.argv[1:] = order.arguments
    parser = argparse.ArgumentParser()
    declare(Args, parser)
    args = args_from(Args, parser.parse_args(order.arguments[1:]))
    return dataclasses.replace(args, supervisor_fd=order.supervisor_fd), order.plugins


def _log_progress(step: str) -> None:
    from loguru import logger

    logger.bind(step=step).debug("worker_starts")
