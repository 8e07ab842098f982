"""Ends files of uploads that are old, and those of shared areas that are idle.

An area changes by one version, as by a commit. Hosts that have its directory bring that at their next use,
and keep what was changed there meanwhile.
"""

from __future__ import annotations

from typing import Final

from sqlalchemy import BigInteger

from storage.engine import Database
from storage.files.given import fixed
from storage.sql import FaithfulText

__all__ = ["empty_idle_areas", "end_old_uploads"]

#: Files, and directories that hold nothing.
_OLD: Final = """
e.until IS NULL AND e.added_at < {before} AND (e.content_id IS NOT NULL OR NOT EXISTS (
    SELECT 1 FROM file_entries c WHERE c.area_id = e.area_id AND c.parent = e.folded AND c.until IS NULL
))
"""
_WITH_OLD = fixed(
    f"""
SELECT DISTINCT a.id FROM file_areas a {{join}} file_entries e ON e.area_id = a.id
WHERE substr(a.name, 1, 8) = 'uploads/' AND {_OLD} LIMIT :most
""",  # noqa: S608
    returns={"id": BigInteger()},
)
#: A program of the chat goes on later, and needs the files then (``ParkedProgramRepository.sandboxes``).
_GOES_ON: Final = """
EXISTS (SELECT 1 FROM parked_programs p WHERE p.chat_key = c.chat_key AND p.until IS NOT NULL)
OR EXISTS (
    SELECT 1 FROM parked_programs p JOIN calls k ON k.id = p.call_id
    WHERE p.chat_key = c.chat_key AND k.state IN ('queued', 'running')
)
OR EXISTS (SELECT 1 FROM rounds r WHERE r.chat_key = c.chat_key AND r.state IN ('requested', 'running'))
"""
_IDLE = fixed(
    f"""
SELECT a.id, c.chat_key FROM file_areas a LEFT JOIN chats c ON c.container_key = substr(a.name, 8)
WHERE substr(a.name, 1, 7) = 'shared/' AND a.names > 0 AND a.changed_at < {{before}}
    AND (c.lease_until IS NULL OR c.lease_until <= {{now}}) AND NOT ({_GOES_ON})
LIMIT :most
""",  # noqa: S608
    returns={"id": BigInteger(), "chat_key": FaithfulText()},
)
_NEXT = fixed(
    "UPDATE file_areas SET version = version + 1, changed_at = {now} WHERE id = :of_area RETURNING version",
    returns={"version": BigInteger()},
)
_NEXT_IF_IDLE = fixed(
    f"""
UPDATE file_areas SET version = version + 1, changed_at = {{now}}
WHERE id = :of_area AND changed_at < {{before}} AND NOT EXISTS (
    SELECT 1 FROM chats c
    WHERE c.container_key = substr(file_areas.name, 8) AND (c.lease_until > {{now}} OR {_GOES_ON})
)
RETURNING version
""",  # noqa: S608
    returns={"version": BigInteger()},
)
_END_OLD = fixed(
    f"""
UPDATE file_entries AS e SET until = :at_version, ended_at = {{now}} WHERE e.area_id = :of_area AND {_OLD}
"""  # noqa: S608
)
_END_ALL = fixed(
    """
UPDATE file_entries SET until = :at_version, ended_at = {now} WHERE area_id = :of_area AND until IS NULL
"""
)
_COUNT = fixed(
    """
UPDATE file_areas SET
    names = (SELECT count(*) FROM file_entries e WHERE e.area_id = file_areas.id AND e.until IS NULL),
    bytes = (
        SELECT coalesce(sum(c.bytes), 0) FROM file_entries e JOIN file_contents c ON c.id = e.content_id
        WHERE e.area_id = file_areas.id AND e.until IS NULL
    )
WHERE id = :of_area
"""
)


async def end_old_uploads(database: Database, *, seconds: float, limit: int) -> int:
    """End what the uploads of chats have had for a time without a change or use; returns in how many chats.

    Args:
        limit: most chats; the result is as much if there may be more.
    """
    async with database.read() as tx:
        rows = await tx.connection.execute(_WITH_OLD, {"seconds": float(seconds), "most": limit})
        area_ids = [row[0] for row in rows]
    for area_id in area_ids:
        async with database.begin() as tx:
            version = (await tx.connection.execute(_NEXT, {"of_area": area_id})).scalar()
            # It compares times again: a file may be used again meanwhile.
            values = {"of_area": area_id, "at_version": version, "seconds": float(seconds)}
            await tx.connection.execute(_END_OLD, values)
            await tx.connection.execute(_COUNT, {"of_area": area_id})
    return len(area_ids)


async def empty_idle_areas(database: Database, *, seconds: float, limit: int) -> int:
    """Empty shared areas that nothing has used for a time; returns how many.

    The area of a chat whose lease is held, or whose program goes on later, is not idle.
    """
    async with database.read() as tx:
        found = [*await tx.connection.execute(_IDLE, {"seconds": float(seconds), "most": limit})]
    return sum([await _empty(database, area_id, chat_key, float(seconds)) for area_id, chat_key in found])


async def _empty(database: Database, area_id: int, chat_key: str | None, seconds: float) -> bool:
    async with database.begin() as tx:
        if chat_key is not None:
            await tx.chats.lock(chat_key)  # no round begins until the end
        values = {"of_area": area_id, "seconds": seconds}
        version = (await tx.connection.execute(_NEXT_IF_IDLE, values)).scalar()
        if version is None:
            return False
        await tx.connection.execute(_END_ALL, {"of_area": area_id, "at_version": version})
        await tx.connection.execute(_COUNT, {"of_area": area_id})
        return True
