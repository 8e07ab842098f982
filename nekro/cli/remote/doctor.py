"""`nekro doctor` over a gateway: what can be checked from here."""

from __future__ import annotations

import os
from collections.abc import Callable

from nekro.cli.command import Deps
from nekro.cli.commands.doctor import Args, show_checks
from nekro.cli.doctor.service_checks import Check, Verdict
from nekro.cli.remote.target import open_client
from nekro.cli.running import ExitCode, exit_code_of
from nekro_agent.errors import NekroError, UsageError
from nekro_client import Client

__all__ = ["run"]


def run(args: Args, deps: Deps) -> int:
    """Check the gateway, the key, the workers, the queues and the plugins."""
    if args.settings:
        raise UsageError("settings are read where the workers are; unset NEKRO_URL there")
    steps: dict[str, Callable[[Client], str]] = {
        "gateway": _gateway,
        "plugins": _plugins,
        "workers": _workers,
        "queues": _queues,
    }
    checks = [_checked(name, step) for name, step in steps.items()]
    show_checks(checks, args, deps)
    return next((check.code for check in checks if check.verdict is Verdict.FAILED), ExitCode.OK)


def _checked(name: str, step: Callable[[Client], str]) -> Check:
    try:
        with open_client() as client:
            return Check(name=name, verdict=Verdict.OK, detail=step(client))
    except _CheckFailedError as exc:
        return Check(name=name, verdict=Verdict.WARNING, detail=str(exc))
    except NekroError as exc:
        is_denied = "scope" in str(exc) and isinstance(exc, UsageError)
        verdict = Verdict.WARNING if is_denied and name != "gateway" else Verdict.FAILED
        return Check(name=name, verdict=verdict, detail=str(exc), code=exit_code_of(exc))


class _CheckFailedError(Exception):
    """The state is one that an operator should know."""


def _gateway(client: Client) -> str:
    client.ready()
    return f"{os.environ['NEKRO_URL']} is ready"


def _plugins(client: Client) -> str:
    plugins = client.plugins()
    failed = [plugin.key for plugin in plugins if plugin.status == "failed"]
    if failed:
        raise _CheckFailedError(f"not loaded: {', '.join(failed)}; `nekro plugins` shows the errors")
    return f"{len(plugins)} plugins"


def _workers(client: Client) -> str:
    live = [worker for worker in client.workers() if worker.is_live]
    lanes = sorted({worker.lane for worker in live})
    if not live:
        raise _CheckFailedError("no worker is live")
    return f"{len(live)} live, for {', '.join(lanes)}"


def _queues(client: Client) -> str:
    queues = client.queues()
    if queues.dead_letters:
        raise _CheckFailedError(f"{queues.dead_letters} dead letters; `nekro dead` lists them")
    return f"{sum(queue.waiting for queue in queues.queues)} messages wait"
