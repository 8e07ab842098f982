"""What a process reads before it calls a method: the catalogue, lane overrides and the chat.

These are texts of SQL, because importing SQLAlchemy takes a command longer than the rest of a call. They run
on the connections of ``Database`` like all other statements. A test compares their columns with the tables.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from nekro_agent.ports import ChatInfo
from storage.driver.connection import Connection
from storage.driver.values import escaped, unescaped

__all__ = [
    "NOW",
    "LaneOverride",
    "PublishedWorker",
    "ServedPlugin",
    "Snapshot",
    "find_chat",
    "lane_overrides",
    "read_snapshots",
    "read_workers",
    "served_plugins",
    "time_of",
]

#: The time of the statement, as ``storage.sql.now`` writes it; by whether the database is SQLite.
NOW: Final = {
    True: "(strftime('%Y-%m-%d %H:%M:%f', 'now') || '000')",
    False: "statement_timestamp()",
}


@dataclass(frozen=True, kw_only=True)
class PublishedWorker:
    """A worker in the catalogue."""

    id: str
    name: str
    lane: str
    host: str
    pid: int
    started_at: datetime
    #: Whether it renewed its lease in time; otherwise it has stopped or died.
    is_live: bool


@dataclass(frozen=True, kw_only=True)
class ServedPlugin:
    """A plugin of a worker."""

    worker_id: str
    #: In the order in which the worker loaded its plugins.
    position: int
    digest: str


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """One version of a plugin, as workers serve it."""

    digest: str
    plugin_key: str
    #: JSON of ``nekro.plugins.entries.PluginEntry``.
    entry: str
    #: When a worker served it first; None before it is published.
    published_at: datetime | None = None


@dataclass(frozen=True, kw_only=True)
class LaneOverride:
    """The lane that replaces a method's own."""

    #: A member of ``nekro_agent.methods.Lane``.
    lane: str
    reason: str
    #: A member of ``storage.states.OverrideSource``.
    source: str

    def __str__(self) -> str:
        """Why the lane is another one, and who decided it."""
        return f"{self.reason} ({self.source})"


async def read_workers(connection: Connection) -> list[PublishedWorker]:
    """List the workers, the one that started last at the end."""
    rows = await connection.exec_driver_sql(
        "SELECT id, name, lane, host, pid, started_at,"  # noqa: S608 - constants
        f" COALESCE(lease_until > {NOW[connection.is_sqlite]}, false)"
        " FROM workers ORDER BY started_at, id"
    )
    return [
        PublishedWorker(
            id=unescaped(row[0]),
            name=unescaped(row[1]),
            lane=unescaped(row[2]),
            host=unescaped(row[3]),
            pid=row[4],
            started_at=time_of(row[5]),
            is_live=bool(row[6]),
        )
        for row in rows
    ]


async def served_plugins(connection: Connection, worker_ids: Collection[str]) -> list[ServedPlugin]:
    """List what workers serve, in order."""
    rows = await connection.exec_driver_sql(
        "SELECT worker_id, position, digest FROM worker_plugins"  # noqa: S608 - placeholders
        f" WHERE worker_id IN ({_marks(connection, len(worker_ids))}) ORDER BY worker_id, position",
        tuple(worker_ids),
    )
    return [ServedPlugin(worker_id=row[0], position=row[1], digest=row[2]) for row in rows]


async def read_snapshots(connection: Connection, digests: Collection[str]) -> list[Snapshot]:
    """Return versions of plugins by digest."""
    rows = await connection.exec_driver_sql(
        "SELECT digest, plugin_key, entry, published_at FROM plugin_snapshots"  # noqa: S608 - placeholders
        f" WHERE digest IN ({_marks(connection, len(digests))})",
        tuple(digests),
    )
    return [
        Snapshot(
            digest=row[0], plugin_key=unescaped(row[1]), entry=unescaped(row[2]), published_at=time_of(row[3])
        )
        for row in rows
    ]


async def lane_overrides(connection: Connection) -> dict[str, LaneOverride]:
    """Return the lane overrides by task name, or by the key of a pinned plugin."""
    rows = await connection.exec_driver_sql("SELECT method, lane, reason, source FROM method_marks")
    return {
        unescaped(row[0]): LaneOverride(lane=row[1], reason=unescaped(row[2]), source=row[3]) for row in rows
    }


async def find_chat(connection: Connection, chat_key: str) -> ChatInfo | None:
    """Return a chat; None if it is new."""
    row = (
        await connection.exec_driver_sql(
            "SELECT chat_key, container_key, adapter_key, channel_id, channel_name, channel_type, created_at"  # noqa: S608
            f" FROM chats WHERE chat_key = {_marks(connection, 1)}",
            (escaped(chat_key),),
        )
    ).first()
    if row is None:
        return None
    texts = [None if value is None else unescaped(value) for value in row[:6]]
    return ChatInfo(
        chat_key=chat_key,
        container_key=str(texts[1]),
        adapter_key=texts[2],
        channel_id=texts[3],
        channel_name=texts[4],
        channel_type=texts[5],
        created_at=time_of(row[6]),
    )


def _marks(connection: Connection, count: int) -> str:
    return ", ".join(["?" if connection.is_sqlite else "%s"] * count)


def time_of(value: str | datetime) -> datetime:
    """Return a time as a driver returns it, without SQLAlchemy, in UTC."""
    if isinstance(value, str):  # SQLite
        return datetime.fromisoformat(value).replace(tzinfo=UTC)
    return value.astimezone(UTC)
