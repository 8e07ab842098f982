"""Packages that plugins import, on hosts that share no disk: one archive per layer in the files' store.

The area ``packages/<interpreter>/<name>`` has the archives of a package. A path there is
``<version>/<extras>/<seal>.tar``. Workers execute what is in an archive, so the seal shows that a process
with the fleet's signing key has stored it: who writes to the database and the store only cannot add one.

Plugins ask for packages when they are imported, before the process has services, and in a process that is
forked later. So each request has a loop and a connection of its own. It is made once per package and host.
"""

from __future__ import annotations

import asyncio
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from broker_config.embedded import resolve_signing_key
from broker_config.settings import Settings
from nekro.wire.seals import PACKAGE, Seal
from nekro_agent import layout
from nekro_agent.core.logger import get_sub_logger
from nekro_agent.errors import NekroError
from nekro_agent.files.private_files import make_directory
from nekro_agent.packages.layers import MANIFEST, Layer

if TYPE_CHECKING:
    from storage.engine import Database
    from storage.files.cache import CachedContent
    from storage.files.contents import ContentStore
    from storage.files.manifest import Entry

__all__ = ["StoredPackages"]

T = TypeVar("T")
_ARCHIVE: Final = ".tar"
_log = get_sub_logger("packages")


class StoredPackages:
    """Implements ``nekro_agent.packages.layers.FleetPackages``."""

    def __init__(self, settings: Settings) -> None:
        """``settings`` have every URL resolved."""
        self._settings = settings
        self._interpreter = f"{sys.implementation.cache_tag}-{sysconfig.get_platform()}"

    def bring(self, requirement: Requirement, directory: Path, *, seconds: float) -> bool:
        """Make a directory that has the files of a layer; False if no host has stored one that serves."""
        try:
            return self._answer(lambda *at: self._bring(requirement, directory, *at), seconds=seconds)
        except (NekroError, OSError, TimeoutError) as exc:
            _log.bind(requirement=str(requirement), error=str(exc)).warning("stored_package_not_used")
            return False

    def keep(self, layer: Layer, directory: Path, *, seconds: float) -> None:
        """Store a layer that this host has installed."""
        try:
            self._answer(lambda *at: self._keep(layer, directory, *at), seconds=seconds)
        except (NekroError, OSError, TimeoutError) as exc:
            # Other hosts install it themselves.
            _log.bind(package=layer.name, error=str(exc)).warning("package_not_stored")

    def _answer(
        self, work: Callable[[Database, ContentStore], Coroutine[Any, Any, T]], *, seconds: float
    ) -> T:
        from storage.engine import Database
        from storage.files.host_files import HostFiles
        from storage.files.stores.opening import open_store

        async def answer() -> T:
            settings = self._settings
            database = Database(settings.database, settings.data_dir)
            try:
                files = HostFiles(
                    database,
                    open_store(settings.files.url),
                    root=layout.files_dir(settings.data_dir),
                    cache_bytes=settings.files.cache_bytes,
                )
                return await asyncio.wait_for(work(database, files.contents), seconds)
            finally:
                await database.dispose()

        with ThreadPoolExecutor(1, "nekro-packages") as thread:
            return thread.submit(asyncio.run, answer()).result()

    async def _bring(
        self, requirement: Requirement, directory: Path, database: Database, contents: ContentStore
    ) -> bool:
        from nekro.sandbox.packages.archives import extract

        found = await self._entries(database, canonicalize_name(requirement.name))
        serving = [(Version(layer.version), entry) for layer, entry in found if layer.serves(requirement)]
        if not serving:
            return False
        _, entry = max(serving, key=lambda one: one[0])
        assert entry.content_id is not None  # noqa: S101 - _entries returns files only
        name = f"{self._area(requirement.name)}/{entry.path}"
        archive = await contents.fetch(entry.content_id, entry.sha256, entry.bytes, name=name)
        make_directory(directory)
        await asyncio.to_thread(extract, archive.path, directory)
        _log.bind(package=requirement.name, path=entry.path).info("package_brought")
        return True

    async def _keep(self, layer: Layer, directory: Path, database: Database, contents: ContentStore) -> None:
        from nekro.sandbox.packages.archives import pack
        from storage.files.manifest import Entry

        def packed() -> CachedContent:
            with tempfile.TemporaryFile(dir=directory.parent) as file:
                pack(directory, file, without=frozenset({MANIFEST}))
                file.seek(0)
                return contents.cache.add(file)

        cached = await asyncio.to_thread(packed)
        content = (await contents.put([cached]))[cached.sha256]
        place = f"{layer.version}/{'+'.join(sorted(layer.extras)) or '-'}"
        path = f"{place}/{self._seal().sign(self._sealed(layer, content.sha256))}{_ARCHIVE}"
        area = self._area(layer.name)
        async with database.begin() as tx:
            known = await tx.files.find(area)
            old = [] if known is None else await tx.files.entries(known)
            removed = {one.path for one in old if one.path.startswith(f"{place}/") and one.path != path}
            put = [Entry(path=path, content_id=content.id, sha256=content.sha256, bytes=content.bytes)]
            await tx.files.commit(area, put=put, removed=removed)
        _log.bind(package=layer.name, version=layer.version, bytes=content.bytes).info("package_stored")

    async def _entries(self, database: Database, name: str) -> list[tuple[Layer, Entry]]:
        """Return the archives of a package that a process of this fleet has stored."""
        async with database.read() as tx:
            area = await tx.files.find(self._area(name))
            entries = [] if area is None else await tx.files.entries(area)
        found = []
        for entry in entries:
            version, _, rest = entry.path.partition("/")
            extras, _, seal = rest.removesuffix(_ARCHIVE).partition("/")
            if entry.content_id is None or not seal:
                continue
            layer = Layer(
                site=Path(), name=name, version=version, extras=frozenset(extras.split("+")) - {"-"}
            )
            if self._seal().fits(self._sealed(layer, entry.sha256), seal):
                found.append((layer, entry))
            else:
                _log.bind(package=name, path=entry.path).warning("stored_package_seal_wrong")
        return found

    def _sealed(self, layer: Layer, sha256: str) -> list[str]:
        return [self._interpreter, layer.name, layer.version, "+".join(sorted(layer.extras)), sha256]

    def _seal(self) -> Seal:
        return Seal(resolve_signing_key(self._settings), purpose=PACKAGE)

    def _area(self, name: str) -> str:
        return f"packages/{self._interpreter}/{canonicalize_name(name)}"
