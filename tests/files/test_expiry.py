"""Old uploads and idle shared files of a store end in SQL; hosts keep what was changed meanwhile."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from datetime import timedelta
from pathlib import Path

import pytest
from hosts import opened
from test_run_files import BOX, CHAT, Machine, method, nothing, started

from broker_config.settings import DatabaseSettings, FileSettings, RetentionSettings, Settings
from nekro.app.areas.synced import SyncedAreas
from nekro.sandbox.models import StubCall, StubResult
from nekro_agent.methods import SandboxMethodType
from nekro_agent.shared_clock import shared_time
from storage.engine import Database
from storage.files.expiry import empty_idle_areas, end_old_uploads
from storage.files.manifest import Area
from storage.migrate import upgrade
from storage.repositories.calls import CallRequest
from storage.repositories.parked_programs import Wait
from storage.repositories.rounds import RoundReport, RoundRequest
from storage.states import TriggerKind, WaitKind
from workers.ops.sweeps import StoredFileSweep
from workers.services import WorkerServices

#: Fewer seconds than tests take; what they age is older.
IDLE = 1800.0
OLD = "'2000-01-01 00:00:00.000000'"


@pytest.fixture(params=["sqlite", "postgres"])
async def database(
    request: pytest.FixtureRequest, migrated_copy: Callable[[str], DatabaseSettings], tmp_path: Path
) -> AsyncIterator[Database]:
    async with opened(migrated_copy(request.param), tmp_path) as database:
        yield database


@pytest.fixture
async def machines(database: Database, tmp_path: Path) -> AsyncIterator[tuple[Machine, Machine]]:
    """Two hosts that share no disk, with a chat whose shared files are those of its sandbox."""
    async with database.begin() as tx:
        await tx.chats.ensure(CHAT)
        await tx.connection.exec_driver_sql(f"UPDATE chats SET container_key = '{BOX}'")
    async with (
        started(tmp_path / "one", database, tmp_path / "objects") as one,
        started(tmp_path / "two", database, tmp_path / "objects") as two,
    ):
        yield one, two


async def age(database: Database, *paths: str) -> None:
    """Make files old, and their areas idle; without paths all."""
    chosen = f" WHERE path IN ({', '.join(map(repr, paths))})" if paths else ""
    async with database.begin() as tx:
        await tx.connection.exec_driver_sql(f"UPDATE file_areas SET changed_at = {OLD}")
        await tx.connection.exec_driver_sql(f"UPDATE file_entries SET added_at = {OLD}{chosen}")


async def sweep(database: Database, *, uploads_days: float = 30) -> None:
    retention = RetentionSettings(uploads_days=uploads_days)
    await StoredFileSweep(database, retention, idle_seconds=IDLE).sweep()


def directory_of(machine: Machine, area: str) -> Path:
    return machine.directories.uploads_dir(CHAT) if area == "uploads" else machine.shared


def texts(machine: Machine, area: str) -> dict[str, str]:
    root = directory_of(machine, area)
    return {str(path.relative_to(root)): path.read_text() for path in root.rglob("*") if path.is_file()}


async def area_of(database: Database, name: str) -> Area:
    async with database.read() as tx:
        area = await tx.files.find(name)
    assert area is not None
    return area


async def visit(machine: Machine, area: str) -> dict[str, str]:
    """Use an area as a call does that changes nothing; returns what it has."""
    place = machine.areas.uploads(CHAT) if area == "uploads" else machine.areas.shared(BOX)
    async with machine.areas.scope("reader") as scope:
        await scope.bring(place)
        return texts(machine, area)


async def test_old_uploads_end_on_all_hosts_by_one_version(
    machines: tuple[Machine, Machine], database: Database
) -> None:
    one, two = machines
    for name in ("old.txt", "older.txt", "new.txt"):
        await one.write(name, name, area="uploads")
    await one.write("plots/day/plot.txt", "plot", area="uploads")
    assert len(await visit(two, "uploads")) == 4
    await age(database, "old.txt", "older.txt", "plots", "plots/day", "plots/day/plot.txt")
    before = await area_of(database, one.areas.uploads(CHAT).name)
    await sweep(database)
    after = await area_of(database, before.name)
    assert after.version == before.version + 1
    assert await visit(one, "uploads") == await visit(two, "uploads") == {"new.txt": "new.txt"}
    # Directories end when they are empty.
    await sweep(database)
    await sweep(database)
    left = await area_of(database, before.name)
    assert (left.names, left.bytes) == (1, len("new.txt"))
    await visit(two, "uploads")
    assert [path.name for path in directory_of(two, "uploads").iterdir()] == ["new.txt"]


async def test_no_sweep_of_a_worker_removes_local_files_that_a_store_has(
    make_settings: Callable[..., Settings], tmp_path: Path
) -> None:
    files = FileSettings(url=f"file://{tmp_path / 'objects'}")
    settings = make_settings(files=files, retention=RetentionSettings(uploads_days=1e-9))
    await upgrade(settings.database, settings.data_dir)
    services = WorkerServices.load(settings, role="methods")
    areas = services.areas
    assert isinstance(areas, SyncedAreas)
    try:
        async with areas.scope("method") as scope:
            place = (await scope.bring(await asyncio.to_thread(areas.uploads, CHAT))).place
            (place.directory / "a.txt").write_text("a")
        async with services.database.begin() as tx:  # the file in the directory is older than the entry
            await tx.connection.exec_driver_sql("UPDATE file_entries SET added_at = '2999-01-01 00:00:00'")
        async with areas.scope("method") as scope:
            await scope.bring(place)
            await services.sweeper()._sweep_all()
            (place.directory / "b.txt").write_text("b")
        async with services.database.read() as tx:
            area = await tx.files.find(place.name)
            assert area is not None
            assert {entry.path for entry in await tx.files.entries(area)} == {"a.txt", "b.txt"}
    finally:
        await services.close()


async def test_uploads_are_kept_for_ever_without_a_time(
    machines: tuple[Machine, Machine], database: Database
) -> None:
    one, _ = machines
    await one.write("a.txt", "a", area="uploads")
    await age(database)
    await sweep(database, uploads_days=0)
    assert await visit(one, "uploads") == {"a.txt": "a"}


async def test_an_upload_that_is_written_again_is_not_old(
    machines: tuple[Machine, Machine], database: Database
) -> None:
    one, two = machines
    await one.write("a.txt", "a", area="uploads")
    await age(database)
    place = two.areas.uploads(CHAT)
    async with two.areas.scope("method") as scope:
        await scope.bring(place)
        info = (place.directory / "a.txt").stat()
        # As `UploadArea.add` marks the use of a file: only its time of change differs.
        os.utime(place.directory / "a.txt", ns=(info.st_atime_ns, info.st_mtime_ns))
    await sweep(database)
    assert await visit(one, "uploads") == {"a.txt": "a"}


@pytest.mark.parametrize("area", ["uploads", "shared"])
async def test_a_file_that_is_changed_while_the_sweep_ends_it_is_kept(
    machines: tuple[Machine, Machine], database: Database, area: str
) -> None:
    one, two = machines
    for name in ("changed.txt", "other.txt"):
        await one.write(name, name, area=area)
    place = two.areas.uploads(CHAT) if area == "uploads" else two.areas.shared(BOX)
    async with two.areas.scope("method") as scope:
        await scope.bring(place)
        await age(database)
        await sweep(database)
        (place.directory / "changed.txt").write_text("a longer text")
    assert await visit(one, area) == await visit(two, area) == {"changed.txt": "a longer text"}


async def test_shared_files_of_a_chat_end_only_while_its_lease_is_free(
    machines: tuple[Machine, Machine], database: Database
) -> None:
    one, two = machines
    await one.write("a.txt", "a")
    assert await visit(two, "shared") == {"a.txt": "a"}
    async with database.begin() as tx:
        fence = await tx.chats.acquire(CHAT, owner="one", lease_seconds=60)
    await age(database)
    await sweep(database)
    assert await visit(two, "shared") == {"a.txt": "a"}
    async with database.begin() as tx:
        await tx.chats.release(CHAT, fence=fence or 0)
    before = await area_of(database, f"shared/{BOX}")
    await sweep(database)
    after = await area_of(database, f"shared/{BOX}")
    assert (after.version, after.names, after.bytes) == (before.version + 1, 0, 0)
    assert await visit(one, "shared") == await visit(two, "shared") == {}


async def test_a_change_and_a_use_end_the_idle_time(
    machines: tuple[Machine, Machine], database: Database
) -> None:
    one, _ = machines
    await one.write("a.txt", "a")
    await age(database)
    await one.write("b.txt", "b")
    await sweep(database)
    assert len(await visit(one, "shared")) == 2
    await age(database)
    assert (await one.run("print(open('/app/shared/a.txt').read())")).output == "a\n"  # changes nothing
    await sweep(database)
    assert len(await visit(one, "shared")) == 2


@pytest.mark.parametrize("has_lease", [True, False])
async def test_a_run_keeps_its_files_while_the_sweep_comes(
    machines: tuple[Machine, Machine], database: Database, has_lease: bool
) -> None:
    one, _ = machines
    await one.write("before.txt", "before")
    await age(database)
    fence = None
    if has_lease:
        async with database.begin() as tx:
            fence = await tx.chats.acquire(CHAT, owner="one", lease_seconds=60)

    async def call(_: StubCall) -> StubResult:
        if has_lease:  # a turn of more than the idle time
            await age(database)
        await sweep(database)
        return nothing()

    code = """
