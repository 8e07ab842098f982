"""Configurations of plugins on hosts with disks of their own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from plugin_workers import Worker, two_workers
from waiting import eventually

from broker_config.settings import DatabaseSettings, Settings
from nekro.app.areas.synced import bring_configs
from nekro.cli.plugin_files import find_data, purge
from nekro_agent.errors import ConflictError
from storage.files.stores.opening import open_store

NAME = "ada.weather.yaml"


@pytest.fixture
def where(migrated_copy: Callable[[str], DatabaseSettings]) -> DatabaseSettings:
    return migrated_copy("sqlite")


@pytest.fixture
async def workers(
    where: DatabaseSettings, tmp_path: Path, store_url: str
) -> AsyncIterator[tuple[Worker, Worker]]:
    async with two_workers(tmp_path, where, open_store(store_url)) as workers:
        yield workers


def text_at(worker: Worker) -> str:
    file = worker.root / "configs" / NAME
    return file.read_text() if file.exists() else ""


async def save(worker: Worker, text: str) -> None:
    """What a method does that saves its configuration: its host commits it at the end of the call."""
    async with worker.areas.scope("method"):
        (worker.areas.configs_dir() / NAME).write_text(text)


async def test_what_a_call_saves_is_on_other_hosts_within_moments(workers: tuple[Worker, Worker]) -> None:
    one, two = workers
    two.areas.follow_configs()
    await save(one, "KEY: 1\n")
    await eventually(lambda: text_at(two) == "KEY: 1\n", what="the configuration")
    await save(two, "KEY: 2\n")
    await save(one, "KEY: 3\n")
    await eventually(lambda: text_at(two) == "KEY: 3\n", what="the configuration")


async def test_what_is_written_outside_of_calls_is_on_other_hosts(workers: tuple[Worker, Worker]) -> None:
    one, two = workers
    for worker in workers:
        worker.areas.follow_configs()
    await eventually(lambda: (one.root / "configs").is_dir(), what="a directory")
    (one.root / "configs" / NAME).write_text("KEY: by hand\n")
    await eventually(lambda: text_at(two) == "KEY: by hand\n", what="the configuration")


async def test_a_configuration_that_two_hosts_save_at_once_is_an_error_that_names_it(
    workers: tuple[Worker, Worker],
) -> None:
    one, two = workers
    with pytest.raises(
        ConflictError, match=r"configs: 'ada\.weather\.yaml' was changed elsewhere in version 1"
    ):
        async with one.areas.scope("method"):
            directory = one.areas.configs_dir()
            await save(two, "KEY: 2\n")
            (directory / NAME).write_text("KEY: 1\n")
    assert text_at(one) == "KEY: 2\n"


async def test_a_new_host_has_them_before_it_imports_plugins(
    workers: tuple[Worker, Worker], where: DatabaseSettings, tmp_path: Path, store_url: str
) -> None:
    await save(workers[0], "KEY: 1\n")
    settings = Settings.load(
        env_file=None, data_dir=tmp_path / "three", database=where, files={"url": store_url}
    )
    await asyncio.to_thread(bring_configs, settings)
    file = tmp_path / "three" / "configs" / NAME
    assert file.read_text() == "KEY: 1\n"
    assert file.stat().st_mode & 0o077 == 0, "it may have secrets"


async def test_configurations_from_before_the_store_become_those_of_the_fleet(
    workers: tuple[Worker, Worker], where: DatabaseSettings, tmp_path: Path, store_url: str
) -> None:
    for name, text in ("three", "KEY: old\n"), ("four", "KEY: other\n"):
        (tmp_path / name / "configs").mkdir(parents=True)
        (tmp_path / name / "configs" / NAME).write_text(text)
        settings = Settings.load(
            env_file=None, data_dir=tmp_path / name, database=where, files={"url": store_url}
        )
        await asyncio.to_thread(bring_configs, settings)
        assert (tmp_path / name / "configs" / NAME).read_text() == "KEY: old\n"
    assert [file.read_text() for file in (tmp_path / "four/files/conflicts").rglob("*.yaml")] == [
        "KEY: other\n"
    ]


async def test_a_purge_on_one_host_deletes_what_all_have(
    workers: tuple[Worker, Worker], where: DatabaseSettings, tmp_path: Path, store_url: str
) -> None:
    one, two = workers
    async with one.call("a.synced") as path:
        (path / "sub").mkdir()
        (path / "sub" / "x").write_text("1")
        (one.areas.configs_dir() / "a.synced.yaml").write_text("KEY: 1\n")
        (one.areas.configs_dir() / NAME).write_text("KEY: of another plugin\n")
    async with two.call("a.synced") as path:
        assert (path / "sub" / "x").exists()
    settings = Settings.load(
        env_file=None, data_dir=tmp_path / "three", database=where, files={"url": store_url}
    )
    data = await find_data(settings, "a.synced")
    assert str(data) == "0 stored values, 3 files and directories of the store"
    await purge(settings, data)
    assert not await find_data(settings, "a.synced")
    for worker in workers:
        async with worker.call("a.synced") as path:
            assert list(path.iterdir()) == []
            assert {file.name for file in worker.areas.configs_dir().iterdir()} == {NAME}
