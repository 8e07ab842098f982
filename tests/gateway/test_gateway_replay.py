"""Turns that run again in a new chat: what is copied, what stays, and who may."""

from __future__ import annotations

import base64
from typing import Any

import httpx

from nekro.app.services import Services
from nekro.operations.actor import Scope
from nekro.operations.keys import new_key, store_key
from nekro_agent.ports import MessageKind
from storage.repositories.messages import NewMessage

CHAT = "shop-1"
PICTURE = base64.b64encode(
    base64.b64decode(
        "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
    )
).decode()


async def post(http: httpx.AsyncClient, text: str, *parts: dict[str, Any]) -> str:
    """Post a message to the chat; returns its turn."""
    body = {"parts": [{"type": "text", "text": text}, *parts], "user_id": "u1", "user_name": "Ada"}
    answer = await http.post(f"/api/v1/chats/{CHAT}/messages", json=body)
    assert answer.status_code == 202, answer.text
    return str(answer.json()["turn_id"])


async def messages(http: httpx.AsyncClient, chat_key: str) -> list[dict[str, Any]]:
    answer = await http.get(f"/api/v1/chats/{chat_key}/messages", params={"order": "asc"})
    assert answer.status_code == 200, answer.text
    return list(answer.json()["items"])


async def test_a_turn_runs_again_in_a_chat_with_its_history(
    http: httpx.AsyncClient, services: Services
) -> None:
    await post(http, "before the reset")
    assert (await http.post(f"/api/v1/chats/{CHAT}/reset")).status_code == 200
    await post(http, "look", {"type": "image", "data_url": f"data:image/png;base64,{PICTURE}"})
    async with services.database.begin() as tx:
        await tx.messages.append(NewMessage(chat_key=CHAT, kind=MessageKind.ASSISTANT, text="a dot"))
        await tx.chats.use_model_group(CHAT, "small")
    turn = await post(
        http, "and this?", {"type": "file", "data_url": "data:text/plain;base64,aGk=", "name": "n.txt"}
    )
    await post(http, "later")
    before = await messages(http, CHAT)
    events = (await http.get("/api/v1/chats")).json()["items"][0]["last_event"]

    answer = await http.post(f"/api/v1/turns/{turn}/replay", json={})
    assert answer.status_code == 201, answer.text
    new = answer.json()
    assert new["chat_key"].startswith(f"{CHAT}-replay-") and new["turn_id"] != turn
    copied = await messages(http, new["chat_key"])
    assert [(one["kind"], one["text"]) for one in copied] == [
        ("user", before[1]["text"]),
        ("assistant", "a dot"),
        ("user", "and this?"),
    ]
    assert copied[0]["created_at"] == before[1]["created_at"] and copied[0]["id"] != before[1]["id"]
    assert [one["turn_id"] for one in copied] == [None, None, new["turn_id"]]
    assert (copied[2]["sender_id"], copied[2]["sender_name"]) == ("u1", "Ada")
    for message, content in ((copied[0], base64.b64decode(PICTURE)), (copied[2], b"hi")):
        file = message["parts"][-1]["file"]
        assert f"/chats/{new['chat_key']}/" in file["url"]
        assert (await http.get(file["url"])).content == content
    tree = (await http.get(f"/api/v1/turns/{new['turn_id']}")).json()
    assert (tree["chat_key"], tree["state"]) == (new["chat_key"], "waiting")
    async with services.database.read() as tx:
        rows = await tx.connection.exec_driver_sql("SELECT chat_key, model_group FROM chats")
        assert dict(rows.all())[new["chat_key"]] == "small"
    assert await messages(http, CHAT) == before
    listed = {one["chat_key"]: one for one in (await http.get("/api/v1/chats")).json()["items"]}
    assert listed[CHAT]["last_event"] == events
    # Copies are not news: the new chat's stream begins with the message that was posted.
    assert listed[new["chat_key"]]["last_event"] == 2


async def test_a_replay_needs_a_new_chat_and_a_persons_message(
    http: httpx.AsyncClient, services: Services
) -> None:
    turn = await post(http, "hello")
    taken = await http.post(f"/api/v1/turns/{turn}/replay", json={"chat_key": CHAT})
    assert (taken.status_code, taken.json()["code"]) == (409, "chat_exists")
    made = await http.post(f"/api/v1/turns/{turn}/replay", json={"chat_key": "a/new one"})
    assert made.status_code == 201 and made.json()["chat_key"] == "a/new one"
    again = await http.post(f"/api/v1/turns/{turn}/replay", json={"chat_key": "a/new one"})
    assert again.status_code == 409
    once = {"Idempotency-Key": "k"}
    first, second = [
        (await http.post(f"/api/v1/turns/{turn}/replay", json={}, headers=once)).json() for _ in range(2)
    ]
    assert first == second
    assert (await http.post("/api/v1/turns/none/replay", json={})).status_code == 404
    async with services.database.begin() as tx:
        await tx.connection.exec_driver_sql("DELETE FROM messages")
    gone = await http.post(f"/api/v1/turns/{turn}/replay", json={})
    assert (gone.status_code, gone.json()["code"]) == (409, "turn_not_replayable")


async def test_a_key_replays_what_it_reads_where_it_posts(
    http: httpx.AsyncClient, services: Services
) -> None:
    turn = await post(http, "hello")

    async def status(chat_key: str | None, *scopes: Scope, **limits: Any) -> int:
        new, key = new_key("test", scopes=scopes, **limits)
        await store_key(services.database, new, by=None, request_id=None)
        answer = await http.post(
            f"/api/v1/turns/{turn}/replay",
            json={"chat_key": chat_key},
            headers={"Authorization": f"Bearer {key}"},
        )
        return answer.status_code

    both = (Scope.READ, Scope.POST)
    assert await status(None, Scope.READ) == await status(None, Scope.POST) == 403
    assert await status(None, *both, chats="other*") == 404
    assert await status(None, *both, chats=CHAT) == 404  # it may not post in another chat
    assert await status("other", *both, chats="shop-*") == 404
    assert await status(None, *both, user_id="u2") == 403
    assert await status(None, *both, chats="shop-*", user_id="u1") == 201


async def test_a_turn_goes_on_only_from_a_call_that_it_has_made(
    http: httpx.AsyncClient, services: Services
) -> None:
    turn = await post(http, "hello")
    body = {"call_id": "none"}
    runs = await http.post(f"/api/v1/turns/{turn}/replay", json=body)
    assert (runs.status_code, runs.json()["code"]) == (409, "conflict") and "still runs" in runs.text
    assert (await http.post(f"/api/v1/turns/{turn}/cancel")).status_code == 200
    missing = await http.post(f"/api/v1/turns/{turn}/replay", json=body)
    assert missing.status_code == 404 and "has no call none" in missing.text
    new, key = new_key("test", scopes=(Scope.READ,))
    await store_key(services.database, new, by=None, request_id=None)
    refused = await http.post(
        f"/api/v1/turns/{turn}/replay", json=body, headers={"Authorization": f"Bearer {key}"}
    )
    assert refused.status_code == 403
    assert [one["chat_key"] for one in (await http.get("/api/v1/chats")).json()["items"]] == [CHAT]
