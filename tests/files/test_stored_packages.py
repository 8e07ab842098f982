"""Packages that plugins import, on hosts that share no disk."""

from __future__ import annotations

import asyncio
import io
import os
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hosts import opened
from packaging.requirements import Requirement

from broker_config.settings import DatabaseSettings, Settings
from nekro.plugins.stored_packages import StoredPackages
from nekro.sandbox.packages.archives import extract, pack
from nekro_agent.errors import PackageInstallError
from nekro_agent.packages import layers as package_layers
from nekro_agent.packages.layers import Layer, LayerStore, PipOptions
from storage.files.manifest import Entry
from storage.files.stores.opening import open_store

OPTIONS = PipOptions(mirror=None, allow_plain_http=False, timeout_seconds=60)
TREE = {"alpha/__init__.py": "VALUE = 1\n", "alpha-1.5.dist-info/METADATA": "Name: alpha\nVersion: 1.5\n"}


class PackageHost:
    """A host with a data directory of its own."""

    def __init__(self, root: Path, database: DatabaseSettings, store_url: str, key: str = "k" * 64) -> None:
        self.settings = Settings.load(
            env_file=None, data_dir=root, files={"url": store_url}, security={"signing_key": key}
        ).model_copy(update={"database": database})
        root.mkdir()
        self.fleet = StoredPackages(self.settings)
        self.store = LayerStore(root / "packages")

    def install(self, text: str) -> Layer:
        return self.store.install(Requirement(text), OPTIONS, self.fleet)


class Pip:
    """What takes the place of pip: it installs one package, unless there is no index."""

    def __init__(self) -> None:
        self.installed: list[str] = []
        self.has_index = True

    def __call__(self, requirement: Requirement, prefix: Path, *rest: object) -> None:
        if not self.has_index:
            raise PackageInstallError("there is no package index")
        self.installed.append(str(requirement))
        site = prefix / "lib/python3/site-packages"
        for path, text in TREE.items():
            file = site / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        script = prefix / "bin/alpha"
        script.parent.mkdir()
        script.write_text("#!/bin/sh\n")
        script.chmod(0o700)
        bytecode = site / "alpha/__pycache__/x.pyc"
        bytecode.parent.mkdir()
        bytecode.write_text("of this host")


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch) -> Pip:
    pip = Pip()
    monkeypatch.setattr(package_layers, "_run_pip", pip)
    monkeypatch.setattr(package_layers, "_active", {})
    return pip


@pytest.fixture
def where(migrated_copy: Callable[[str], DatabaseSettings]) -> DatabaseSettings:
    return migrated_copy("sqlite")


@pytest.fixture
def hosts(
    where: DatabaseSettings, tmp_path: Path, store_url: str
) -> Iterator[tuple[PackageHost, PackageHost]]:
    one, two = (PackageHost(tmp_path / name, where, store_url) for name in ("one", "two"))
    yield one, two


def test_a_second_host_needs_no_package_index(hosts: tuple[PackageHost, PackageHost], pip: Pip) -> None:
    one, two = hosts
    first = one.install("alpha>=1")
    pip.has_index = False
    second = two.install("Alpha<2")
    assert (second.name, second.version) == (first.name, first.version) == ("alpha", "1.5")
    assert second.site.is_relative_to(two.settings.data_dir)
    assert (second.site / "alpha/__init__.py").read_text() == "VALUE = 1\n"
    assert not (second.site / "alpha/__pycache__").exists()
    script = second.site.parents[2] / "bin/alpha"
    assert (script.stat().st_mode & 0o7777, script.read_text()) == (0o700, "#!/bin/sh\n")
    assert two.store.find(Requirement("alpha")) == second
    with pytest.raises(PackageInstallError, match="no package index"):
        two.install("alpha>=2")
    with pytest.raises(PackageInstallError, match="no package index"):
        two.install("alpha[fast]")


@pytest.mark.parametrize("store_url", ["directory"], indirect=True)
def test_what_another_key_has_sealed_is_not_executed(
    hosts: tuple[PackageHost, PackageHost], where: DatabaseSettings, tmp_path: Path, store_url: str, pip: Pip
) -> None:
    PackageHost(tmp_path / "stranger", where, store_url, key="x" * 64).install("alpha")
    hosts[0].install("alpha")
    assert len(pip.installed) == 2
    hosts[1].install("alpha")
    assert len(pip.installed) == 2


@pytest.mark.parametrize("store_url", ["directory"], indirect=True)
def test_another_content_under_a_seal_is_not_executed(
    hosts: tuple[PackageHost, PackageHost], where: DatabaseSettings, tmp_path: Path, store_url: str, pip: Pip
) -> None:
    one, two = hosts
    one.install("alpha")

    async def replace() -> None:
        from storage.files.host_files import HostFiles

        async with opened(where, tmp_path) as database:
            files = HostFiles(database, open_store(store_url), root=tmp_path / "f", cache_bytes=1 << 30)
            content = await files.contents.put_bytes(b"other")
            name = f"packages/{one.fleet._interpreter}/alpha"
            async with database.begin() as tx:
                area = await tx.files.find(name)
                assert area is not None
                entries = [entry for entry in await tx.files.entries(area) if entry.content_id]
                put = [Entry(path=entry.path, content_id=content.id, bytes=5) for entry in entries]
                await tx.files.commit(name, put=put)

    asyncio.run(replace())
    two.install("alpha")
    assert len(pip.installed) == 2


