"""The manifest: which area has which content at which path, by version.

A change of an area is one transaction. It locks the area's row, so changes of an area follow each other, and
its statements are bounded: a few, and five for each 5,000 paths.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import BigInteger, Boolean, Integer

from nekro_agent.errors import ConflictError, FilesQuotaError, InvalidValueError, NotFoundError
from storage.driver.values import Row
from storage.files.given import chunks, fixed, rows_of
from storage.files.paths import checked_path, collision, folded_path, parents_of, refuse_collisions
from storage.repositories.base import Repository
from storage.repositories.chats import ChatRepository
from storage.repositories.leases import LeaseRepository
from storage.sql import FaithfulText

__all__ = [
    "UNLIMITED",
    "Area",
    "AreaLimits",
    "Entry",
    "LeaseWriter",
    "ManifestRepository",
    "Writer",
    "require_room",
]


@dataclass(frozen=True, kw_only=True)
class Area:
    """An area at its newest version."""

    id: int
    name: str
    #: Grows by 1 with each change.
    version: int
    #: Files and directories.
    names: int
    #: Of the files.
    bytes: int


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A file or directory of an area."""

    path: str
    #: Row of its content; None: a directory.
    content_id: int | None = None
    #: "" for a directory.
    sha256: str = ""
    bytes: int = 0
    is_executable: bool = False
    modified_ns: int = 0


@dataclass(frozen=True, kw_only=True)
class AreaLimits:
    """What an area may hold; 0: any number."""

    bytes: int = 0
    names: int = 0
    #: That limits the bytes.
    setting: str = ""


UNLIMITED: Final = AreaLimits()


@dataclass(frozen=True, kw_only=True)
class Writer:
    """The holder of a chat's lease, which a change requires."""

    chat_key: str
    fence: int


@dataclass(frozen=True, kw_only=True)
class LeaseWriter:
    """The holder of a named lease, which a change requires."""

    lease: str
    fence: int


_AREA: Final = {"id": Integer(), "name": FaithfulText(), "version": BigInteger(), "names": BigInteger(),
                "bytes": BigInteger()}  # fmt: skip
_FIND = fixed("SELECT id, name, version, names, bytes FROM file_areas WHERE name = :of_name", returns=_AREA)
_LOCK = fixed(
    """
INSERT INTO file_areas (name, version, names, bytes, changed_at) VALUES (:of_name, 1, 0, 0, {now})
ON CONFLICT (name) DO UPDATE SET version = file_areas.version + 1, changed_at = {now}
RETURNING id, name, version, names, bytes
""",
    returns=_AREA,
)
_SET_SUMS = fixed("UPDATE file_areas SET names = :new_names, bytes = :new_bytes WHERE id = :of_area")

_ENTRY: Final = {"path": FaithfulText(), "content_id": BigInteger(), "sha256": FaithfulText(),
                 "bytes": BigInteger(), "is_executable": Boolean(), "modified_ns": BigInteger()}  # fmt: skip
