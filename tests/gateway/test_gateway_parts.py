"""Messages with pictures and files over HTTP: as parts, as a form, and in hooks of a worker."""

from __future__ import annotations

import base64
import json

import httpx
import pytest
from painter_model import PIXEL
from worker_fleet import Fleet

#: One kind of database: the rows of messages are tested on both.
pytestmark = pytest.mark.parametrize("fresh_fleet", ["sqlite"], indirect=True)

Gateway = tuple[Fleet, httpx.AsyncClient]
DATA_URL = "data:image/png;base64," + base64.b64encode(PIXEL).decode()
PATH = "/api/v1/chats/c/messages"


async def test_parts_are_stored_and_returned_in_order(gateway: Gateway) -> None:
    _, client = gateway
    uploaded = (await client.put("/api/v1/chats/c/files/table.csv", content=b"a,b\n")).json()
    parts = [
        {"type": "image", "data_url": DATA_URL, "name": "cat.png"},
        {"type": "text", "text": "and"},
        {"type": "file", "file_id": uploaded["id"]},
    ]
    posted = await client.post(PATH, json={"text": "look", "parts": parts, "user_id": "ada"})
    assert posted.status_code == 202, posted.text
    message = posted.json()["message"]
    assert message["text"] == "look\nand" and posted.json()["turn_id"]
    found = [(part["type"], part.get("text") or part["file"]["name"]) for part in message["parts"]]
    assert found == [("text", "look"), ("image", "cat.png"), ("text", "and"), ("file", "table.csv")]
    assert message["parts"][3]["file"] == uploaded
    assert (await client.get(message["parts"][1]["file"]["url"])).content == PIXEL
    (listed,) = (await client.get(PATH)).json()["items"]
    assert listed["parts"] == message["parts"]


async def test_a_form_carries_text_and_files(gateway: Gateway) -> None:
    _, client = gateway
    files = [("file", ("a.txt", b"one")), ("file", ("../a.txt", b"two")), ("file", ("p.png", PIXEL))]
    posted = await client.post(
        PATH, data={"text": "hello", "user_id": "ada", "to_agent": "false"}, files=files
    )
    assert posted.status_code == 202, posted.text
    parts = posted.json()["message"]["parts"]
    assert [part["type"] for part in parts] == ["text", "file", "file", "image"]
    assert [part["file"]["path"] for part in parts[1:]] == [
        "/app/uploads/a.txt",
        "/app/uploads/a-2.txt",
        "/app/uploads/p.png",
    ]
    assert posted.json()["turn_id"] is None
    form = {"user_id": "ada", "parts": json.dumps([{"type": "image", "data_url": DATA_URL}])}
    alone = await client.post(PATH, data=form, files={"file": ("b.txt", b"x")})
    assert [part["type"] for part in alone.json()["message"]["parts"]] == ["image", "file"]


async def test_a_repeated_form_is_one_message(gateway: Gateway) -> None:
    _, client = gateway

    async def send(text: str, content: bytes) -> httpx.Response:
        # Every request has another boundary.
        return await client.post(
            PATH,
            data={"text": text, "user_id": "ada"},
            files={"file": ("a.txt", content)},
            headers={"Idempotency-Key": "k1"},
        )

    first, again = await send("hello", b"one"), await send("hello", b"one")
    assert first.status_code == 202 and again.json() == first.json()
    assert again.headers["idempotency-replayed"] == "true"
    for other in (await send("hello", b"two"), await send("bye", b"one")):
        assert (other.status_code, other.json()["code"]) == (422, "idempotency_key_reused")
    assert len((await client.get(PATH)).json()["items"]) == 1
    files = (await client.get("/api/v1/chats/c/files")).json()["items"]
    assert [file["name"] for file in files] == ["a.txt"]


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image"},
        {"type": "image", "data_url": DATA_URL, "file_id": "x"},
        {"type": "image", "data_url": "data:image/png;base64,AAAA"},
        {"type": "image", "data_url": "data:image/png;base64,%%%"},
        {"type": "image", "data_url": "http://127.0.0.1/a.png"},
        {"type": "file", "file_id": "/etc/passwd"},
        {"type": "file", "file_id": "other"},
        {"type": "video", "data_url": DATA_URL},
        {"type": "text", "text": "x", "more": 1},
        {"type": "file", "data_url": "data:text/plain,x", "name": ".."},
    ],
)
async def test_a_part_that_is_not_valid_is_refused(gateway: Gateway, part: dict[str, object]) -> None:
    _, client = gateway
    refused = await client.post(PATH, json={"parts": [part], "user_id": "ada"})
    assert refused.status_code == 422, refused.text
    assert (await client.get(PATH)).status_code == 404 or (await client.get(PATH)).json()["items"] == []


async def test_files_of_another_chat_cannot_be_posted(gateway: Gateway) -> None:
    _, client = gateway
    theirs = (await client.put("/api/v1/chats/theirs/files/a.txt", content=b"secret")).json()
    part = {"type": "file", "file_id": theirs["id"]}
    assert (await client.post(PATH, json={"parts": [part], "user_id": "ada"})).status_code == 422


@pytest.mark.parametrize(
    ("content", "kind", "status"),
    [
        (b"hello", "text/plain", 415),
        (b"{", "application/json", 400),
        (b"{}", "application/json", 422),
        (b'{"text": " ", "user_id": "ada"}', "application/json", 422),
        (b"[" * 100_000, "application/json", 400),
        (b"--x\r\nbroken", "multipart/form-data; boundary=x", 400),
        (
            b'--x\r\nContent-Disposition: form-data; name="text"\r\n\r\nhi\r\n--x\r\n'
            b'Content-Disposition: form-data; name="f"; filename="a"\r\n\r\nhalf',
            "multipart/form-data; boundary=x",
            400,
        ),
        (b"x", "multipart/form-data", 400),
        (b"--x--\r\n", "multipart/form-data; boundary=x", 422),
    ],
)
async def test_a_body_of_another_form_is_refused(
    gateway: Gateway, content: bytes, kind: str, status: int
) -> None:
    _, client = gateway
    refused = await client.post(PATH, content=content, headers={"Content-Type": kind})
    assert refused.status_code == status, refused.text
    assert refused.headers["content-type"] == "application/problem+json"


async def test_a_form_has_limits(gateway: Gateway) -> None:
    _, client = gateway
    many = [("file", (f"{number}.txt", b"x")) for number in range(40)]
    refused = await client.post(PATH, data={"user_id": "ada"}, files=many)
    assert refused.status_code == 400 and "many files" in refused.json()["detail"].lower()
    fields = {f"f{number}": "x" for number in range(40)}
    refused = await client.post(PATH, data=fields, files={"file": ("a", b"x")})
    assert refused.status_code == 400
