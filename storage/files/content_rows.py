"""Rows of contents: which bytes the store has, or is about to have."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from sqlalchemy import BigInteger, Boolean

from storage.files.given import MOST_ROWS, chunks, fixed, rows_of
from storage.files.stores.store import PART_BYTES
from storage.repositories.base import Repository
from storage.sql import FaithfulText

__all__ = ["Content", "ContentRepository", "Totals", "key_of"]


@dataclass(frozen=True, kw_only=True)
class Content:
    """Bytes that the store has or is to have."""

    #: Never used again for another content.
    id: int
    sha256: str
    bytes: int
    is_stored: bool

    @property
    def key(self) -> str:
        """Key of its object; a content that is larger than an object has none."""
        return key_of(self.sha256, self.id)


@dataclass(frozen=True, kw_only=True)
class Totals:
    """What the store has."""

    areas: int
    #: Files and directories of the newest versions, and the bytes of the files.
    names: int
    bytes: int
    contents: int
    stored_bytes: int


def key_of(sha256: str, content_id: int) -> str:
    """Return the key of the object of a content."""
    return f"{sha256}.{content_id}"


_CONTENT: Final = {
    "id": BigInteger(),
    "sha256": FaithfulText(),
    "bytes": BigInteger(),
    "is_stored": Boolean(),
}
_ANNOUNCE = fixed(
    """
INSERT INTO file_contents (sha256, bytes, is_stored, used_at)
SELECT sha256, bytes, false, {now} FROM {given} WHERE true
ON CONFLICT (sha256) DO UPDATE SET used_at = {now}
RETURNING id, sha256, bytes, is_stored
""",
    returns=_CONTENT,
    sha256="text",
    bytes="bigint",
)
_TOTALS = fixed(
    """
SELECT (SELECT count(*) FROM file_areas WHERE name <> 'installation') AS areas,
       (SELECT CAST(coalesce(sum(names), 0) AS bigint) FROM file_areas WHERE name <> 'installation') AS names,
       (SELECT CAST(coalesce(sum(bytes), 0) AS bigint) FROM file_areas) AS bytes,
       count(*) AS contents,
       CAST(coalesce(sum(bytes), 0) AS bigint) AS stored_bytes
FROM file_contents WHERE is_stored AND bytes <= {most_bytes}
""".replace("{most_bytes}", str(PART_BYTES)),
    returns={name: BigInteger() for name in ("areas", "names", "bytes", "contents", "stored_bytes")},
)
_MARK_STORED = fixed(
    """
UPDATE file_contents SET is_stored = true, media_type = given.media_type FROM {given}
WHERE file_contents.id = given.id
""",
    id="bigint",
    media_type="text",
)
#: A file begins as its first part does.
_MARK_JOINED = fixed(
    """
UPDATE file_contents SET
    is_stored = true, media_type = (SELECT media_type FROM file_contents WHERE id = :first)
WHERE id = :of_content AND NOT is_stored
RETURNING id
""",
    returns={"id": BigInteger()},
)
_FORGET_PARTS = fixed("DELETE FROM file_parts WHERE content_id = :of_content")
_MARK_LOST = fixed(
    """
UPDATE file_contents SET is_stored = false WHERE id IN (
    SELECT id FROM {given}
    UNION ALL
    SELECT p.content_id FROM {given} {join} file_parts p ON p.part_id = given.id
)
""",
    id="bigint",
)
_ADD_PARTS = fixed(
    """
INSERT INTO file_parts (content_id, number, part_id)
SELECT content_id, number, part_id FROM {given}
""",
    content_id="bigint",
    number="bigint",
    part_id="bigint",
)
_PARTS = fixed(
    """
SELECT c.id, c.sha256, c.bytes, c.is_stored FROM file_parts p JOIN file_contents c ON c.id = p.part_id
WHERE p.content_id = :of_content ORDER BY p.number
""",
    returns=_CONTENT,
)
#: Rows that a commit has locked by a foreign key are left for the next time.
_DELETE_UNUSED = """
DELETE FROM file_contents WHERE id IN (
    SELECT c.id FROM file_contents c
    WHERE c.used_at < {before}
        AND NOT EXISTS (SELECT 1 FROM file_entries e WHERE e.content_id = c.id)
        AND NOT EXISTS (SELECT 1 FROM file_parts p WHERE p.part_id = c.id)
    LIMIT :most {lock}
)
RETURNING id, sha256, bytes, is_stored
"""
_FIND = fixed(
    "SELECT id, sha256, bytes, is_stored FROM file_contents WHERE sha256 = :of_sha256", returns=_CONTENT
)
_KNOWN = fixed(
    "SELECT c.id, c.sha256 FROM {given} {join} file_contents c ON c.id = given.id",
    returns={"id": BigInteger(), "sha256": FaithfulText()},
    id="bigint",
)
_PAGE = fixed(
    """