_ENTRIES = fixed(
    """
SELECT e.path, e.content_id, coalesce(c.sha256, '') AS sha256, coalesce(c.bytes, 0) AS bytes,
    e.is_executable, e.modified_ns
FROM file_entries e LEFT JOIN file_contents c ON c.id = e.content_id
WHERE e.area_id = :of_area AND e.since <= :at_version AND (e.until IS NULL OR e.until > :at_version)
""",
    returns=_ENTRY,
)
_CHANGED = fixed(
    """
SELECT e.path, e.content_id, coalesce(c.sha256, '') AS sha256, coalesce(c.bytes, 0) AS bytes,
    e.is_executable, e.modified_ns, e.until IS NULL OR e.until > :at_version AS is_present
FROM file_entries e LEFT JOIN file_contents c ON c.id = e.content_id
WHERE e.area_id = :of_area AND (
    e.since > :known_version AND e.since <= :at_version
    OR e.until > :known_version AND e.until <= :at_version
)
""",
    returns={**_ENTRY, "is_present": Boolean()},
)
_PRESENT = fixed(
    """
SELECT e.folded, e.path, e.content_id, coalesce(c.bytes, 0) AS bytes, e.is_executable, e.modified_ns, e.since
FROM {given} {join} file_entries e ON e.folded = given.folded LEFT JOIN file_contents c ON c.id = e.content_id
WHERE e.area_id = :of_area AND e.until IS NULL
""",
    returns={
        "folded": FaithfulText(),
        "path": FaithfulText(),
        "content_id": BigInteger(),
        "bytes": BigInteger(),
        "is_executable": Boolean(),
        "modified_ns": BigInteger(),
        "since": BigInteger(),
    },
    folded="text",
)
_FOUND = fixed(
    """
SELECT e.path, e.content_id, coalesce(c.sha256, '') AS sha256, coalesce(c.bytes, 0) AS bytes,
    e.is_executable, e.modified_ns, e.folded
FROM {given} {join} file_entries e ON e.folded = given.folded LEFT JOIN file_contents c ON c.id = e.content_id
WHERE e.area_id = :of_area AND e.until IS NULL
""",
    returns={**_ENTRY, "folded": FaithfulText()},
    folded="text",
)
_MEDIA_TYPES = fixed(
    """
SELECT given.folded, c.media_type
FROM file_areas a {join} {given} {join} file_entries e ON e.area_id = a.id AND e.folded = given.folded
    {join} file_contents c ON c.id = e.content_id
WHERE a.name = :of_name AND e.until IS NULL
""",
    returns={"folded": FaithfulText(), "media_type": FaithfulText()},
    folded="text",
)
_TOUCH = fixed(
    """
UPDATE file_entries SET added_at = {now}
WHERE area_id = :of_area AND until IS NULL AND folded IN (SELECT folded FROM {given})
""",
    folded="text",
)
_TOUCH_AREA = fixed(
    "UPDATE file_areas SET changed_at = {now} WHERE name = :of_name RETURNING id",
    returns={"id": BigInteger()},
)
_IS_UNUSED = fixed(
    "SELECT changed_at < {before} AS is_unused FROM file_areas WHERE name = :of_name",
    returns={"is_unused": Boolean()},
)
_END = fixed(
    """
UPDATE file_entries SET until = :at_version, ended_at = {now}
WHERE area_id = :of_area AND until IS NULL AND folded IN (SELECT folded FROM {given})
""",
    folded="text",
)
_ADD = fixed(
    """
INSERT INTO file_entries
    (area_id, folded, since, path, parent, content_id, is_executable, modified_ns, added_at)
SELECT :of_area, folded, :at_version, path, parent, content_id, is_executable, modified_ns, {now} FROM {given}
""",
    folded="text",
    path="text",
    parent="text",
    content_id="bigint",
    is_executable="boolean",
    modified_ns="bigint",
)
_COUNT_STORED = fixed(
    "SELECT count(*) AS stored FROM {given} {join} file_contents c ON c.id = given.id WHERE c.is_stored",
    returns={"stored": BigInteger()},
    id="bigint",
)
_ORPHANS = fixed(
    """
SELECT e.path FROM {given} {join} file_entries e ON e.parent = given.folded
WHERE e.area_id = :of_area AND e.until IS NULL AND NOT EXISTS (
    SELECT 1 FROM file_entries d
    WHERE d.area_id = e.area_id AND d.folded = e.parent AND d.until IS NULL AND d.content_id IS NULL
)
LIMIT 1
""",
    returns={"path": FaithfulText()},
    folded="text",
)
_USERS = fixed(
    """
SELECT DISTINCT c.sha256, a.name, e.path
FROM (
    SELECT id, id AS whole_id FROM {given}
    UNION ALL
    SELECT given.id, p.content_id AS whole_id FROM {given} {join} file_parts p ON p.part_id = given.id
) AS used {join} file_contents c ON c.id = used.id {join} file_entries e ON e.content_id = used.whole_id
{join} file_areas a ON a.id = e.area_id
""",
    returns={"sha256": FaithfulText(), "name": FaithfulText(), "path": FaithfulText()},
    id="bigint",
)


