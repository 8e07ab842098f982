"""Files of chats over HTTP: stored, listed, served in ranges, removed, and never those of others."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import pytest
from gateway_server import served
from worker_fleet import Fleet

from nekro.app.chats.attachments import FileIds
from nekro.app.services import Services
from nekro.gateway.app import create_app
from nekro_agent.errors import NotFoundError
from storage.files.areas import DataAreas

#: A picture of one red pixel.
PIXEL = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGP4z8AAAAMBAQDJ/pLvAAAAAElFTkSuQmCC"
)


@pytest.fixture(scope="module")
def database_url(sqlite_url: str) -> str:
    """One kind of database: files are on the disk, and their rows are tested on both."""
    return sqlite_url


@asynccontextmanager
async def client_of(fleet: Fleet) -> AsyncIterator[tuple[httpx.AsyncClient, Services]]:
    app = create_app(fleet.settings)
    async with served(app) as client:
        await client.get("/healthz")  # answered when the services have started
        yield client, app.state.services


@asynccontextmanager
async def area_of(services: Services, key: str, kind: str = "shared") -> AsyncIterator[Path]:
    """The directory of an area for a program that changes it; with a store, the changes are committed."""
    chat, areas = await services.chat(key), services.areas
    if isinstance(areas, DataAreas):
        yield areas.uploads_dir(key) if kind == "uploads" else areas.shared_dir(chat.container_key)
        return
    async with areas.scope("test", chat_key=key, container_key=chat.container_key):
        path = areas.uploads_dir if kind == "uploads" else areas.shared_dir
        yield await asyncio.to_thread(path, key if kind == "uploads" else chat.container_key)


async def names_in(services: Services, key: str, kind: str = "uploads") -> list[str]:
    """All names in an area, also hidden ones."""
    async with area_of(services, key, kind) as area:
        return [path.name for path in area.iterdir()]


async def put(client: httpx.AsyncClient, chat: str, name: str, content: bytes) -> dict[str, object]:
    answer = await client.put(f"/api/v1/chats/{chat}/files/{name}", content=content)
    assert answer.status_code == 201, answer.text
    info: dict[str, object] = answer.json()
    assert answer.headers["location"] == info["url"]
    return info


async def test_a_file_that_is_put_can_be_read_listed_and_deleted(fleet: Fleet) -> None:
    async with client_of(fleet) as (client, services):
        content = bytes(range(256)) * 4096
        info = await put(client, "round", "data.bin", content)
        assert (info["name"], info["path"]) == ("data.bin", "/app/uploads/data.bin")
        assert (info["size_bytes"], info["sha256"]) == (1 << 20, hashlib.sha256(content).hexdigest())
        async with area_of(services, "round", "uploads") as uploads:
            assert (uploads / "data.bin").read_bytes() == content
        got = await client.get(str(info["url"]))
        assert got.content == content and got.headers["content-length"] == str(1 << 20)
        async with area_of(services, "round") as shared:
            (shared / "sub").mkdir()
            (shared / "sub" / "notes.txt").write_text("mine")
        listed = (await client.get("/api/v1/chats/round/files")).json()
        assert [file["path"] for file in listed["items"]] == [
            "/app/shared/sub/notes.txt",
            "/app/uploads/data.bin",
        ]
        assert [file["id"] for file in listed["items"]][1] == info["id"]
        notes = await client.get(listed["items"][0]["url"])
        assert notes.text == "mine"
        assert (await client.delete(str(info["url"]))).status_code == 204
        gone = await client.get(str(info["url"]))
        assert (gone.status_code, gone.json()["code"]) == (404, "not_found")
        assert await names_in(services, "round") == []
        assert not list(Path(fleet.settings.data_dir, "staging").iterdir())


async def test_lists_are_paged_by_cursor(fleet: Fleet) -> None:
    async with client_of(fleet) as (client, _):
        for number in range(5):
            await put(client, "paged", f"{number}.txt", b"x")
        seen, cursor = [], None
        while True:
            params = {"limit": "2"} | ({"cursor": cursor} if cursor else {})
            page = (await client.get("/api/v1/chats/paged/files", params=params)).json()
            seen += [file["name"] for file in page["items"]]
            cursor = page["next_cursor"]
            if cursor is None:
                break
        assert seen == [f"{number}.txt" for number in range(5)]
        assert (await client.get("/api/v1/chats/paged/files", params={"cursor": "zzz"})).status_code == 404
        assert (await client.get("/api/v1/chats/paged/files", params={"limit": "0"})).status_code == 422


@pytest.mark.parametrize(
    ("asked", "status", "content_range", "content"),
    [
        ("bytes=0-3", 206, "bytes 0-3/10", b"0123"),
        ("bytes=8-", 206, "bytes 8-9/10", b"89"),
        ("bytes=8-100", 206, "bytes 8-9/10", b"89"),
        ("bytes=-3", 206, "bytes 7-9/10", b"789"),
        ("bytes=-100", 206, "bytes 0-9/10", b"0123456789"),
        ("bytes=10-", 416, "bytes */10", b""),
        ("bytes=-0", 416, "bytes */10", b""),
        ("bytes=5-2", 200, None, b"0123456789"),
        ("bytes=0-1,3-4", 200, None, b"0123456789"),
        ("lines=1-2", 200, None, b"0123456789"),
        ("bytes=99999999999999999999-", 200, None, b"0123456789"),
    ],
)
async def test_ranges_follow_the_standard(
    fleet: Fleet, asked: str, status: int, content_range: str | None, content: bytes
) -> None:
    async with client_of(fleet) as (client, _):
        info = await put(client, "ranges", "ten.txt", b"0123456789")
        got = await client.get(str(info["url"]), headers={"Range": asked})
        assert (got.status_code, got.headers.get("content-range"), got.content) == (
            status,
            content_range,
            content,
        )


async def test_validators_save_repeated_reading(fleet: Fleet) -> None:
    async with client_of(fleet) as (client, _):
        url = str((await put(client, "tags", "a.txt", b"0123456789"))["url"])
        etag = (await client.get(url)).headers["etag"]
        assert (await client.get(url, headers={"If-None-Match": etag})).status_code == 304
        assert (await client.get(url, headers={"If-None-Match": '"x", ' + etag})).status_code == 304
        part = await client.get(url, headers={"Range": "bytes=1-2", "If-Range": etag})
        assert (part.status_code, part.content) == (206, b"12")
        whole = await client.get(url, headers={"Range": "bytes=1-2", "If-Range": '"other"'})
        assert (whole.status_code, len(whole.content)) == (200, 10)
        head = await client.head(url)
        assert (head.status_code, head.headers["content-length"], head.content) == (200, "10", b"")


@pytest.mark.parametrize(
    ("name", "content", "media_type", "disposition"),
    [
        ("cat.png", PIXEL, "image/png", "inline"),
        ("cat.dat", PIXEL, "image/png", "inline"),
        ("page.html", b"<script>alert(1)</script>", "text/html", "attachment"),
        ("page.png", b"<script>alert(1)</script>", "application/octet-stream", "attachment"),
        ("drawing.svg", b"<svg onload='alert(1)'/>", "image/svg+xml", "attachment"),
        ('übung \u202e".txt', b"x", "text/plain", "attachment"),
    ],
)
async def test_browsers_do_not_run_files(
    fleet: Fleet, name: str, content: bytes, media_type: str, disposition: str
) -> None:
    async with client_of(fleet) as (client, _):
        answer = await client.post("/api/v1/chats/active/files", files={"file": (name, content)})
        (info,) = answer.json()
        headers = (await client.get(info["url"])).headers
        assert headers["content-type"] == media_type
        assert headers["content-disposition"].startswith(f"{disposition}; filename*=UTF-8''")
        assert headers["content-disposition"].isascii() and "\n" not in headers["content-disposition"]
        assert headers["x-content-type-options"] == "nosniff"
        assert "sandbox" in headers["content-security-policy"]


async def test_a_list_names_the_type_of_each_content(fleet: Fleet) -> None:
    async with client_of(fleet) as (client, services):
        contents = {
            "chart": PIXEL,
            "photo.jpg": PIXEL,
            "page.png": b"<svg>",
            "report": b"%PDF-1.7",
            "a.csv": b"a",
        }
        async with area_of(services, "kinds") as shared:
            for name, content in contents.items():
                (shared / name).write_bytes(content)
        listed = (await client.get("/api/v1/chats/kinds/files", params={"area": "shared"})).json()["items"]
        assert {file["name"]: file["media_type"] for file in listed} == {
            "chart": "image/png",
            "photo.jpg": "image/png",
            "page.png": "application/octet-stream",
            "report": "application/pdf",
            "a.csv": "text/csv",
        }
        for file in listed:
            headers = (await client.get(file["url"])).headers
            assert headers["content-type"] == file["media_type"]


async def test_a_body_without_a_file_is_refused(fleet: Fleet) -> None:
    async with client_of(fleet) as (client, _):
        answer = await client.post("/api/v1/chats/formless/files", content=b"the file")
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid_request")
    assert "multipart/form-data" in answer.json()["detail"]


async def test_a_name_in_use_is_not_overwritten(fleet: Fleet) -> None:
    async with client_of(fleet) as (client, _):
        first = await put(client, "names", "a.txt", b"one")
        assert await put(client, "names", "a.txt", b"one") == first
        refused = await client.put("/api/v1/chats/names/files/a.txt", content=b"two")
        assert (refused.status_code, refused.json()["code"]) == (409, "conflict")
        answer = await client.post(
            "/api/v1/chats/names/files",
            files=[("file", ("a.txt", b"two")), ("file", ("../../b.txt", b"three"))],
        )
        assert [file["path"] for file in answer.json()] == ["/app/uploads/a-2.txt", "/app/uploads/b.txt"]
        assert [file["name"] for file in answer.json()] == ["a.txt", "b.txt"]
        assert (await client.get(str(first["url"]))).content == b"one"


@pytest.mark.parametrize("name", ["..", ".hidden", "a%5Cb.txt", "%00", "%E2%80%AE%0A", "x" * 300])
async def test_a_name_that_is_no_plain_name_is_refused(fleet: Fleet, name: str) -> None:
    async with client_of(fleet) as (client, services):
        answer = await client.put(f"/api/v1/chats/plain/files/{name}", content=b"x")
        assert answer.status_code in (404, 405, 422), answer.text
        assert await names_in(services, "plain") == []


async def test_an_id_is_valid_for_its_chat_and_version_only(fleet: Fleet) -> None:
    async with client_of(fleet) as (client, services):
        info = await put(client, "mine", "a.txt", b"secret")
        await put(client, "theirs", "a.txt", b"other")
        assert (await client.get(f"/api/v1/chats/theirs/files/{info['id']}")).status_code == 404
        file_id = str(info["id"])
        for forged in (file_id[:-1], file_id + "AAAA", "a.txt", "..%2Fa.txt", "A" * 5000, "%F0%9F%98%80"):
            assert (await client.get(f"/api/v1/chats/mine/files/{forged}")).status_code == 404
        raw = base64.urlsafe_b64encode(bytes(16) + json.dumps(["/etc/passwd", None]).encode()).decode()
        assert (await client.get(f"/api/v1/chats/mine/files/{raw.rstrip('=')}")).status_code == 404
        async with area_of(services, "mine", "uploads") as uploads:
            (uploads / "a.txt").write_text("another")
            os.utime(uploads / "a.txt", ns=(1, 1))
        changed = await client.get(str(info["url"]))
        assert (changed.status_code, changed.json()["code"]) == (410, "file_changed")


async def test_links_that_sandboxed_code_made_lead_nowhere(fleet: Fleet, tmp_path: Path) -> None:
    (tmp_path / "secret.txt").write_text("secret")
    (tmp_path / "inside").mkdir()
    (tmp_path / "inside" / "a.txt").write_text("secret")
    async with client_of(fleet) as (client, services):
        async with area_of(services, "linked") as shared:
            (shared / "folder").mkdir()
            for name in ("a.txt", "folder/a.txt", "hard.txt"):
                (shared / name).write_text("mine")
        listed = {
            file["path"]: file["url"]
            for file in (await client.get("/api/v1/chats/linked/files")).json()["items"]
        }
        assert (await client.get(listed["/app/shared/a.txt"])).text == "mine"
        (shared / "a.txt").unlink()
        (shared / "a.txt").symlink_to(tmp_path / "secret.txt")
        (shared / "folder" / "a.txt").unlink()
        (shared / "folder").rmdir()
        (shared / "folder").symlink_to(tmp_path / "inside")
        (shared / "hard.txt").unlink()
        os.link(tmp_path / "secret.txt", shared / "hard.txt")
        os.mkfifo(shared / "pipe.txt")
        for path in ("/app/shared/a.txt", "/app/shared/folder/a.txt", "/app/shared/hard.txt"):
            assert (await client.get(listed[path])).status_code == 404
            assert (await client.delete(listed[path])).status_code == 404
        assert (tmp_path / "inside" / "a.txt").exists()
        names = [file["path"] for file in (await client.get("/api/v1/chats/linked/files")).json()["items"]]
        assert names == ["/app/shared/hard.txt"]


async def test_a_full_area_refuses_files(fleet: Fleet) -> None:
    settings = fleet.settings.model_copy(
        update={"uploads": fleet.settings.uploads.model_copy(update={"chat_bytes": 1 << 20})}
    )
    async with served(create_app(settings)) as client:
        answer = await client.put("/api/v1/chats/full/files/large.bin", content=os.urandom((1 << 20) + 1))
        assert (answer.status_code, answer.json()["code"]) == (507, "upload_quota")
        listed = await client.get("/api/v1/chats/full/files")
        assert listed.json()["items"] == []


async def test_a_body_that_ends_early_leaves_nothing(fleet: Fleet) -> None:
    async def half() -> AsyncIterator[bytes]:
        yield b"x" * 70_000
        raise ConnectionError("cut")

    async with client_of(fleet) as (client, services):
        with pytest.raises(ConnectionError):
            await client.put("/api/v1/chats/half/files/a.bin", content=half())
        with pytest.raises(ConnectionError):
            headers = {"Content-Type": "multipart/form-data; boundary=x"}
            await client.post("/api/v1/chats/half/files", content=half(), headers=headers)
        for content in (b"", b"--x\r\n", b'--x\r\nContent-Disposition: form-data; name="a\r\n\r\n'):
            bad = await client.post("/api/v1/chats/half/files", content=content, headers=headers)
            assert bad.status_code == 400, bad.text
        assert await names_in(services, "half") == []


@pytest.mark.parametrize(
    ("disposition", "stored"),
    [
        ("form-data; name=\"f\"; filename*=UTF-8''%E5%A0%B1%E5%91%8A.txt", "報告.txt"),
        ("form-data; name=f; filename=old.txt; filename*=UTF-8''new.txt", "new.txt"),
        ('form-data; name="f"; filename="報告.txt"', "報告.txt"),
        (r'form-data; name="f"; filename="a\"b.txt"', 'a"b.txt'),
        ('form-data; name="f"; filename="=?UTF-8?B?5aCx5ZGKLnR4dA==?="', "報告.txt"),
        ("form-data; name=f; filename*=UTF-8''..%2F..%2Fup.txt", "up.txt"),
        (r'form-data; name="f"; filename="C:\temp\a.txt"', "a.txt"),
        ('form-data; name="own"; filename=""', "own"),
        ('form-data; name="x; filename=evil"; filename="ok.txt"', "ok.txt"),
    ],
)
async def test_a_part_is_stored_under_the_name_that_it_states(
    fleet: Fleet, disposition: str, stored: str
) -> None:
    body = b"--x\r\nContent-Disposition: %s\r\n\r\nhello\r\n--x--\r\n" % disposition.encode()
    async with client_of(fleet) as (client, _):
        headers = {"Content-Type": "multipart/form-data; boundary=x"}
        answer = await client.post("/api/v1/chats/named/files", content=body, headers=headers)
        assert answer.status_code == 201, answer.text
        (file,) = answer.json()
        assert (file["name"], file["size_bytes"]) == (stored, 5)


async def test_a_part_without_a_field_name_or_a_usable_file_name_is_refused(fleet: Fleet) -> None:
    async with client_of(fleet) as (client, services):
        for disposition in (
            "form-data; filename*=UTF-8''a.txt", 'form-data; filename="a.txt"', "form-data",
            'form-data; name="f"; filename=".."', "form-data; name=f; filename*=UTF-8''..%2F",
        ):  # fmt: skip
            body = f"--x\r\nContent-Disposition: {disposition}\r\n\r\nhello\r\n--x--\r\n"
            headers = {"Content-Type": "multipart/form-data; boundary=x"}
            answer = await client.post("/api/v1/chats/nameless/files", content=body, headers=headers)
            assert answer.status_code in (400, 422), answer.text
            assert "name" in answer.json()["detail"]
        assert await names_in(services, "nameless") == []


def test_links_expire_and_cannot_be_forged() -> None:
    ids = FileIds("key")
    soon, past = datetime.now(UTC) + timedelta(hours=1), datetime.now(UTC) - timedelta(hours=1)
    token = ids.link("a", "file", until=soon)
    assert ids.followed(token).chat_key == "a"
    late, foreign = ids.link("a", "file", until=past), FileIds("other").link("a", "file", until=soon)
    for bad in (late, foreign, token[:-2], "é"):
        with pytest.raises(NotFoundError):
            ids.followed(bad)
    with pytest.raises(NotFoundError):
        ids.read("a", token)
