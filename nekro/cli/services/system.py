"""Open the system that a command works with: a running one, or its own, which ends with the command."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final

from broker_config.embedded import EmbeddedRedis, resolve_settings
from broker_config.settings import Settings
from nekro.base.tasks import end_tasks
from nekro.broker.tracing import traced
from nekro.cli.environment import environment_of
from nekro.cli.output import Output
from nekro.cli.services.ownership import Ownership, RunningSystem, WorkerEntry
from nekro.cli.services.presence import require_broker, require_workers
from nekro.cli.services.process import START_SECONDS, ChildProcess, ChildSpec, describe_exit, worker_spec
from nekro_agent.durations import CLOSE_STEP_SECONDS
from nekro_agent.errors import NekroError, ServiceError
from nekro_agent.files.private_files import make_directory, open_private
from nekro_agent.methods import Lane

if TYPE_CHECKING:
    from nekro.app.services import Services

__all__ = [
    "CALL_LANES",
    "ROUND_LANES",
    "System",
    "embedded_services",
    "migrate",
    "open_services",
    "open_system",
    "start_workers",
    "stop_workers",
]

#: Lanes that a method call may need, and lanes that a round may need.
CALL_LANES: Final = (Lane.METHODS, Lane.LONG)
ROUND_LANES: Final = (Lane.METHODS, Lane.LONG, Lane.ROUNDS)

_CLAIM_TRIES: Final = 20


@dataclass
class System:
    """A usable system; made by ``open_system``."""

    #: Every URL is filled.
    settings: Settings
    #: Whether some of its workers end with this command.
    own: bool
    _starting: asyncio.Task[None] | None = None

    async def ready(self) -> None:
        """Wait until the workers that were started for this command consume.

        Raises:
            ServiceError: one of them did not start.
        """
        if self._starting is not None:
            await self._starting


@contextlib.asynccontextmanager
async def open_services(
    settings: Settings,
    *,
    command: str,
    lanes: Sequence[Lane],
    output: Output,
    before_start: Callable[[Settings], None] | None = None,
    needs_workers: bool = True,
) -> AsyncIterator[tuple[System, Services]]:
    """Open a system, as ``open_system``, and this process's services, which know what the workers serve.

    Args:
        needs_workers: wait for a live worker; otherwise the last published catalogue suffices.

    Raises:
        ServiceError: no worker is live, besides the errors of ``open_system``.
    """
    from nekro.app.services import CALLER, Services

    async with open_system(
        settings, command=command, lanes=lanes, output=output, before_start=before_start
    ) as system:
        services = Services.load(system.settings, role=CALLER)
        await system.ready()
        with traced(system.settings.tracing, role=command, node=services.node, redact=services.redactor):
            try:
                await services.start()
                if needs_workers:
                    await require_workers(services.read_catalogue)
                failed = [plugin.key for plugin in services.registry.plugins if plugin.error is not None]
                if failed:
                    output.words(f"not loaded: {', '.join(failed)}; `nekro plugins` shows the errors")
                yield system, services
            finally:
                await services.close()


@contextlib.asynccontextmanager
async def open_system(
    settings: Settings,
    *,
    command: str,
    lanes: Sequence[Lane],
    output: Output,
    before_start: Callable[[Settings], None] | None = None,
) -> AsyncIterator[System]:
    """Open the system that the settings or the data directory name, or start one.

    With ``broker.url`` set, the command uses that fleet and starts no worker. Otherwise it borrows the
    embedded services of the data directory from their owner, or owns them until the command ends.

    Args:
        command: name of the command, recorded in ``up.json``.
        lanes: lanes that must have a worker.
        before_start: checks the requirements of workers; called only when workers are started.

    Raises:
        BrokerUnavailableError: the broker that the settings name does not answer.
        ServiceError: services or workers did not start.
        StorageUnavailableError: the database cannot be migrated.
    """
    if settings.broker.url is not None:
        await asyncio.to_thread(require_broker, settings)
        yield System(settings=resolve_settings(settings), own=False)
        return
    ownership = Ownership(settings.data_dir)
    async with contextlib.AsyncExitStack() as stack:
        running = await _join_or_claim(ownership, stack, output)
        missing = [lane for lane in lanes if running is None or lane not in running.lanes]
        if missing and before_start is not None:
            before_start(settings)
        if running is not None:
            system = System(settings=resolve_settings(settings), own=bool(missing))
        else:
            resolved = await stack.enter_async_context(embedded_services(settings))
            system = System(settings=resolved, own=True)
        workers = await _begin_workers(missing, system.settings, stack, shared=running is None)
        if running is None:
            # Runs before the workers are stopped: borrowers may still use them.
            stack.push_async_callback(_end_ownership, ownership, output)
        system._starting = asyncio.create_task(_become_ready(workers, ownership, command, output))
        stack.push_async_callback(end_tasks, system._starting)
        async with _watched(workers, system):
            yield system


@contextlib.asynccontextmanager
async def embedded_services(settings: Settings, *, owns_database: bool = False) -> AsyncIterator[Settings]:
    """Run the services that have no URL: a Redis, a migrated SQLite; yields settings with every URL filled.

    Args:
        owns_database: migrate a PostgreSQL too, instead of only checking that it is migrated.

    Raises:
        ServiceError: Redis did not start.
        StorageUnavailableError: the database does not answer, or is not migrated.
    """
    with contextlib.ExitStack() as stack:
        if settings.broker.url is None:
            redis = EmbeddedRedis(settings.data_dir)
            redis.start()
            stack.callback(redis.stop)
        resolved = resolve_settings(settings)
        if owns_database or settings.database.url is None or settings.database.url.startswith("sqlite"):
            await migrate(resolved)
        else:
            from storage.engine import Database
            from storage.migrate import require_schema

            async with Database(resolved.database, resolved.data_dir) as database:
                await require_schema(database, refuses_pooler=False)
        yield resolved


async def migrate(settings: Settings) -> None:
    """Bring the database's schema to this version.

    Raises:
        StorageUnavailableError: the database does not answer, or cannot be migrated.
    """
    from storage.migrate import upgrade

    await upgrade(settings.database, settings.data_dir)


async def start_workers(
    specs: Iterable[ChildSpec], settings: Settings, *, directory: Path | None = None
) -> list[ChildProcess]:
    """Start workers whose output goes to ``<data_dir>/logs/<name>.log``; they are not ready yet."""
    logs = settings.data_dir / "logs"
    make_directory(logs)
    environment = environment_of(settings)
    started: list[ChildProcess] = []
    try:
        for spec in specs:
            sink = _LogFile(logs / f"{spec.name}.log")
            started.append(
                await ChildProcess.start(spec, environment=environment, directory=directory, sink=sink)
            )
    except BaseException:
        await stop_workers(started, settings)
        raise
    return started


async def stop_workers(workers: Sequence[ChildProcess], settings: Settings) -> None:
    """Stop workers gracefully, in parallel."""
    seconds = stop_seconds(settings)
    await asyncio.gather(*(worker.stop(warm_seconds=seconds) for worker in workers))


def stop_seconds(settings: Settings) -> float:
    """Return how long a worker may take to stop gracefully: its own limit and a margin."""
    return settings.workers.stop_seconds + CLOSE_STEP_SECONDS


def entries(workers: Iterable[ChildProcess]) -> tuple[WorkerEntry, ...]:
    """Describe workers for ``up.json``."""
    return tuple(
        WorkerEntry(name=worker.spec.name, lane=worker.spec.lane, pid=worker.pid) for worker in workers
    )


async def _join_or_claim(
    ownership: Ownership, stack: contextlib.AsyncExitStack, output: Output
) -> RunningSystem | None:
    """Borrow the running system and return it, or own the data directory and return None."""
    for _ in range(_CLAIM_TRIES):
        if ownership.claim():
            stack.callback(ownership.release)
            return None
        if await ownership.wait_for_owner(seconds=START_SECONDS, on_wait=output.words) is None:
            continue
        lease = contextlib.ExitStack()
        lease.enter_context(ownership.borrow())
        # Read again under the lock: the owner may have started to stop in between.
        running = ownership.owner()
        if running is not None:
            stack.push(lease)
            return running
        lease.close()
    raise ServiceError("the services of the data directory keep starting and stopping; try again")


async def _begin_workers(
    lanes: Sequence[Lane], settings: Settings, stack: contextlib.AsyncExitStack, *, shared: bool
) -> list[ChildProcess]:
    # Node names must be unique on a broker: the owner and other borrowers run workers there too.
    suffix = "" if shared else f"-{os.getpid()}"
    specs = [worker_spec(lane.value, name=f"{lane.value}{suffix}") for lane in lanes]
    workers = await start_workers(specs, settings)
    stack.push_async_callback(stop_workers, workers, settings)
    return workers


async def _become_ready(
    workers: Sequence[ChildProcess], ownership: Ownership, command: str, output: Output
) -> None:
    def say_wait(text: str) -> None:
        output.words(text)
        if ownership.is_mine:
            ownership.progress(text)

    await asyncio.gather(*(worker.ready(on_wait=say_wait) for worker in workers))
    if ownership.is_mine:
        ownership.publish(command=command, workers=entries(workers))


@contextlib.asynccontextmanager
async def _watched(workers: Sequence[ChildProcess], system: System) -> AsyncIterator[None]:
    """End the block when a worker has ended by itself and the command would wait for it in vain.

    Raises:
        ServiceError: a worker has ended; the message names its log.
    """
    task, died = asyncio.current_task(), list[ServiceError]()

    async def watch(worker: ChildProcess) -> None:
        assert system._starting is not None and task is not None  # noqa: S101 - set by ``open_system``
        await asyncio.wait([system._starting])
        if system._starting.cancelled() or system._starting.exception() is not None:
            return  # ``ready`` reports it
        code = await worker.wait()
        from nekro.cli.services.worker_processes import (
            release_calls,  # imports Celery, which few commands need
        )

        with contextlib.suppress(NekroError):
            if (await release_calls(system.settings, worker, code)).is_answered:
                return
        log = system.settings.data_dir / "logs" / f"{worker.spec.name}.log"
        died.append(ServiceError(f"{worker.spec.name} ended with {describe_exit(code)}; its log is {log}"))
        task.cancel()

    watches = [asyncio.create_task(watch(worker)) for worker in workers]
    try:
        yield
    except asyncio.CancelledError:
        if died and task is not None and task.uncancel() == 0:
            raise died[0] from None
        raise
    finally:
        await end_tasks(*watches)


async def _end_ownership(ownership: Ownership, output: Output) -> None:
    ownership.withdraw()
    if await ownership.wait_for_borrowers():
        output.words("other commands used these services; they have ended now")


class _LogFile:
    """The log file of a worker; truncated at each start."""

    def __init__(self, path: Path) -> None:
        self._file: IO[str] = open_private(path, "w", encoding="utf-8", errors="backslashreplace")

    def write(self, line: str) -> None:
        """Append a line; flushed, because logs are read while the worker runs."""
        self._file.write(line + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()
