"""Directories of plugins: changes that two hosts make, and owners that follow each other."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hosts import opened

from broker_config.settings import DatabaseSettings
from nekro_agent.errors import ConflictError, FencedError
from storage.engine import Database
from storage.files.host_files import AreaPlace, HostFiles
from storage.files.manifest import LeaseWriter
from storage.files.stores.opening import open_store

PINNED = "pinned:a.b"


class Machine:
    """A host and its directory of a plugin."""

    def __init__(self, root: Path, database: Database, url: str) -> None:
        self.root = root
        self.database = database
        self.directory = root / "plugins" / "a.b"
        self.files = HostFiles(database, open_store(url), root=root / "files", cache_bytes=1 << 30)
        self.place = AreaPlace(name="plugin/a.b", directory=self.directory, forgets=False, refuses=True)

    def texts(self) -> dict[str, str]:
        paths = (path for path in self.directory.rglob("*") if path.is_file())
        return {str(path.relative_to(self.directory)): path.read_text() for path in paths}

    def write(self, **texts: str) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (self.directory / name).write_text(text)

    async def call(self, **texts: str) -> None:
        """Use the directory as a call does."""
        async with self.files.use(self.place) as use:
            self.write(**texts)
            await use.push()

    async def own(self) -> LeaseWriter:
        """Become the owner of the plugin after one that died."""
        async with self.database.begin() as tx:
            fence = await tx.leases.acquire(PINNED, owner=str(self.root), lease_seconds=0)
        assert fence is not None
        async with self.files.use(replace(self.place, takes_over=True)):
            pass
        return LeaseWriter(lease=PINNED, fence=fence)


@pytest.fixture
async def database(
    migrated_copy: Callable[[str], DatabaseSettings], tmp_path: Path
) -> AsyncIterator[Database]:
    async with opened(migrated_copy("sqlite"), tmp_path) as database:
        yield database


@pytest.fixture
def machines(database: Database, tmp_path: Path, store_url: str) -> tuple[Machine, Machine]:
    one, two = (Machine(tmp_path / name, database, store_url) for name in ("one", "two"))
    return one, two


async def test_files_that_were_here_before_the_store_are_kept(machines: tuple[Machine, Machine]) -> None:
    one, two = machines
    one.write(old="1", same="x")
    two.write(other="2", same="x")
    await one.call()
    await two.call()
    await one.call()
    assert one.texts() == two.texts() == {"old": "1", "other": "2", "same": "x"}


async def test_a_conflict_names_the_file_and_both_and_overwrites_nothing(
    machines: tuple[Machine, Machine],
) -> None:
    one, two = machines
    await one.call(a="1", b="1")
    async with two.files.use(two.place) as use:
        await one.call(a="theirs")
        two.write(a="mine", c="mine")
        async with two.files.use(two.place):  # another call brings what it can
            assert two.texts() == {"a": "mine", "b": "1", "c": "mine"}
        with pytest.raises(ConflictError) as caught:
            await use.push()
    text = str(caught.value)
    assert "plugin/a.b: 'a' was changed elsewhere in version 2 and changed here" in text
    aside = Path(text.rpartition(" ")[2])
    assert {path.name: path.read_text() for path in aside.iterdir()} == {"a": "mine", "c": "mine"}
    assert two.texts() == {"a": "theirs", "b": "1"}
    await two.call(a="again")
    await one.call()
    assert one.texts() == {"a": "again", "b": "1"}


async def test_removals_on_two_hosts_are_no_conflict_and_changes_of_removed_files_are(
    machines: tuple[Machine, Machine],
) -> None:
    one, two = machines
    await one.call(a="1", b="1", c="1")
    async with two.files.use(two.place) as use:
        async with one.files.use(one.place) as theirs:
            for name in ("a", "b"):
                (one.directory / name).unlink()
            await theirs.push()
        (two.directory / "a").unlink()
        await use.push()
        two.write(b="mine")
        with pytest.raises(ConflictError, match="'b' was removed elsewhere and changed here"):
            await use.push()
    assert two.texts() == {"c": "1"}


async def test_a_new_owner_has_the_files_and_the_old_one_cannot_push(
    machines: tuple[Machine, Machine],
) -> None:
    one, two = machines
    old = await one.own()
    async with one.files.use(one.place) as use:
        one.write(db="1")
        await use.push(writer=old, is_quiet=True)
        one.write(db="not pushed", wal="x")
        new = await two.own()
        assert two.texts() == {"db": "1"}
        with pytest.raises(FencedError):
            await use.push(writer=old)
    async with two.files.use(two.place) as use:
        two.write(db="2")
        await use.push(writer=new)
    await one.own()  # again: what it had not pushed is older than the version of the other
    assert one.texts() == {"db": "2"}
    (aside,) = (one.root / "files" / "conflicts").iterdir()
    assert (aside / "db").read_text() == "not pushed"


async def test_an_owner_that_comes_back_first_has_its_newest_files(
    machines: tuple[Machine, Machine],
) -> None:
    one, _ = machines
    writer = await one.own()
    async with one.files.use(one.place) as use:
        one.write(db="1")
        await use.push(writer=writer)
        one.write(db="2")
    await one.own()
    assert one.texts() == {"db": "2"}


async def test_an_owner_that_stored_nothing_has_its_files_when_it_comes_back(
    machines: tuple[Machine, Machine],
) -> None:
    one, _ = machines
    one.write(db="from before the store")
    for _ in range(2):
        await one.own()
        assert one.texts() == {"db": "from before the store"}
    assert not (one.root / "files" / "conflicts").exists()


async def test_a_quiet_push_commits_nothing_while_files_change(
    machines: tuple[Machine, Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = machines
    put = one.files.contents.put

    async def slow(contents):  # type: ignore[no-untyped-def]
        one.write(second="2")
        return await put(contents)

    async with one.files.use(one.place) as use:
        one.write(first="1")
        with monkeypatch.context() as patched:
            patched.setattr(one.files.contents, "put", slow)
            assert (await use.push(is_quiet=True)).is_busy
        assert not (await use.push(is_quiet=True)).is_busy
    await two.call()
    assert two.texts() == {"first": "1", "second": "2"}