class ManifestRepository(Repository):
    """Rows of areas and entries."""

    async def find(self, name: str) -> Area | None:
        """Return an area, or None if nothing was ever stored in it."""
        return await self._one_or_none(Area, _FIND, {"of_name": name})

    async def entries(self, area: Area, *, version: int | None = None) -> list[Entry]:
        """List what an area has, in no particular order.

        Args:
            version: None: the one of ``area``. Retention deletes what older ones had.
        """
        at = area.version if version is None else version
        return await self._all(Entry, _ENTRIES, {"of_area": area.id, "at_version": at})

    async def present(self, area: Area, paths: Collection[str]) -> dict[str, Entry]:
        """Return what the newest version of an area has at paths, by folded path.

        An entry whose path differs in case or in the form of its letters is one of them.
        """
        found: dict[str, Entry] = {}
        for some in chunks(sorted({folded_path(path) for path in paths})):
            rows = rows_of([[one] for one in some])
            for row in await self._rows(_FOUND, {"of_area": area.id, "rows": rows}):
                found[row[6]] = _entry_of(row)
        return found

    async def media_types(self, name: str, paths: Collection[str]) -> dict[str, str | None]:
        """Return the media types that the first bytes of files tell, by path; None: they tell none.

        A path without a file is missing.
        """
        by_fold = {folded_path(path): path for path in paths}
        found: dict[str, str | None] = {}
        for some in chunks(sorted(by_fold)):
            values = {"of_name": name, "rows": rows_of([[one] for one in some])}
            found |= {by_fold[row[0]]: row[1] for row in await self._rows(_MEDIA_TYPES, values)}
        return found

    async def is_unused(self, name: str, *, seconds: float) -> bool:
        """Whether an area was neither changed nor touched for a time; False if it has nothing."""
        return bool(await self._scalar(_IS_UNUSED, {"of_name": name, "seconds": float(seconds)}))

    async def touch(self, name: str, paths: Collection[str] = ()) -> None:
        """Let retention count from now, for an area and for files of it.

        The area stays locked until the end of the transaction.
        """
        area_id = await self._scalar(_TOUCH_AREA, {"of_name": name})
        for some in chunks(sorted(map(folded_path, paths))):
            await self._rows(_TOUCH, {"of_area": area_id, "rows": rows_of([[one] for one in some])})

    async def changes(self, area: Area, *, since: int) -> tuple[list[Entry], list[str]]:
        """Return what an area has where it differs from an older version, and the paths that are gone."""
        values = {"of_area": area.id, "at_version": area.version, "known_version": since}
        present: dict[str, Entry] = {}
        touched: set[str] = set()
        for row in await self._rows(_CHANGED, values):
            touched.add(row[0])
            if row[6]:
                present[row[0]] = _entry_of(row)
        return [*present.values()], sorted(touched - present.keys())

    async def users_of(self, content_ids: Collection[int]) -> list[tuple[str, str, str]]:
        """List SHA-256, area and path of the files that have these contents or parts, in any version."""
        found: list[tuple[str, str, str]] = []
        for some in chunks(sorted(content_ids)):
            rows = await self._rows(_USERS, {"rows": rows_of([[one] for one in some])})
            found += [(row[0], row[1], row[2]) for row in rows]
        return found

    async def commit(
        self,
        name: str,
        *,
        put: Sequence[Entry] = (),
        removed: Collection[str] = (),
        writer: Writer | LeaseWriter | None = None,
        limits: AreaLimits = UNLIMITED,
        expected: Mapping[str, Entry | None] | None = None,
    ) -> Area:
        """Make the next version of an area; directories that ``put`` needs are added.

        Must run in a transaction, and last in it, as the area stays locked until its end.

        Args:
            put: their contents must be stored; ``sha256`` is not used.
            removed: paths; those that do not exist are ignored. A directory must be empty afterwards.
            expected: what the writer saw at each path that it changes, None for nothing; if it is not given,
                the change replaces any other.

        Raises:
            InvalidValueError: a path is not acceptable, two differ only in case, a directory of a path is a
                file, or a directory that is removed is not empty; it names the path.
            FencedError: the writer's lease has passed to another holder.
            ConflictError: a path is not as expected; it names the path and the version that changed it.
            NotFoundError: a content is not stored, or was deleted meanwhile; store it again.
            FilesQuotaError: the area would exceed its limits.
        """
        change = _Change(put, removed, expected)
        if isinstance(writer, LeaseWriter):
            await LeaseRepository(self._connection).hold(writer.lease, fence=writer.fence)
        elif writer is not None:
            await ChatRepository(self._connection).hold(writer.chat_key, fence=writer.fence)
        (area,) = await self._all(Area, _LOCK, {"of_name": name})
        for some in chunks(sorted(change.touched)):
            rows = await self._rows(_PRESENT, {"of_area": area.id, "rows": rows_of([[one] for one in some])})
            for row in rows:
                change.see(row)
        change.settle()
        at = {"of_area": area.id, "at_version": area.version}
        for some in chunks(sorted(change.ended)):
            await self._rows(_END, {**at, "rows": rows_of([[one] for one in some])})
        await self._require_stored({entry.content_id for entry in change.added.values()} - {None})
        for entries in chunks([*change.added.items()]):
            await self._rows(_ADD, {**at, "rows": rows_of([_values(*entry) for entry in entries])})
        for some in chunks(sorted(change.ended_directories)):
            values = {"of_area": area.id, "rows": rows_of([[one] for one in some])}
            if (left := await self._scalar(_ORPHANS, values)) is not None:
                if expected is not None:
                    raise ConflictError(f"{left!a} was added elsewhere to a directory that is removed here")
                raise InvalidValueError(f"{left!a} is left without its directory; remove it too")
        names, size = area.names + change.names, area.bytes + change.bytes
        require_room(name, limits, names=names, size=size, grows=(change.names, change.bytes))
        await self._rows(_SET_SUMS, {"of_area": area.id, "new_names": names, "new_bytes": size})
        return Area(id=area.id, name=name, version=area.version, names=names, bytes=size)

    async def _require_stored(self, content_ids: Collection[int | None]) -> None:
        for some in chunks([*content_ids]):
            rows = rows_of([[one] for one in some])
            if await self._scalar(_COUNT_STORED, {"rows": rows}) != len(some):
                raise NotFoundError("a content of this change is not in the store; store it again")


