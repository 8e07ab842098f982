"""Downloads of hosts that share no disk: stored in parts, resumed on another host, and shared by content."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from hosts import opened

from benchmarks.downloads import make_file, serving
from broker_config.settings import DatabaseSettings
from storage.engine import Database
from storage.files.collection import check
from storage.files.stores.opening import open_store
from workers.jobs.stored_parts import StoredParts

MEBI = 1 << 20
LARGE = 160 * MEBI
TESTS = Path(__file__).parents[1]
HOST = "benchmarks.harness.downloading_host"


@pytest.fixture
def settings(migrated_copy: Callable[[str], DatabaseSettings]) -> DatabaseSettings:
    return migrated_copy("sqlite")


@pytest.fixture
async def database(settings: DatabaseSettings, tmp_path: Path) -> AsyncIterator[Database]:
    async with opened(settings, tmp_path) as database:
        yield database


class Fleet:
    """Starts hosts that download the same file."""

    def __init__(self, settings: DatabaseSettings, store_url: str, root: Path) -> None:
        self._database = str(settings.url)
        self._store_url = store_url
        self._root = root

    @contextmanager
    def host(self, name: str, url: str, *options: str, module: str = HOST) -> Iterator[subprocess.Popen[str]]:
        root = self._root / name
        root.mkdir(exist_ok=True)
        command = [sys.executable, "-m", module, self._database, self._store_url, str(root), url, *options]
        environment = {**os.environ, "PYTHONPATH": f"{TESTS.parent}:{TESTS}:{TESTS / 'files'}"}
        process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        try:
            yield process
        finally:
            process.kill()
            with process:  # closes its pipes
                pass

    def killed(self, name: str, url: str, *options: str, at: int) -> None:
        """Download on a host until it has some bytes, and kill it."""
        with self.host(name, url, *options) as process:
            reached(process, at)
            process.send_signal(signal.SIGKILL)

    def done(self, name: str, url: str, *options: str) -> dict[str, Any]:
        """Download on a host; returns its report."""
        with self.host(name, url, *options) as process:
            return self.report(name, process, *options)

    def report(self, name: str, process: subprocess.Popen[str], *options: str) -> dict[str, Any]:
        """Wait for a host that downloads; returns its report."""
        out, error = process.communicate(timeout=120)
        assert process.returncode == 0, error
        report: dict[str, Any] = json.loads(out.rstrip().rpartition("\n")[2])
        file = self._root / name / "plugins" / "models" / "large.model"
        if "--target" not in options:
            assert file_hash(file) == report["sha256"]
            assert [path.name for path in file.parent.iterdir()] == [file.name]
        return report


@pytest.fixture
def fleet(settings: DatabaseSettings, store_url: str, tmp_path: Path) -> Fleet:
    return Fleet(settings, store_url, tmp_path)


def reached(process: subprocess.Popen[str], at: int) -> None:
    """Wait until a host reports that it, or the one that it waits for, has some bytes."""
    assert process.stdout is not None
    for line in process.stdout:
        if int(line.removeprefix("progress ")) >= at:
            return
    pytest.fail(process.communicate()[1])


@contextmanager
def suspended(process: subprocess.Popen[str], database: Path) -> Iterator[None]:
    """Stop a process while it has no transaction, in which it would keep others from writing."""
    try:
        while True:
            process.send_signal(signal.SIGSTOP)
            os.waitpid(process.pid, os.WUNTRACED)
            with suppress(sqlite3.OperationalError), closing(sqlite3.connect(database, timeout=0)) as own:
                own.execute("BEGIN IMMEDIATE")
                break
            process.send_signal(signal.SIGCONT)
        yield
    finally:
        process.send_signal(signal.SIGCONT)


def file_hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@pytest.fixture
def large(tmp_path: Path) -> tuple[Path, str]:
    path = tmp_path / "source"
    return path, make_file(path, LARGE)


async def require_sound(database: Database, store_url: str) -> None:
    assert (await check(database, open_store(store_url), reads=True)).damages == []


@pytest.mark.extended
@pytest.mark.parametrize("store_url", ["directory", "moto"], indirect=True)
async def test_a_download_is_resumed_by_other_hosts_after_kills(
    fleet: Fleet, large: tuple[Path, str], database: Database, store_url: str
) -> None:
    path, sha256 = large
    with serving(path) as served:
        fleet.killed("first", served.url, "--connections", "1", at=60 * MEBI)
        fleet.killed("second", served.url, "--connections", "1", at=110 * MEBI)
        report = fleet.done("third", served.url, "--connections", "1")
        assert report["sha256"] == sha256
        resumed = served.starts[1:]
        assert 0 not in resumed and len(resumed) == 2, served.starts
        assert resumed == sorted(resumed) and resumed[0] >= 16 * MEBI
        # Another host that asks with the digest fetches nothing, also for another target.
        fleet.done("fourth", served.url, "--sha256", sha256)
        fleet.done("fifth", served.url, "--sha256", sha256, "--target", "other/target")
        assert len(served.starts) == 3
    await require_sound(database, store_url)


@pytest.mark.parametrize("store_url", ["directory"], indirect=True)
def test_a_host_that_asks_while_another_downloads_fetches_nothing(
    fleet: Fleet, large: tuple[Path, str]
) -> None:
    path, sha256 = large
    options = ("--connections", "1", "--lease-seconds", "60")
    with (
        serving(path, "--bytes-per-second", str(80 * MEBI)) as served,
        fleet.host("first", served.url, *options) as first,
    ):
        reached(first, MEBI)
        with served.standing_still(), fleet.host("second", served.url, *options) as second:
            reached(second, 0)  # it waits: it shows the progress of the first
            os.kill(served.pid, signal.SIGCONT)
            assert fleet.report("second", second)["sha256"] == sha256
        assert fleet.report("first", first)["sha256"] == sha256
        assert served.starts == [0]


@pytest.mark.parametrize("store_url", ["directory"], indirect=True)
def test_a_suspended_host_takes_the_result_of_the_one_that_took_over(
    fleet: Fleet, settings: DatabaseSettings, large: tuple[Path, str]
) -> None:
    path, sha256 = large
    database = Path(str(settings.url).removeprefix("sqlite:///"))
    with (
        serving(path, "--bytes-per-second", str(80 * MEBI)) as served,
        fleet.host("first", served.url, "--connections", "1") as first,
    ):
        reached(first, 60 * MEBI)
        with suspended(first, database):
            assert fleet.done("second", served.url, "--connections", "1")["sha256"] == sha256
        assert fleet.report("first", first)["sha256"] == sha256
        assert len(served.starts) == 2 and served.starts[1] >= 16 * MEBI, served.starts


@pytest.mark.parametrize("store_url", ["directory"], indirect=True)
async def test_a_download_that_was_stored_but_not_ended_is_taken_from_the_store(
    fleet: Fleet, large: tuple[Path, str], database: Database, store_url: str
) -> None:
    path, sha256 = large
    with serving(path) as served:
        with fleet.host("first", served.url, "--connections", "1", module="killed_download") as first:
            assert first.wait(120) == -signal.SIGKILL
        assert fleet.done("second", served.url, "--connections", "1")["sha256"] == sha256
        assert served.starts == [0]
    await require_sound(database, store_url)


@pytest.mark.parametrize("store_url", ["directory"], indirect=True)
def test_connections_of_a_resumed_download_share_no_part(fleet: Fleet, large: tuple[Path, str]) -> None:
    path, sha256 = large
    with serving(path) as served:
        fleet.killed("first", served.url, at=60 * MEBI)
        before = len(served.starts)
        assert fleet.done("second", served.url)["sha256"] == sha256
        resumed = served.starts[before:]
        assert len(resumed) > 4 and {start % StoredParts.part_bytes(LARGE) for start in resumed} == {0}


@pytest.mark.parametrize("store_url", ["directory"], indirect=True)
async def test_altered_parts_are_fetched_again(fleet: Fleet, large: tuple[Path, str], store_url: str) -> None:
    path, sha256 = large
    with serving(path) as served:
        fleet.killed("first", served.url, "--connections", "1", at=80 * MEBI)
        for file in Path(store_url.removeprefix("file://")).rglob("*"):
            if file.is_file() and file.stat().st_size > MEBI:
                file.chmod(0o600)
                with file.open("r+b") as altered:
                    altered.write(b"altered")
        assert fleet.done("second", served.url, "--connections", "1")["sha256"] == sha256
