"""Deletes what no area has, and checks what the areas have.

A collection deletes rows first and their objects afterwards. An object whose row is gone can never be needed
again, because a new row of the same bytes has another id and so another key: no order of a collection and of
writers loses bytes. A collection that is killed in between leaves objects without rows, which the next one
finds in the listing; a listing that is out of date only delays that.

Each installation needs a store of its own: a collection would take the objects of another database for its
own whose rows are gone. So each one leaves its random name in the store, and where there is another name,
nothing is deleted.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Final

from nekro_agent.errors import DamagedFileError
from nekro_agent.tools.task_groups import run_together
from storage.engine import Database
from storage.files.content_rows import Content
from storage.files.contents import verified
from storage.files.given import MOST_ROWS
from storage.files.manifest import Entry
from storage.files.stores.store import PART_BYTES, ObjectStore, StoredObject

__all__ = ["GRACE", "Check", "Collected", "Damage", "check", "collect"]

#: How long a content that nothing has is kept for writers that have announced it.
GRACE: Final = timedelta(days=1)

#: Requests of a check at a time; each may hold an object in memory.
_REQUESTS: Final = 8
#: The area whose one path names the installation, and the begin of the keys of objects that have the names.
_INSTALLATION: Final = "installation"
_MOST_INSTALLATIONS: Final = 100
_KEY: Final = re.compile(r"([0-9a-f]{64})\.([1-9][0-9]{0,18})")


@dataclass(kw_only=True)
class Collected:
    """What a collection has done."""

    #: Rows of contents, and the bytes of their objects.
    contents: int = 0
    bytes: int = 0
    #: Objects whose row was gone.
    orphans: int = 0
    #: Objects with a higher id than any row ever had: of another database, or of this one before it was
    #: restored from an older backup. They are left.
    foreign: int = 0
    #: Whether another installation uses the store; then nothing is deleted.
    is_refused: bool = False


async def collect(database: Database, store: ObjectStore, *, grace: timedelta = GRACE) -> Collected:
    """Delete contents that nothing has and that no host announced within ``grace``.

    Raises:
        StorageUnavailableError: the store or the database did not answer; a repetition resumes.
    """
    done = Collected()
    if await _is_shared(database, store):
        done.is_refused = True
        return done
    while True:
        async with database.begin() as tx:
            deleted = await tx.contents.delete_unused(grace_seconds=grace.total_seconds())
        await store.delete([content.key for content in deleted if content.bytes <= PART_BYTES])
        done.contents += len(deleted)
        done.bytes += sum(content.bytes for content in deleted if content.bytes <= PART_BYTES)
        # Parts are unused only when the content that they are of is gone.
        if not deleted:
            break
    async for batch in store.list():
        await _delete_orphans(database, store, batch, grace, done)
    return done


async def _is_shared(database: Database, store: ObjectStore) -> bool:
    """Whether another installation uses the store; from now on, the others find this one there."""
    names = await _names(database)
    others = is_known = False
    for number in range(_MOST_INSTALLATIONS):
        key = f"{_INSTALLATION}.{number}"
        found = await store.get(key)
        if found is None and not is_known:
            await store.put(key, min(names))
            found = await store.get(key)  # another one may have been first
        if found is None:
            break
        is_known |= found in names
        others |= found not in names
    return others or not is_known


async def _names(database: Database) -> set[bytes]:
    """Return the name of this installation; several if two processes have chosen one at once."""
    async with database.read() as tx:
        area = await tx.files.find(_INSTALLATION)
        names = set() if area is None else {entry.path for entry in await tx.files.entries(area)}
    if not names:
        names = {secrets.token_hex(16)}
        async with database.begin() as tx:
            await tx.files.commit(_INSTALLATION, put=[Entry(path=name) for name in names])
    return {name.encode() for name in names}


async def _delete_orphans(
    database: Database,
    store: ObjectStore,
    batch: Collection[StoredObject],
    grace: timedelta,
    done: Collected,
) -> None:
    before = datetime.now(UTC) - grace
    found = {one.key: match for one in batch if (match := _KEY.fullmatch(one.key)) is not None}
    old = {one.key for one in batch if one.key in found and one.modified_at <= before}
    async with database.read() as tx:
        highest = await tx.contents.highest_id()
        known = await tx.contents.known([int(found[key][2]) for key in old])
    orphans = {key for key in old if known.get(int(found[key][2])) != found[key][1]}
    foreign = {key for key in orphans if int(found[key][2]) > highest}
    await store.delete(sorted(orphans - foreign))
    done.orphans += len(orphans - foreign)
    done.foreign += len(foreign)


@dataclass(frozen=True, kw_only=True)
class Damage:
    """A content that the store lacks or has altered."""

    sha256: str
    found: str
    #: Files that need it, each with its area.
    files: tuple[str, ...]


@dataclass(kw_only=True)
class Check:
    """The result of a check."""

    contents: int = 0
    damages: list[Damage] = field(default_factory=list)


async def check(
    database: Database, store: ObjectStore, *, reads: bool = False, repairs: bool = False
) -> Check:
    """Compare the rows of contents with the objects of the store.

    A content that was lost stays a damage until it is stored again, or no file needs it.

    Args:
        reads: read each object and compare its hash; otherwise only its size.
        repairs: delete altered objects, and let the next host that has such a content store it again. Files
            whose content is lost stay listed, and reading them is an error.
    """
    result = Check()
    async for contents in _needed(database):
        damaged = await _damaged(store, contents, reads=reads)
        result.contents += len(contents)
        result.damages += await _described(database, damaged)
        lost = [content for content, _ in damaged.values() if content.is_stored]
        if repairs and lost:
            await store.delete([content.key for content in lost])
            async with database.begin() as tx:
                await tx.contents.mark_lost([content.id for content in lost])
    return result


async def _needed(database: Database) -> AsyncIterator[list[Content]]:
    after = 0
    while True:
        async with database.read() as tx:
            contents = await tx.contents.needed(after=after, limit=MOST_ROWS)
        if not contents:
            return
        # Larger ones have no object; their parts are contents too.
        yield [content for content in contents if content.bytes <= PART_BYTES]
        after = contents[-1].id


async def _damaged(
    store: ObjectStore, contents: Sequence[Content], *, reads: bool
) -> dict[int, tuple[Content, str]]:
    damaged: dict[int, tuple[Content, str]] = {}
    waiting = iter(contents)

    async def compare_some() -> None:
        for content in waiting:
            fault = await _fault_of(store, content, reads=reads)
            if fault is not None:
                damaged[content.id] = content, fault

    await run_together(*(compare_some() for _ in range(_REQUESTS)))
    return dict(sorted(damaged.items()))


async def _fault_of(store: ObjectStore, content: Content, *, reads: bool) -> str | None:
    if not content.is_stored:
        return "it is lost; write the file again"
    if reads:
        try:
            verified(await store.get(content.key), content.sha256, name="")
        except DamagedFileError as exc:
            return exc.found
        return None
    size = await store.size(content.key)
    if size is None:
        return "the store has no such object"
    return None if size == content.bytes else f"{size} bytes instead of {content.bytes}"


async def _described(database: Database, damaged: dict[int, tuple[Content, str]]) -> list[Damage]:
    if not damaged:
        return []
    async with database.read() as tx:
        users = await tx.files.users_of(damaged)
    return [
        Damage(
            sha256=content.sha256,
            found=found,
            files=tuple(sorted(f"{area}/{path}" for sha256, area, path in users if sha256 == content.sha256)),
        )
        for content, found in damaged.values()
    ]