class _Change:
    """What a commit adds and ends, by folded path."""

    def __init__(
        self,
        put: Sequence[Entry],
        removed: Collection[str],
        expected: Mapping[str, Entry | None] | None = None,
    ) -> None:
        self._expected = expected
        entries = {checked_path(entry.path): entry for entry in put}
        parents = {parent for path in entries for parent in parents_of(path)} - entries.keys()
        self._put = refuse_collisions([*entries, *parents])
        #: Entries by folded path; directories that only others need are no entries of the caller.
        self._entries = {folded: entries.get(path) or Entry(path=path) for folded, path in self._put.items()}
        self._implied = {folded_path(parent) for parent in parents}
        for path in entries:
            for parent in parents_of(path):
                if self._entries[folded_path(parent)].content_id is not None:
                    raise InvalidValueError(f"{parent!a} is a file, so it cannot hold {path!a}")
        self._removed = {folded_path(checked_path(path)): path for path in removed if path not in entries}
        self._present: dict[str, Row] = {}
        self.added: dict[str, Entry] = {}
        self.ended: set[str] = set()
        self.ended_directories: set[str] = set()
        self.names = self.bytes = 0

    @property
    def touched(self) -> set[str]:
        return {*self._entries, *self._removed}

    def see(self, row: Row) -> None:
        """Take note of what the newest version has at a path that is touched."""
        self._present[row[0]] = row

    def _compare(self, expected: Mapping[str, Entry | None]) -> None:
        own = {folded: entry for folded, entry in self._entries.items() if folded not in self._implied}
        for folded, path in [*self._removed.items(), *((key, entry.path) for key, entry in own.items())]:
            row, seen, wanted = self._present.get(folded), expected.get(path), own.get(folded)
            if seen is None and row is not None:  # its name changed in case only
                seen = expected.get(row[1])
            if row is None:
                if seen is not None and wanted is not None and wanted.content_id is not None:
                    raise ConflictError(f"{path!a} was removed elsewhere and changed here")
            elif (seen is None or row[2] != seen.content_id) and (
                wanted is None or row[2] != wanted.content_id
            ):
                here = "changed" if wanted is not None else "removed"
                raise ConflictError(f"{path!a} was changed elsewhere in version {row[6]} and {here} here")

    def settle(self) -> None:
        """Decide what is ended and added."""
        if self._expected is not None:
            self._compare(self._expected)
        for folded, path in self._removed.items():
            row = self._present.get(folded)
            if row is not None and row[1] == path:
                self._end(row)
        for folded, entry in self._entries.items():
            row = self._present.get(folded)
            if row is not None and folded not in self.ended:
                if row[1] != entry.path:
                    raise collision(entry.path, row[1])
                if folded in self._implied and row[2] is not None:
                    raise InvalidValueError(f"{entry.path!a} is a file, so it cannot hold others")
                if _is_same(row, entry):
                    continue
                self._end(row)
            self.added[folded] = entry
            self.names += 1
            self.bytes += entry.bytes

    def _end(self, row: Row) -> None:
        self.ended.add(row[0])
        if row[2] is None:
            self.ended_directories.add(row[0])
        self.names -= 1
        self.bytes -= row[3]


def _entry_of(row: Row) -> Entry:
    return Entry(
        path=row[0],
        content_id=row[1],
        sha256=row[2],
        bytes=row[3],
        is_executable=bool(row[4]),
        modified_ns=row[5],
    )


def _is_same(row: Row, entry: Entry) -> bool:
    if entry.content_id is None:
        return row[2] is None
    return (row[2], bool(row[4]), row[5]) == (entry.content_id, entry.is_executable, entry.modified_ns)


def _values(folded: str, entry: Entry) -> list[Any]:
    parent = entry.path.rpartition("/")[0]
    return [
        folded,
        entry.path,
        folded_path(parent) if parent else "",
        entry.content_id,
        entry.is_executable,
        entry.modified_ns,
    ]


def require_room(area: str, limits: AreaLimits, *, names: int, size: int, grows: tuple[int, int]) -> None:
    """Refuse a change that grows an area beyond its limits; one that shrinks it is accepted in any case.

    Args:
        names, size: of the area after the change.
        grows: by how many names and bytes.

    Raises:
        FilesQuotaError: it is refused.
    """
    exceeds_bytes = limits.bytes and size > limits.bytes and grows[1] > 0
    exceeds_names = limits.names and names > limits.names and grows[0] > 0
    if exceeds_bytes or exceeds_names:
        raise FilesQuotaError(
            area=area,
            wanted_bytes=size,
            limit_bytes=limits.bytes,
            wanted_names=names,
            limit_names=limits.names,
            setting=limits.setting,
        )
