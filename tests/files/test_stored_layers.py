"""Package layers of sandboxes on hosts that share no disk."""

from __future__ import annotations

import io
import tarfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from hosts import opened

from broker_config.settings import DatabaseSettings
from nekro.app.background import BackgroundLoop
from nekro.app.rounds.stored_layers import StoredLayers
from nekro.sandbox.packages.layers import Built, LayerPublisher, parse_requirement
from storage.engine import Database
from storage.files.host_files import HostFiles
from storage.files.manifest import Entry
from storage.files.stores.opening import open_store

ALPHA = parse_requirement("alpha>=1")


class LayerHost:
    """A host with layers of its own."""

    def __init__(self, root: Path, database: Database, background: BackgroundLoop, store_url: str) -> None:
        self.root = root
        self.publisher = LayerPublisher(root / "layers")
        self.publisher.root.mkdir(parents=True)
        files = HostFiles(database, open_store(store_url), root=root / "files", cache_bytes=1 << 30)
        self.contents = files.contents
        self.layers = StoredLayers(database, files, background, self.publisher)

    def build(self) -> Built:
        source = self.root / "installed"
        for path, text in {"alpha/__init__.py": "VALUE = 1\n", "alpha/深.txt": "deep\n"}.items():
            file = source / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        info = source / "alpha-1.0.dist-info"
        info.mkdir()
        (info / "RECORD").write_text("alpha/__init__.py,,\n")
        return self.publisher.publish(source, ALPHA, version="1.0", wheels={"a.whl": "0"}, most_bytes=1 << 20)

    def files(self, built: Built) -> dict[str, tuple[bytes, int]]:
        root = self.publisher.path(built.digest)
        files = (path for path in root.rglob("*") if path.is_file())
        return {str(path.relative_to(root)): (path.read_bytes(), path.stat().st_mode) for path in files}


@pytest.fixture
async def database(
    migrated_copy: Callable[[str], DatabaseSettings], tmp_path: Path
) -> AsyncIterator[Database]:
    async with opened(migrated_copy("sqlite"), tmp_path) as database:
        yield database


@pytest.fixture
async def hosts(
    database: Database, store_url: str, tmp_path: Path
) -> AsyncIterator[tuple[LayerHost, LayerHost]]:
    background = BackgroundLoop(database)
    yield (
        LayerHost(tmp_path / "first", database, background, store_url),
        LayerHost(tmp_path / "second", database, background, store_url),
    )
    background.close()


async def test_a_host_unpacks_layers_that_another_one_has_built(hosts: tuple[LayerHost, LayerHost]) -> None:
    first, second = hosts
    built = first.build()
    assert await second.layers.find(ALPHA) is None
    await first.layers.keep(ALPHA, built)
    await first.layers.choose("box", built.digest)
    await first.layers.choose("box", built.digest)
    assert await second.layers.find(ALPHA) == built == second.publisher.find(ALPHA)
    assert first.files(built) == second.files(built)
    assert second.publisher.chosen("box") == ()
    await second.layers.bring("box")
    assert second.publisher.chosen("box") == (built.digest,)
    await second.layers.bring("other")
    assert second.publisher.chosen("other") == ()


@pytest.mark.parametrize("store_url", ["directory"], indirect=True)
async def test_a_chat_has_its_layers_on_a_host_that_has_none(hosts: tuple[LayerHost, LayerHost]) -> None:
    first, second = hosts
    built = first.build()
    await first.layers.choose("box", built.digest)
    await second.layers.bring("box")
    assert second.publisher.chosen("box") == (built.digest,)
    assert first.files(built) == second.files(built)


def archive_of(name: str, kind: bytes, data: bytes = b"") -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        info = tarfile.TarInfo(name)
        info.type, info.size, info.linkname = kind, len(data), "/etc/passwd"
        archive.addfile(info, io.BytesIO(data))
    return file.getvalue()


@pytest.mark.parametrize("store_url", ["directory"], indirect=True)
@pytest.mark.parametrize(
    ("name", "kind", "data"),
    [
        ("alpha.py", tarfile.REGTYPE, b"other"),
        ("alpha.py", tarfile.SYMTYPE, b""),
        ("alpha.py", tarfile.LNKTYPE, b""),
        ("../outside", tarfile.REGTYPE, b"x"),
        ("/outside", tarfile.REGTYPE, b"x"),
    ],
)
async def test_a_wrong_archive_makes_no_layer(
    name: str, kind: bytes, data: bytes, hosts: tuple[LayerHost, LayerHost], database: Database
) -> None:
    first, second = hosts
    built = first.build()
    await first.layers.choose("box", built.digest)
    content = await first.contents.put_bytes(archive_of(name, kind, data))
    async with database.begin() as tx:
        area = await tx.files.find(first.layers._chosen("box"))
        assert area is not None
        (entry,) = await tx.files.entries(area)
        await tx.files.commit(area.name, put=[Entry(path=entry.path, content_id=content.id, bytes=1)])
    await second.layers.bring("box")
    assert second.publisher.chosen("box") == ()
    assert not (second.root / "layers" / "outside").exists()
    assert [*(second.root / "layers" / "building").iterdir()] == []