look()
import os
print(os.listdir('/app/shared'))
"""
    result = await one.run(code, method("look"), dispatch=call, fence=fence)
    assert (result.output, result.error) == ("['before.txt']\n", None)
    assert await visit(one, "shared") == {"before.txt": "before"}


async def test_the_shared_files_of_a_chat_stay_while_its_program_waits(
    machines: tuple[Machine, Machine], database: Database
) -> None:
    one, _ = machines
    await one.write("a.txt", "a")
    async with database.begin() as tx:
        request = RoundRequest(chat_key=CHAT, trigger_kind=TriggerKind.MESSAGE, trigger_id="1")
        item, _ = await tx.rounds.request(request)
        fence = await tx.chats.acquire(CHAT, owner="one", lease_seconds=60)
        assert fence is not None
        await tx.rounds.claim_next(CHAT, fence=fence, worker="w")
        call = CallRequest(
            id="wait", method="m", type=SandboxMethodType.TOOL, chat_key=CHAT, round_id=item.id
        )
        await tx.awaiting_calls.add(call)
        until = shared_time() + timedelta(days=1)
        wait = Wait(
            call_id="wait",
            program_id=item.id,
            chat_key=CHAT,
            turn_id=item.turn_id,
            kind=WaitKind.TIME,
            until=until,
        )
        await tx.parked_programs.begin(wait)
        await tx.rounds.finish(item.id, fence=fence, report=RoundReport())
        await tx.chats.release(CHAT, fence=fence)
        assert await tx.parked_programs.sandboxes() == {BOX}
    await age(database)
    await sweep(database)
    assert await visit(one, "shared") == {"a.txt": "a"}
    async with database.begin() as tx:
        await tx.awaiting_calls.cancel(["wait"], reason="enough")
        assert await tx.parked_programs.sandboxes() == set()
    await age(database)
    await sweep(database)
    assert await visit(one, "shared") == {}


async def test_sweeps_and_changes_at_the_same_time_lose_no_new_file(
    machines: tuple[Machine, Machine], database: Database
) -> None:
    one, two = machines

    async def write(machine: Machine, start: int) -> None:
        for number in range(start, start + 5):
            await machine.write(f"{number}.txt", str(number), area="uploads")
            await machine.write(f"{number}.txt", str(number))

    async def sweeps() -> None:
        for _ in range(20):
            await end_old_uploads(database, seconds=IDLE, limit=10)
            await empty_idle_areas(database, seconds=IDLE, limit=10)

    for name in ("a.txt", "b.txt"):
        await one.write(name, name, area="uploads")
    await age(database)
    await asyncio.gather(write(one, 0), write(two, 5), sweeps())
    assert await visit(one, "uploads") == {f"{number}.txt": str(number) for number in range(10)}
    assert len(await visit(two, "shared")) == 10
    for name in (one.areas.uploads(CHAT).name, f"shared/{BOX}"):
        area = await area_of(database, name)
        assert (area.names, area.bytes) == (10, 10)


async def test_a_host_removes_directories_that_it_does_not_use(
    machines: tuple[Machine, Machine], database: Database
) -> None:
    one, _ = machines
    await one.write("a.txt", "a")
    await one.write("b.txt", "b", area="uploads")
    await one.areas.background.wait(one.areas.empty_unused())
    assert texts(one, "shared") and texts(one, "uploads")
    await one.areas.background.wait(one.areas.empty_unused(unused=timedelta(0)))
    assert not texts(one, "shared") and not texts(one, "uploads")
    assert await visit(one, "shared") == {"a.txt": "a"}
    assert await visit(one, "uploads") == {"b.txt": "b"}
