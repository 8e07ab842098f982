"""Hosts with disks of their own, which share a database and a store."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path

from broker_config.settings import DatabaseSettings
from storage.engine import Database
from storage.files.cache import FileCache
from storage.files.contents import ContentStore
from storage.files.local_area import LocalArea
from storage.files.local_state import LocalState
from storage.files.stores.store import ObjectStore

AREA = "shared/box"


class Host:
    """A host with a cache and directories of areas."""

    def __init__(
        self,
        root: Path,
        database: Database,
        store: ObjectStore,
        *,
        cache_bytes: int = 1 << 30,
        in_use: timedelta = timedelta(0),
    ) -> None:
        self.root = root
        self.database = database
        self.cache = FileCache(root / "files-cache", max_bytes=cache_bytes, in_use=in_use)
        self.contents = ContentStore(database, store, self.cache)

    def area(self, name: str = AREA) -> LocalArea:
        """A new object for the host's directory of an area, as after a restart."""
        return LocalArea(
            self.database,
            self.contents,
            name=name,
            directory=self.directory(name),
            state=LocalState(self.root / "states" / f"{name.replace('/', '-')}.json"),
        )

    def directory(self, name: str = AREA) -> Path:
        return self.root / "areas" / name

    def write(self, path: str, text: str, name: str = AREA) -> Path:
        """Write a file as a program in a sandbox does: in place."""
        file = self.directory(name) / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return file

    def files(self, name: str = AREA) -> dict[str, str]:
        """The texts of all files by their paths."""
        root = self.directory(name)
        paths = (path for path in root.rglob("*") if path.is_file())
        return {str(path.relative_to(root)): path.read_text() for path in paths}


@asynccontextmanager
async def opened(settings: DatabaseSettings, directory: Path) -> AsyncIterator[Database]:
    database = Database(settings, directory)
    try:
        yield database
    finally:
        await database.dispose()
