"""Files of chats over HTTP, kept in a store: as in directories, and what only a store can do wrong."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import httpx
import pytest
from faulty_store import Faults, FaultyStore
from gateway_server import served
from s3_process import BUCKET, S3Server, variables_of
from test_gateway_files import (  # noqa: F401 - the tests run here on the fleet of this module
    PIXEL,
    client_of,
    names_in,
    put,
    test_a_body_that_ends_early_leaves_nothing,
    test_a_file_that_is_put_can_be_read_listed_and_deleted,
    test_a_full_area_refuses_files,
    test_a_list_names_the_type_of_each_content,
    test_a_name_in_use_is_not_overwritten,
    test_a_name_that_is_no_plain_name_is_refused,
    test_a_part_is_stored_under_the_name_that_it_states,
    test_a_part_without_a_field_name_or_a_usable_file_name_is_refused,
    test_an_id_is_valid_for_its_chat_and_version_only,
    test_browsers_do_not_run_files,
    test_lists_are_paged_by_cursor,
    test_ranges_follow_the_standard,
    test_validators_save_repeated_reading,
)
from test_gateway_stored_bytes import (  # noqa: F401 - as above
    limited,
    stored,
    test_uploads_at_once_stay_within_the_quota_and_removal_gives_back,
)
from worker_fleet import Fleet

from broker_config.settings import RetentionSettings
from nekro.app.areas.synced import SyncedAreas
from nekro.gateway.app import create_app
from storage.engine import Database
from storage.files.cache import FileCache
from storage.files.stores.opening import open_store
from storage.files.stores.store import PART_BYTES
from storage.retention import delete_expired
from workers.ops.sweeps import StoredFileSweep


@pytest.fixture(scope="module", params=["directory", "moto"])
def kind(request: pytest.FixtureRequest) -> str:
    """Kind of the store."""
    return str(request.param)


@pytest.fixture(scope="module")
def database_url(
    kind: str, tmp_path_factory: pytest.TempPathFactory, new_database: Callable[[str, Path], str]
) -> str:
    """A database for each store, as a manifest belongs to one."""
    return new_database("sqlite", tmp_path_factory.mktemp(kind))


@pytest.fixture(scope="module")
def server(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server | None]:
    """The server of S3 behind the store; None: it is a directory."""
    if kind == "directory":
        yield None
        return
    server = S3Server(kind, tmp_path_factory.mktemp(kind))
    server.start()
    with pytest.MonkeyPatch.context() as environment:
        for name, value in server.variables.items():
            environment.setenv(name, value)
        yield server
    server.stop()


@pytest.fixture(scope="module")
def fleet(
    server: S3Server | None, make_fleet: Callable[..., Fleet], tmp_path_factory: pytest.TempPathFactory
) -> Fleet:
    """A fleet without workers, whose files are in a store."""
    directory = f"file://{tmp_path_factory.mktemp('store')}"
    return make_fleet(
        files={"url": directory if server is None else f"s3://{BUCKET}/files"},
        plugins={"dirs": (Path(__file__).parent / "stored_plugins",)},
        sandbox={"shared_bytes": 2 << 20},
    )


@pytest.fixture
async def gateway(fleet: Fleet) -> AsyncIterator[tuple[Fleet, httpx.AsyncClient]]:
    """A gateway of the fleet."""
    async with client_of(fleet) as (client, _):
        yield fleet, client


async def test_no_directory_is_made_for_a_list_or_an_upload(fleet: Fleet) -> None:
    async with client_of(fleet) as (client, services):
        await put(client, "bare", "a.txt", b"x")
        assert len((await client.get("/api/v1/chats/bare/files")).json()["items"]) == 1
        chat = await services.chat("bare")
        assert isinstance(services.areas, SyncedAreas)
        for place in (services.areas.uploads("bare"), services.areas.shared(chat.container_key)):
            assert not place.directory.exists()


async def test_a_name_that_differs_from_another_only_in_case_gets_a_number(fleet: Fleet) -> None:
    async with client_of(fleet) as (client, _):
        await put(client, "cases", "Report.txt", b"one")
        answer = await client.put("/api/v1/chats/cases/files/report.txt", content=b"two")
        assert (answer.status_code, answer.json()["code"]) == (409, "conflict")
        answer = await client.post("/api/v1/chats/cases/files", files={"file": ("report.txt", b"two")})
        assert [file["path"] for file in answer.json()] == ["/app/uploads/report-2.txt"]
        answer = await client.put(
            "/api/v1/chats/cases/files/x", content=b"three", params={"path": "/app/uploads/REPORT.txt"}
        )
        assert (answer.status_code, answer.json()["code"]) == (422, "usage")
        assert "differ only in case" in answer.json()["detail"]


@pytest.mark.parametrize(
    "path", ["../x", "/app/uploads/../x", "/app/shared/a/../../x", "/etc/passwd", "/app/shared/" + "x" * 300]
)
async def test_a_path_that_leaves_the_areas_or_is_too_long_is_refused(fleet: Fleet, path: str) -> None:
    async with client_of(fleet) as (client, services):
        url = "/api/v1/chats/paths/files"
        await put(client, "paths", "known.txt", b"x")
        answer = await client.put(f"{url}/x", content=b"x", params={"path": path})
        assert answer.status_code == 422, answer.text
        found = await client.get("/api/v1/chats/paths/file-info", params={"path": path})
        assert found.status_code in (404, 422)
        assert await names_in(services, "paths") == ["known.txt"]
        assert await names_in(services, "paths", "shared") == []


async def test_a_path_of_a_running_program_names_the_same_file(fleet: Fleet) -> None:
    async with client_of(fleet) as (client, _):
        await put(client, "working", "a.csv", b"x")
        for path in ("uploads/a.csv", "/app/shared/uploads/a.csv", "/app/shared/shared/uploads/a.csv"):
            found = await client.get("/api/v1/chats/working/file-info", params={"path": path})
            assert found.json()["path"] == "/app/uploads/a.csv", found.text


async def test_uploads_at_the_same_time_stay_within_the_quota(fleet: Fleet) -> None:
    limits = fleet.settings.uploads.model_copy(update={"chat_bytes": 5000})
    settings = fleet.settings.model_copy(update={"uploads": limits})
    async with served(create_app(settings)) as client:
        url = "/api/v1/chats/crowd/files"
        answers = await asyncio.gather(
            *(client.post(url, files={"file": ("same.bin", os.urandom(1000))}) for _ in range(9))
        )
        assert sorted(answer.status_code for answer in answers) == [201] * 5 + [507] * 4
        refused = next(answer for answer in answers if answer.status_code == 507)
        assert refused.json()["code"] == "upload_quota"
        assert "NEKRO_UPLOADS__CHAT_BYTES" in refused.json()["detail"]
        listed = (await client.get(url)).json()["items"]
        assert len({file["name"] for file in listed}) == 5
        await client.delete(listed[0]["url"])
        await put(client, "crowd", "fits.bin", os.urandom(1000))


async def test_an_altered_object_is_an_error_that_names_the_file(fleet: Fleet) -> None:
    store = open_store(fleet.settings.files.url)
    async with client_of(fleet) as (client, services):
        url = str((await put(client, "altered", "a.txt", b"true content"))["url"])
        sha256 = hashlib.sha256(b"true content").hexdigest()
        (key,) = [one.key async for batch in store.list() for one in batch if one.key.startswith(sha256)]
        for content in (b"false content", None):
            services.files.contents.cache.remove(sha256)
            await store.delete([key])
            if content is not None:
                await store.put(key, content)
            answer = await client.get(url)
            assert (answer.status_code, answer.json()["code"]) == (500, "damaged_file"), answer.text
            assert "/app/uploads/a.txt" in answer.json()["detail"]
            listed = (await client.get("/api/v1/chats/altered/files")).json()["items"]
            assert [file["media_type"] for file in listed] == ["text/plain"]
        assert (await client.delete(url)).status_code == 204


async def test_a_list_needs_no_object(fleet: Fleet) -> None:
    store = open_store(fleet.settings.files.url)
    contents = {
        "picture": PIXEL,
        "wrong.txt": PIXEL + b"x",
        "large": b"%PDF-" + bytes(PART_BYTES),  # of two parts
        "plain.txt": b"text",
        "empty.png": b"",
    }
    async with client_of(fleet) as (client, services):
        for name, content in contents.items():
            await put(client, "typed", name, content)
        keys = [one.key async for batch in store.list() for one in batch]
        digests = [hashlib.sha256(content).hexdigest() for content in contents.values()]
        for digest in digests:
            services.files.contents.cache.remove(digest)
        await store.delete(keys)  # an empty store answers no request
        listed = (await client.get("/api/v1/chats/typed/files")).json()["items"]
    assert {file["name"]: file["media_type"] for file in listed} == {
        "picture": "image/png",
        "wrong.txt": "image/png",
        "large": "application/pdf",
        "plain.txt": "text/plain",
        "empty.png": "application/octet-stream",
    }


async def test_a_store_that_answers_503_lists_files_and_stores_none(
    fleet: Fleet, server: S3Server | None
) -> None:
    if server is None:  # a directory answers no requests
        return
    async with FaultyStore(server.port) as proxy:
        with pytest.MonkeyPatch.context() as environment:
            for name, value in variables_of(f"http://127.0.0.1:{proxy.port}").items():
                environment.setenv(name, value)
            async with client_of(fleet) as (client, services):
                info = await put(client, "down", "a.txt", b"kept")
                services.files.contents.cache.remove(hashlib.sha256(b"kept").hexdigest())
                proxy.faults = Faults(refuses=lambda *_: True)
                answer = await client.get(str(info["url"]))
                assert (answer.status_code, answer.json()["code"]) == (503, "storage_unavailable")
                refused = await client.put("/api/v1/chats/down/files/b.txt", content=b"new")
                assert refused.status_code == 503
                listed = (await client.get("/api/v1/chats/down/files")).json()["items"]
                assert [file["name"] for file in listed] == ["a.txt"]
                proxy.faults = Faults()
                assert (await client.get(str(info["url"]))).content == b"kept"
                await put(client, "down", "b.txt", b"new")


async def test_a_method_that_leaves_too_much_fails_with_the_setting(fleet: Fleet, kind: str) -> None:
    if kind != "directory":  # nothing is stored
        return
    fleet.start("methods")
    async with client_of(fleet) as (client, services):
        body = {"method": "fill", "args": [3 << 20], "chat_key": "filled"}
        headers = {"Idempotency-Key": "fill"}
        for _ in range(2):
            answer = await client.post("/api/v1/calls", json=body, headers=headers)
            assert (answer.status_code, answer.json()["code"]) == (507, "files_quota"), answer.text
            assert f"{2 << 20} bytes (NEKRO_SANDBOX__SHARED_BYTES)" in answer.json()["detail"]
        assert answer.headers["idempotency-replayed"] == "true"
        assert await names_in(services, "filled", "shared") == []
        answer = await client.post("/api/v1/calls", json={**body, "args": [1 << 20]})
        assert answer.status_code == 200, answer.text
        assert await names_in(services, "filled", "shared") == ["large"]


async def test_an_upload_is_written_once(
    gateway: tuple[Fleet, httpx.AsyncClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, client = gateway

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the content is copied")

    monkeypatch.setattr(FileCache, "add", refuse)
    content = os.urandom(2 << 20)  # more than a form keeps in memory
    await put(client, "once", "body.bin", content)
    files = {"file": ("form.bin", content + b"x")}
    answer = await client.post("/api/v1/chats/once/files", files=files)
    assert answer.status_code == 201, answer.text
    for name, expected in (("body.bin", content), ("form.bin", content + b"x")):
        info = await client.get("/api/v1/chats/once/file-info", params={"path": f"/app/uploads/{name}"})
        assert (await client.get(info.json()["url"])).content == expected


async def test_a_key_gets_back_what_retention_ends(gateway: tuple[Fleet, httpx.AsyncClient]) -> None:
    fleet, client = gateway
    headers = await limited(fleet)
    url = "/api/v1/chats/expiring/files/a.bin"
    for _ in range(2):  # the same content again counts once
        assert (await client.put(url, content=b"x" * 50_000, headers=headers)).status_code == 201
    assert 50_000 < await stored(client, headers) < 60_000
    database = Database(fleet.settings.database, fleet.settings.data_dir)
    async with database.begin() as tx:
        for table, column in (("file_entries", "added_at"), ("key_storage", "created_at")):
            await tx.connection.exec_driver_sql(f"UPDATE {table} SET {column} = '2000-01-01 00:00:00.000000'")
    retention = RetentionSettings()
    await StoredFileSweep(database, retention, idle_seconds=0).sweep()
    await delete_expired(database, retention)
    await database.dispose()
    assert (await client.get("/api/v1/chats/expiring/files")).json()["items"] == []
    assert await stored(client, headers) < 10_000  # events of the chat
