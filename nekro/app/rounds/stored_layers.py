"""Package layers of sandboxes on hosts that share no disk: one archive per layer in the files' store.

The area ``layers/<platform>/built/<requirement>`` has the record of a requirement and the archive of its
layer; ``layers/<platform>/chosen/<container>`` has the archives of the layers that a chat's sandboxes mount.
A host that lacks a layer unpacks the archive instead of building it. The layer's name is the digest of its
files, which is computed again.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
import sysconfig
import tempfile
from dataclasses import asdict
from typing import Final

from loguru import logger

from nekro.app.background import BackgroundLoop
from nekro.sandbox.packages.archives import extract, pack
from nekro.sandbox.packages.layers import Built, LayerPublisher, Requirement, built_of
from nekro_agent.errors import DamagedFileError, PackageInstallError
from nekro_agent.files.private_files import make_directory
from storage.engine import Database
from storage.files.cache import CachedContent
from storage.files.content_rows import Content
from storage.files.host_files import HostFiles
from storage.files.manifest import Entry

__all__ = ["StoredLayers"]

_RECORD: Final = "built.json"
_ARCHIVE: Final = ".tar"
_MOST_BYTES: Final = 1 << 30


class StoredLayers:
    """Implements ``nekro.sandbox.packages.layers.FleetLayers``."""

    def __init__(
        self, database: Database, files: HostFiles, background: BackgroundLoop, publisher: LayerPublisher
    ) -> None:
        self._database = database
        self._contents = files.contents
        self._background = background
        self._publisher = publisher
        self._area = f"layers/{sys.implementation.cache_tag}-{sysconfig.get_platform()}"

    async def bring(self, container_key: str) -> None:
        """Give this host the layers that the container's sandboxes mount."""
        await self._background.wait(self._bring(container_key))

    async def find(self, requirement: Requirement) -> Built | None:
        """Give this host the layer of a requirement, if another host has built it."""
        return await self._background.wait(self._find(requirement))

    async def keep(self, requirement: Requirement, built: Built) -> None:
        """Store the layer of a requirement that this host has built."""
        await self._background.wait(self._keep(requirement, built))

    async def choose(self, container_key: str, digest: str) -> None:
        """Let all hosts know that the container's sandboxes mount a layer that this host has."""
        await self._background.wait(self._choose(container_key, digest))

    async def _bring(self, container_key: str) -> None:
        entries = sorted(await self._entries(self._chosen(container_key)), key=lambda entry: entry.path)
        digests = [entry.path.partition("-")[2].removesuffix(_ARCHIVE) for entry in entries]
        for entry, digest in zip(entries, digests, strict=True):
            await self._unpack(entry, digest)
        if digests and tuple(digests) != await asyncio.to_thread(self._publisher.chosen, container_key):
            await asyncio.to_thread(self._publisher.set_chosen, container_key, digests)

    async def _find(self, requirement: Requirement) -> Built | None:
        entries = {entry.path: entry for entry in await self._entries(self._built(requirement))}
        record = entries.get(_RECORD)
        if record is None:
            return None
        try:
            data = await self._contents.read_part(_content_of(record), name=f"{requirement}/{_RECORD}")
        except DamagedFileError as exc:
            logger.bind(error=str(exc)).warning("sandbox_layer_damaged")
            return None
        built = built_of(json.loads(data))
        archive = entries.get(f"{built.digest}{_ARCHIVE}")
        if archive is None or not await self._unpack(archive, built.digest):
            return None
        await asyncio.to_thread(self._publisher.record, requirement, built)
        return built

    async def _keep(self, requirement: Requirement, built: Built) -> None:
        archive = await self._archive(built.digest)
        record = await self._contents.put_bytes(json.dumps(asdict(built)).encode())
        put = [_entry(f"{built.digest}{_ARCHIVE}", archive), _entry(_RECORD, record)]
        area = self._built(requirement)
        removed = {entry.path for entry in await self._entries(area)} - {entry.path for entry in put}
        async with self._database.begin() as tx:
            await tx.files.commit(area, put=put, removed=removed)

    async def _choose(self, container_key: str, digest: str) -> None:
        area = self._chosen(container_key)
        entries = await self._entries(area)
        if any(entry.path.endswith(f"-{digest}{_ARCHIVE}") for entry in entries):
            return
        archive = await self._archive(digest)
        put = [_entry(f"{len(entries):02}-{digest}{_ARCHIVE}", archive)]
        async with self._database.begin() as tx:
            await tx.files.commit(area, put=put)

    async def _archive(self, digest: str) -> Content:
        cached = await asyncio.to_thread(self._packed, digest)
        return (await self._contents.put([cached]))[cached.sha256]

    def _packed(self, digest: str) -> CachedContent:
        with tempfile.TemporaryFile(dir=self._publisher.root) as file:
            pack(self._publisher.path(digest), file)
            file.seek(0)
            return self._contents.cache.add(file)

    async def _unpack(self, entry: Entry, digest: str) -> bool:
        """Make a layer of an archive; False if the store lost or altered it."""
        if self._publisher.path(digest).is_dir():
            return True
        try:
            content = _content_of(entry)
            cached = await self._contents.fetch(
                content.id, content.sha256, content.bytes, name=f"layers/{entry.path}"
            )
            await asyncio.to_thread(self._adopt, cached, digest)
        except (DamagedFileError, PackageInstallError) as exc:
            # The code that needs the package asks for it again, and it is built.
            logger.bind(digest=digest, error=str(exc)).warning("sandbox_layer_damaged")
            return False
        return True

    def _adopt(self, cached: CachedContent, digest: str) -> None:
        work = self._publisher.new_work_dir()
        make_directory(work, passable=True)
        try:
            extract(cached.path, work)
            self._publisher.adopt(work, digest, most_bytes=_MOST_BYTES)
        finally:
            shutil.rmtree(work, ignore_errors=True)

    async def _entries(self, name: str) -> list[Entry]:
        async with self._database.read() as tx:
            area = await tx.files.find(name)
            return [] if area is None else await tx.files.entries(area)

    def _built(self, requirement: Requirement) -> str:
        return f"{self._area}/built/{self._publisher.record_name(requirement)}"

    def _chosen(self, container_key: str) -> str:
        return f"{self._area}/chosen/{self._publisher.chosen_name(container_key)}"


def _content_of(entry: Entry) -> Content:
    if entry.content_id is None:
        raise DamagedFileError(name=entry.path, sha256="", found="a directory")
    return Content(id=entry.content_id, sha256=entry.sha256, bytes=entry.bytes, is_stored=True)


def _entry(path: str, content: Content) -> Entry:
    return Entry(path=path, content_id=content.id, sha256=content.sha256, bytes=content.bytes)
