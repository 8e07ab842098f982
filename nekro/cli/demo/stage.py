"""The services of the tour: a Redis, a SQLite database, four workers and a model server, all of its own."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from broker_config.settings import AnswerMode, Settings
from nekro.cli.demo.model_server import ModelServer
from nekro.cli.demo.scenes import write_script
from nekro.cli.demo.task_log import TaskLog
from nekro.cli.services.process import ChildProcess, ChildSpec, worker_spec
from nekro.cli.services.system import embedded_services, start_workers, stop_workers
from nekro_agent.methods import Lane

if TYPE_CHECKING:
    from nekro.app.composition import Services

__all__ = ["Stage", "demo_settings", "open_stage"]

_MODEL_BYTES: Final = 6 << 20
#: Two rounds workers of one round each: a follow-up round finds the other one free.
_WORKERS: Final = (
    worker_spec(Lane.ROUNDS, name="rounds-1", concurrency=1),
    worker_spec(Lane.ROUNDS, name="rounds-2", concurrency=1),
    worker_spec(Lane.METHODS, name="methods-1"),
    worker_spec(Lane.LONG, name="long-1"),
)


@dataclass
class Stage:
    """The running services of the tour; made by ``open_stage``."""

    settings: Settings
    services: Services
    tasks: TaskLog
    models: ModelServer
    workers: list[ChildProcess]
    #: Process id by worker name, those that have ended included.
    pids: dict[str, int] = field(default_factory=dict)

    async def replace(self, old: str, new: str) -> None:
        """Stop a worker and start another one of its lane."""
        child = next(worker for worker in self.workers if worker.spec.name == old)
        self.workers.remove(child)
        await stop_workers([child], self.settings)
        self.workers += await _begin([worker_spec(child.spec.lane, name=new)], self.settings, self.pids)


def demo_settings(base: Settings, data_dir: Path) -> Settings:
    """Return the user's settings with the tour's own services, plugins and model in place of the user's."""
    plugins = Path(__file__).parent / "plugins"
    return base.model_copy(
        update={
            "data_dir": data_dir,
            "broker": base.broker.model_copy(update={"url": None}),
            "results": base.results.model_copy(update={"url": None}),
            "database": base.database.model_copy(update={"url": None}),
            "security": base.security.model_copy(update={"signing_key": None}),
            "plugins": base.plugins.model_copy(
                update={"dirs": (plugins,), "disabled": (), "load_shipped": True}
            ),
            "agent": base.agent.model_copy(update={"answers": AnswerMode.WORDS}),
            "downloads": base.downloads.model_copy(update={"allow_private": ("127.0.0.1",)}),
            "llm": base.llm.model_copy(
                update={
                    "script": data_dir / "demo" / "script.yaml",
                    "record": data_dir / "demo" / "llm.jsonl",
                }
            ),
        }
    )


@contextlib.asynccontextmanager
async def open_stage(settings: Settings) -> AsyncIterator[Stage]:
    """Start everything, yield when every worker is ready, stop everything.

    Raises:
        ServiceError: a worker did not start; its log is quoted.
    """
    from nekro.app.composition import Services

    assert settings.llm.script is not None  # noqa: S101 - demo_settings sets it
    write_script(settings.llm.script)
    async with contextlib.AsyncExitStack() as stack:
        resolved = await stack.enter_async_context(embedded_services(settings))
        models = stack.enter_context(ModelServer(size_bytes=_MODEL_BYTES))
        services = Services.load(resolved, role="cli")
        tasks = stack.enter_context(TaskLog(services.app))
        pids: dict[str, int] = {}
        workers: list[ChildProcess] = []
        stack.push_async_callback(stop_workers, workers, resolved)
        workers += await _begin(_WORKERS, resolved, pids)
        await services.start()
        stack.push_async_callback(services.close)
        yield Stage(
            settings=resolved, services=services, tasks=tasks, models=models, workers=workers, pids=pids
        )


async def _begin(specs: Sequence[ChildSpec], settings: Settings, pids: dict[str, int]) -> list[ChildProcess]:
    # In the data directory, so that no `.env` of the user's working directory is read.
    workers = await start_workers(specs, settings, directory=settings.data_dir)
    try:
        for worker in workers:
            await worker.ready()
            pids[worker.spec.name] = worker.pid
    except BaseException:
        await stop_workers(workers, settings)
        raise
    return workers
