"""``World`` on the real system: a worker process, Redis, a database; calls go through the queue."""

from __future__ import annotations

import contextlib
import shutil
import uuid
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import sqlalchemy
from loaded_plugins import unload_plugins
from plugin_world import CHAT, USER
from waiting import WAIT_SECONDS
from worker_fleet import Worker, call_in, imported

from broker_config.settings import DatabaseSettings, Settings
from nekro.app import use_cases
from nekro.app.calls.dispatch import CallScope
from nekro.app.services import Services
from nekro.plugins.invoke import Outcome
from nekro.wire.values import decode_value, encode_arguments
from nekro_agent import runtime
from nekro_agent.commands.schemas import CommandExecutionContext, CommandResponse
from nekro_agent.ports import MessageKind

#: State that calls leave in the database and below the data directory.
TABLES = (
    "chat_events",
    "plugin_values",
    "messages",
    "rounds",
    "calls",
    "job_signals",
    "jobs",
    "timers",
    "cron_jobs",
    "chats",
    "users",
    "presets",
)
FOLDERS = ("plugins", "configs", "uploads", "sandboxes")


class QueueSystem:
    """One worker process for many tests; each starts with the state after the plugins' init."""

    def __init__(
        self, directory: Path, *, redis_url: str, plugins: Sequence[Path], database_url: str
    ) -> None:
        self._engine = sqlalchemy.create_engine(
            database_url.replace("postgresql://", "postgresql+psycopg://"), poolclass=sqlalchemy.NullPool
        )
        self._snapshot = directory / "snapshot"
        self._log = directory / "spec.log"
        self._worker: Worker | None = None
        self._is_stopping = False
        self.settings = Settings.load(
            env_file=None,
            data_dir=directory / "data",
            broker={"url": redis_url, "key_prefix": f"t{uuid.uuid4().hex}:"},
            database=DatabaseSettings(url=database_url),
            downloads={"allow_private": ("127.0.0.0/8",)},
            plugins={"dirs": tuple(plugins), "load_shipped": False, "package_allow": ()},
            security={"signing_key": "test-signing-key"},
        )

    def prepare(self) -> None:
        """Start the worker once, on the migrated database, and save the state after its plugins' init."""
        self.start_worker()
        for folder in FOLDERS:
            (self.settings.data_dir / folder).mkdir(exist_ok=True)
            shutil.copytree(self.settings.data_dir / folder, self._snapshot / folder)
        self._rows = [dict(row._mapping) for row in self.query("SELECT * FROM plugin_values")]

    def restore(self) -> None:
        """Restore the state after init, and the worker if a test stopped it."""
        with self._engine.begin() as connection:
            for table in TABLES:
                connection.execute(sqlalchemy.text(f"DELETE FROM {table}"))
            if self._rows:
                names = ", ".join(self._rows[0])
                marks = ", ".join(f":{name}" for name in self._rows[0])
                statement = f"INSERT INTO plugin_values ({names}) VALUES ({marks})"
                connection.execute(sqlalchemy.text(statement), self._rows)
        for folder in FOLDERS:
            shutil.rmtree(self.settings.data_dir / folder, ignore_errors=True)
            shutil.copytree(self._snapshot / folder, self.settings.data_dir / folder)
        if self._worker is None:
            self.start_worker()

    def start_worker(self) -> None:
        """Start the worker and wait until it consumes."""
        self._worker = Worker(self.settings, self._log, lane="methods", concurrency=None)
        self._is_stopping = False
        self._worker.wait_ready()

    def begin_stop(self) -> None:
        """Signal the worker to stop without waiting for it."""
        if self._worker is not None and not self._is_stopping:
            self._is_stopping = True
            self._worker.process.terminate()

    def stop_worker(self) -> None:
        """Stop the worker gracefully: its plugins' cleanup hooks run."""
        if self._worker is not None:
            assert self._worker.stop() == 0, self._log.read_text()[-4000:]
            self._worker = None

    def close(self) -> None:
        """Stop the worker and close the database."""
        self.stop_worker()
        self._engine.dispose()

    @property
    def log(self) -> str:
        """The worker's log."""
        return self._log.read_text("utf-8")

    def query(self, statement: str, **values: object) -> list[Any]:
        """Read rows."""
        with self._engine.connect() as connection:
            return list(connection.execute(sqlalchemy.text(statement), values))


class QueueWorld:
    """Implements ``World`` with the services that a command has."""

    kind = "queue"

    def __init__(self, system: QueueSystem, services: Services) -> None:
        self.data_dir = system.settings.data_dir
        self._system = system
        self._services = services
        self.loaded = imported(services)
        self.registry = services.registry

    @classmethod
    @contextlib.asynccontextmanager
    async def opened(cls, system: QueueSystem) -> AsyncIterator[QueueWorld]:
        """Start a test on the system."""
        system.restore()
        services = Services.load(system.settings, role="cli")
        try:
            await services.start()
            yield cls(system, services)
        finally:
            await services.close()
            unload_plugins(imported(services))
            runtime.unbind()
            runtime.prepare(data_dir=None)

    async def call(
        self, name: str, /, *args: Any, chat_key: str = CHAT, user_id: str | None = USER, **kwargs: Any
    ) -> Outcome:
        entry = self._services.registry.find(name)
        envelope = await call_in(
            self._services,
            entry,
            encode_arguments(args, kwargs),
            CallScope(chat=await self._services.chat(chat_key), user_id=user_id),
            seconds=WAIT_SECONDS,
        )
        value = envelope.value_bytes()
        return Outcome(
            type=envelope.type,
            value=decode_value(value, max_bytes=1 << 20) if value else None,
            text=envelope.text,
            segments=envelope.segments,
        )

    async def stored(
        self, plugin_key: str, store_key: str, *, chat_key: str = "", user_key: str = ""
    ) -> str | None:
        return await runtime.current().store.get(
            plugin_key, chat_key=chat_key, user_key=user_key, store_key=store_key
        )

    async def store(
        self, plugin_key: str, store_key: str, value: str, *, chat_key: str = "", user_key: str = ""
    ) -> None:
        await runtime.current().store.set(
            plugin_key, chat_key=chat_key, user_key=user_key, store_key=store_key, value=value
        )

    async def texts(self, chat_key: str, kind: MessageKind) -> list[str]:
        rows = self._system.query(
            "SELECT text FROM messages WHERE chat_key = :chat AND kind = :kind ORDER BY sequence",
            chat=chat_key,
            kind=kind.value,
        )
        return [text for (text,) in rows]

    async def shared_dir(self, chat_key: str = CHAT) -> Path:
        chat = await self._services.chat(chat_key)
        return self._services.areas.shared_dir(chat.container_key)

    def uploads_dir(self, chat_key: str = CHAT) -> Path:
        return self._services.areas.uploads_dir(chat_key)

    async def woken(self, chat_key: str) -> int:
        return int(
            self._system.query("SELECT count(*) FROM rounds WHERE chat_key = :chat", chat=chat_key)[0][0]
        )

    async def command(self, line: str, who: CommandExecutionContext) -> list[CommandResponse]:
        return await use_cases.run_command(self._services, line, who=who, timeout_seconds=WAIT_SECONDS)

    async def reset(self, chat_key: str) -> None:
        await use_cases.reset_chat(self._services, chat_key)

    async def stop(self) -> None:
        self._system.stop_worker()