@pytest.mark.parametrize("store_url", ["directory"], indirect=True)
def test_an_altered_object_is_not_executed(
    hosts: tuple[PackageHost, PackageHost], store_url: str, pip: Pip
) -> None:
    one, two = hosts
    one.install("alpha")
    for file in Path(store_url.removeprefix("file://")).rglob("*.*"):
        if file.is_file():
            file.write_bytes(file.read_bytes().replace(b"VALUE = 1", b"VALUE = 2"))
    layer = two.install("alpha")
    assert len(pip.installed) == 2
    assert (layer.site / "alpha/__init__.py").read_text() == "VALUE = 1\n"


@pytest.mark.parametrize("store_url", ["directory"], indirect=True)
def test_a_store_that_does_not_answer_costs_an_installation(
    hosts: tuple[PackageHost, PackageHost], where: DatabaseSettings, tmp_path: Path, pip: Pip
) -> None:
    (tmp_path / "file").touch()
    away = PackageHost(tmp_path / "away", where, f"file://{tmp_path}/file/objects")
    assert away.install("alpha").version == "1.5"


def archived(*members: tuple[tarfile.TarInfo, bytes]) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for info, data in members:
            archive.addfile(info, io.BytesIO(data))
    return file.getvalue()


def member(
    name: str, kind: bytes = tarfile.REGTYPE, *, link: str = "", mode: int = 0o644, data: bytes = b"x"
) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    data = data if kind == tarfile.REGTYPE else b""
    info.type, info.linkname, info.mode, info.size = kind, link, mode, len(data)
    return info, data


@pytest.mark.parametrize(
    "members",
    [
        [member("a", tarfile.SYMTYPE, link="../../outside"), member("a/b")],
        [member("a", tarfile.SYMTYPE, link="/etc/passwd")],
        [member("a", tarfile.SYMTYPE, link="b"), member("b")],
        [member("b"), member("a", tarfile.LNKTYPE, link="b")],
        [member("a", tarfile.FIFOTYPE)],
        [member("a", tarfile.CHRTYPE)],
        [member("a", tarfile.DIRTYPE)],
        [member("../outside")],
        [member("a/../../outside")],
        [member("/outside")],
        [member("./a")],
        [member("a" * 256)],
        [member("/".join(["a" * 200] * 30))],
        [member("a\udcff")],
        [member("a"), member("a")],
        [member("a"), member("a/b")],
        [member("a/b"), member("a")],
    ],
)
def test_an_archive_has_files_below_its_directory_only(
    members: list[tuple[tarfile.TarInfo, bytes]], tmp_path: Path
) -> None:
    (tmp_path / "archive").write_bytes(archived(*members))
    target = tmp_path / "new" / "target"
    target.mkdir(parents=True)
    with pytest.raises(PackageInstallError, match="an archive of packages"):
        extract(tmp_path / "archive", target)
    assert not list(tmp_path.rglob("outside"))
    assert all(path.is_file() or path.is_dir() for path in target.rglob("*"))
    assert not any(path.is_symlink() for path in target.rglob("*"))


def test_an_archive_that_claims_more_than_it_has_makes_no_large_file(tmp_path: Path) -> None:
    sparse = tarfile.TarInfo("a")
    sparse.type, sparse.size = tarfile.GNUTYPE_SPARSE, 0
    huge, _ = member("b")
    huge.size = 1 << 40
    for data in (archived((sparse, b"")), huge.tobuf(tarfile.GNU_FORMAT), b"no archive", b""):
        (tmp_path / "archive").write_bytes(data)
        target = tmp_path / f"target-{len(data)}"
        target.mkdir()
        with pytest.raises(PackageInstallError, match="an archive of packages"):
            extract(tmp_path / "archive", target)
        assert sum(path.stat().st_blocks for path in target.rglob("*")) == 0


@pytest.mark.parametrize("mode", [0o4755, 0o2755, 0o1777, 0o7777, 0o755])
def test_no_file_has_a_right_besides_read_write_and_execute(mode: int, tmp_path: Path) -> None:
    (tmp_path / "archive").write_bytes(archived(member("run", mode=mode), member("d/plain", mode=0o6066)))
    (tmp_path / "target").mkdir()
    extract(tmp_path / "archive", tmp_path / "target")
    modes = {path.name: path.stat().st_mode & 0o7777 for path in (tmp_path / "target").rglob("*")}
    assert modes == {"run": 0o700, "d": 0o700, "plain": 0o600}


@pytest.mark.parametrize("kind", ["link to a file", "link to a directory", "dangling link", "pipe"])
def test_a_directory_with_something_else_is_not_archived(kind: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "a").write_text("a")
    if kind == "pipe":
        os.mkfifo(source / "b")
    else:
        target = {"link to a file": "a", "link to a directory": "/etc", "dangling link": "none"}[kind]
        (source / "b").symlink_to(target)
    with pytest.raises(PackageInstallError, match="'b' is no regular file"):
        pack(source, io.BytesIO())