SELECT c.id, c.sha256, c.bytes, c.is_stored FROM file_contents c
WHERE c.id > :after AND (
    c.is_stored
    OR EXISTS (SELECT 1 FROM file_entries e WHERE e.content_id = c.id)
    OR EXISTS (
        SELECT 1 FROM file_parts p JOIN file_entries e ON e.content_id = p.content_id WHERE p.part_id = c.id
    )
)
ORDER BY c.id LIMIT :most
""",
    returns=_CONTENT,
)
#: The databases' own counters, as the newest rows may have been deleted.
_HIGHEST = {
    "sqlite": "SELECT coalesce(max(seq), 0) AS highest FROM sqlite_sequence WHERE name = 'file_contents'",
    "postgresql": """
SELECT coalesce(
    pg_sequence_last_value(CAST(pg_get_serial_sequence('file_contents', 'id') AS regclass)), 0
) AS highest
""",
}


class ContentRepository(Repository):
    """Rows of contents and of their parts."""

    async def announce(self, sizes: Mapping[str, int]) -> dict[str, Content]:
        """Return the contents with these SHA-256, and keep a collection from them for its grace time.

        Those without a row get one; upload what is not stored.
        """
        found: dict[str, Content] = {}
        # In one order, so that two writers do not wait for each other's rows.
        for some in chunks(sorted(sizes.items())):
            rows = await self._all(Content, _ANNOUNCE, {"rows": rows_of(some)})
            found |= {content.sha256: content for content in rows}
        return found

    async def find(self, sha256: str) -> Content | None:
        """Return the row of a content, or None."""
        return await self._one_or_none(Content, _FIND, {"of_sha256": sha256})

    async def mark_stored(self, media_types: Mapping[int, str | None]) -> None:
        """Record that the store has contents.

        Args:
            media_types: ``nekro_agent.files.names.told_type`` of their first bytes, by their ids.
        """
        for some in chunks(sorted(media_types.items())):
            await self._rows(_MARK_STORED, {"rows": rows_of(some)})

    async def mark_lost(self, content_ids: Iterable[int]) -> None:
        """Record that the store lacks contents, and with them those that they are parts of."""
        for some in chunks(sorted(content_ids)):
            await self._rows(_MARK_LOST, {"rows": rows_of([[one] for one in some])})

    async def add_parts(self, content_id: int, part_ids: Sequence[int]) -> None:
        """Record the parts of a content, in order; the store has all of them.

        Writers may divide a content differently. The first one decides; if the content was lost since, the
        parts that it had are forgotten.
        """
        if await self._scalar(_MARK_JOINED, {"of_content": content_id, "first": part_ids[0]}) is None:
            return
        await self._rows(_FORGET_PARTS, {"of_content": content_id})
        rows = [[content_id, number, part_id] for number, part_id in enumerate(part_ids)]
        for some in chunks(rows):
            await self._rows(_ADD_PARTS, {"rows": rows_of(some)})

    async def parts(self, content_id: int) -> list[Content]:
        """List the parts of a content, in order; none if it is one object."""
        return await self._all(Content, _PARTS, {"of_content": content_id})

    async def delete_unused(self, *, grace_seconds: float, limit: int = MOST_ROWS) -> list[Content]:
        """Delete the rows of contents that nothing has, and that no host announced in the grace time."""
        values = {"seconds": float(grace_seconds), "most": limit}
        return await self._all(Content, _DELETE[self._dialect], values)

    async def known(self, content_ids: Collection[int]) -> dict[int, str]:
        """Return the SHA-256 of those that have a row."""
        found: dict[int, str] = {}
        for some in chunks([*content_ids]):
            found |= {
                row[0]: row[1] for row in await self._rows(_KNOWN, {"rows": rows_of([[n] for n in some])})
            }
        return found

    async def needed(self, *, after: int, limit: int = MOST_ROWS) -> list[Content]:
        """List contents that are stored, or that a file needs although they are lost; by id, after one."""
        return await self._all(Content, _PAGE, {"after": after, "most": limit})

    async def totals(self) -> Totals:
        """Count areas, files and directories in them, and stored contents; reads all rows of contents."""
        return (await self._all(Totals, _TOTALS))[0]

    async def highest_id(self) -> int:
        """Return the highest id that a row ever had; 0 if there was none."""
        rows = await self._connection.exec_driver_sql(_HIGHEST[self._dialect])
        return int(rows.scalar_one())


_DELETE = {
    dialect: fixed(_DELETE_UNUSED.replace("{lock}", lock), returns=_CONTENT)
    for dialect, lock in {"sqlite": "", "postgresql": "FOR UPDATE SKIP LOCKED"}.items()
}
