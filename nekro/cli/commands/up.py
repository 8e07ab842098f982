"""`nekro up`: run the whole system on this machine, in the foreground."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from broker_config.settings import Settings
from nekro.cli.command import Deps, arg, count, port_number, port_or_any, warn_of_root
from nekro.cli.running import run_async
from nekro.cli.services.ownership import Ownership
from nekro.cli.services.presence import require_broker
from nekro.cli.services.process import START_SECONDS, ChildSpec, flower_spec, gateway_spec, worker_spec
from nekro_agent.errors import LLMError, SandboxError, ServiceError, UsageError
from nekro_agent.methods import Lane

__all__ = ["EPILOG", "Args", "run"]

EPILOG: Final = """\
examples:
  nekro up
  nekro up --reload
  nekro up --methods 2 --rounds 2 --flower-port 5555
  nekro up --gateway-port 0
  NEKRO_DATA_DIR=/srv/nekro NEKRO_PLUGINS__DIRS=/srv/plugins nekro up

Without NEKRO_BROKER__URL it runs an embedded Redis, without NEKRO_DATABASE__URL it uses SQLite, both in the
data directory; the database is migrated. The HTTP API is served on NEKRO_GATEWAY__HOST; its
URL is printed, the file with a key for it, and a link that opens the console once.
Other `nekro` commands on that data directory then use this system.
Ctrl-C stops gracefully: rounds and calls end first. A second Ctrl-C stops at once.
"""


_DEFAULTS: Final = {Lane.METHODS: 1, Lane.LONG: 1, Lane.ROUNDS: None, Lane.PINNED: 0}
_WITHOUT_ROUNDS: Final = "messages get no answer, and the HTTP API runs no code (`POST /runs`)"
_DEFAULT_WORDS: Final = {
    Lane.ROUNDS: "1; without a language model it only runs code, and with NEKRO_BROKER__URL there is none",
    Lane.PINNED: "0: a methods worker owns the pinned plugins",
}


def _worker_count(lane: Lane) -> Any:
    return arg(
        f"--{lane.value}",
        metavar="N",
        type=count,
        default=_DEFAULTS[lane],
        help=f"worker processes of lane `{lane.value}` (default: {_DEFAULT_WORDS.get(lane, 1)})",
    )


@dataclass(frozen=True, kw_only=True)
class Args:
    """Arguments of `nekro up`."""

    methods: int = _worker_count(Lane.METHODS)
    long: int = _worker_count(Lane.LONG)
    rounds: int | None = _worker_count(Lane.ROUNDS)
    pinned: int = _worker_count(Lane.PINNED)
    gateway_port: int | None = arg(
        "--gateway-port",
        metavar="P",
        type=port_or_any,
        help="port of the HTTP API; 0 serves none (default: NEKRO_GATEWAY__PORT, or the next free one)",
    )
    flower_port: int | None = arg(
        "--flower-port", metavar="P", type=port_number, help="also serve Flower on 127.0.0.1:P"
    )
    reload: bool = arg(
        "--reload",
        action="store_true",
        help="for development: import a plugin again when its files change (NEKRO_PLUGINS__RELOAD)",
    )


def run(args: Args, deps: Deps) -> int:
    """Supervise until Ctrl-C."""
    settings = deps.load_settings()
    if args.reload:
        plugins = settings.plugins.model_copy(update={"reload": True})
        settings = settings.model_copy(update={"plugins": plugins})
    lanes = (args.methods, args.long, args.rounds is None, args.rounds, args.pinned)
    if not any((*lanes, args.gateway_port, args.flower_port)):
        raise UsageError("nothing to run: give at least one lane a worker, as in `nekro up --methods 1`")

    if settings.broker.url is not None:
        require_broker(settings)  # fail here; workers would retry the connection forever

    async def work() -> int:
        ownership = Ownership(settings.data_dir)
        await _claim(ownership, settings, deps)
        warn_of_root(deps.output)
        listener = None
        try:
            listener = _listener(args, settings)
            specs = children(args, await _rounds(args, settings, deps), listener)
            await _supervise(specs, settings, ownership, deps)
        finally:
            if listener is not None:
                listener.close()
            ownership.release()
        return 0

    return run_async(work())


async def _rounds(args: Args, settings: Settings, deps: Deps) -> list[ChildSpec]:
    """Return the rounds workers to run.

    Without a language model it is one that only runs code of the HTTP API, if the broker is embedded.

    Raises:
        LLMError: ``--rounds`` asks for some and no language model is configured.
    """
    from nekro.cli.views.turns import require_model

    if args.rounds == 0:
        deps.output.words(f"no rounds worker: {_WITHOUT_ROUNDS}; `--rounds 1` starts one")
        return []
    try:
        require_model(settings)
    except LLMError as exc:
        if args.rounds is not None:
            raise
        if settings.broker.url is not None:  # rounds would fail here that another host could run
            command = "`nekro worker --lane rounds --without-model` runs code"
            deps.output.words(f"no rounds worker: {exc}; {_WITHOUT_ROUNDS}; {command}")
            return []
        if not await _has_sandbox(settings):
            deps.output.words(
                f"no rounds worker: {exc}, and see `nekro doctor` for the sandbox; {_WITHOUT_ROUNDS}"
            )
            return []
        deps.output.words(f"messages get no answer: {exc}; code of the HTTP API (`POST /runs`) runs")
        return [worker_spec(Lane.ROUNDS, name="rounds-1", needs_model=False)]
    return _workers(Lane.ROUNDS, 1 if args.rounds is None else args.rounds)


async def _has_sandbox(settings: Settings) -> bool:
    from nekro.sandbox.drivers.selection import describe

    try:
        return (await describe(settings.sandbox)).ok
    except SandboxError:
        return False


def _workers(lane: Lane, number: int) -> list[ChildSpec]:
    return [worker_spec(lane.value, name=f"{lane.value}-{index}") for index in range(1, number + 1)]


def children(args: Args, rounds: Sequence[ChildSpec], listener: socket.socket | None) -> list[ChildSpec]:
    """Return the child processes to run.

    Args:
        rounds: the rounds workers.
        listener: of the gateway; None runs none.
    """
    specs = [
        *_workers(Lane.METHODS, args.methods),
        *_workers(Lane.LONG, args.long),
        *rounds,
        *_workers(Lane.PINNED, args.pinned),
    ]
    if listener is not None:
        specs.append(gateway_spec(listener))
    if args.flower_port is not None:
        specs.append(flower_spec(args.flower_port))
    return specs


def _listener(args: Args, settings: Settings) -> socket.socket | None:
    """Open the socket of the HTTP API; None when it is not wanted."""
    from nekro.gateway.web.listener import listen, listen_on_free_port

    if args.gateway_port == 0:
        return None
    gateway = settings.gateway
    if args.gateway_port is not None:
        return listen(gateway.model_copy(update={"port": args.gateway_port, "socket": None}))
    return listen(gateway) if gateway.socket is not None else listen_on_free_port(gateway)


async def _claim(ownership: Ownership, settings: Settings, deps: Deps) -> None:
    """Own the data directory.

    Raises:
        ServiceError: another `nekro up` or a command that runs services for itself owns it.
    """
    while not ownership.claim():
        running = await ownership.wait_for_owner(seconds=START_SECONDS, on_wait=deps.output.words)
        if running is not None:
            raise ServiceError(
                f"`nekro {running.command}` (process {running.pid}) already runs on {settings.data_dir};"
                " stop it first, or choose another --data-dir"
            )


async def _supervise(specs: list[ChildSpec], settings: Settings, ownership: Ownership, deps: Deps) -> None:
    from nekro.cli.services.supervisor import Supervisor
    from nekro.cli.services.system import embedded_services

    async with embedded_services(settings, owns_database=True) as resolved:
        supervisor = Supervisor(specs, resolved, ownership=ownership, output=deps.output)
        await supervisor.run(embedded=settings.broker.url is None)
