"""Lists of chats and of their turns: order, pages, search, failures, and what a key sees."""

from __future__ import annotations

import base64
import json
from datetime import timedelta
from typing import Any

import httpx
import pytest
from sqlalchemy import text as sql

from nekro.app.chats.events import message_event, record, turn_started
from nekro.app.rounds.turn_ends import TurnFault, turn_ends
from nekro.app.services import Services
from nekro.operations import chats as routes
from nekro.operations import turn_lists
from nekro.operations.actor import Scope
from nekro.operations.chats import words_of
from nekro.operations.keys import new_key, store_key
from nekro_agent.ports import MessageKind
from nekro_agent.shared_clock import shared_time
from storage.repositories.messages import NewMessage
from storage.repositories.rounds import Round, RoundReport, RoundRequest
from storage.states import RoundState, TriggerKind


async def say(services: Services, chat_key: str, text: str, *, kind: MessageKind = MessageKind.USER) -> str:
    """Add a message with its event; returns its id."""
    async with services.database.begin() as tx:
        await tx.chats.ensure(chat_key)
        row, _ = await tx.messages.append(NewMessage(chat_key=chat_key, kind=kind, text=text))
        record(tx, services.publisher, chat_key, message_event(row))
    return row.id


async def begin(services: Services, chat_key: str, text: str = "hello") -> Round:
    """Begin a turn by a message; returns its first round, which waits."""
    message_id = await say(services, chat_key, text)
    request = RoundRequest(
        chat_key=chat_key, trigger_kind=TriggerKind.MESSAGE, trigger_id=message_id, user_id="u1"
    )
    async with services.database.begin() as tx:
        first, _ = await tx.rounds.request(request)
        record(tx, services.publisher, chat_key, turn_started(first))
    return first


async def end(
    services: Services, chat_key: str, *, fault: TurnFault | None = None, cost: float = 0.5
) -> Round:
    """Run the oldest waiting round of a chat."""
    async with services.database.begin() as tx:
        fence = await tx.chats.acquire(chat_key, owner="w", lease_seconds=30)
        assert fence is not None
        claimed = await tx.rounds.claim_next(chat_key, fence=fence, worker="w")
        assert claimed is not None
        report = RoundReport(model="m1", prompt_tokens=10, completion_tokens=2, cost=cost)
        ended = await tx.rounds.finish(claimed.round.id, fence=fence, state=RoundState.DONE, report=report)
        events = await turn_ends(tx, [ended], merged=claimed.merged, fault=fault)
        record(tx, services.publisher, chat_key, *events)
        await tx.chats.release(chat_key, fence=fence)
    return ended


async def listed(http: httpx.AsyncClient, **params: Any) -> list[dict[str, Any]]:
    headers = params.pop("headers", {})
    answer = await http.get("/api/v1/chats", params=params, headers=headers)
    assert answer.status_code == 200, answer.text
    return list(answer.json()["items"])


async def test_the_chat_with_the_newest_activity_comes_first(
    http: httpx.AsyncClient, services: Services
) -> None:
    for chat_key in ("a", "b", "c"):
        await say(services, chat_key, f"first of {chat_key}")
    await say(services, "a", "x" * 500)
    await say(services, "a", "for the agent", kind=MessageKind.SYSTEM)
    await begin(services, "b", "how are you?")
    found = await listed(http)
    assert [chat["chat_key"] for chat in found] == ["b", "a", "c"]
    first, second, _ = found
    assert (first["open_rounds"], second["open_rounds"]) == (1, 0)
    assert (first["last_message"]["text"], first["last_message"]["kind"]) == ("how are you?", "user")
    assert second["last_message"]["text"] == "x" * 200 and second["last_event"] == 3
    assert second["failures"] is None
    pages: list[str] = []
    cursor = None
    while True:
        page = (
            await http.get("/api/v1/chats", params={"limit": 1} | ({"cursor": cursor} if cursor else {}))
        ).json()
        pages += [chat["chat_key"] for chat in page["items"]]
        cursor = page["next_cursor"]
        if cursor is None:
            break
    assert pages == ["b", "a", "c"]
    early = base64.urlsafe_b64encode(b"0001-01-01T00:00:00+14:00 a").decode().rstrip("=")
    for wrong in ("x", "bm8gdGltZQ", "MjAyNi0wMS0wMSBh", early):
        refused = await http.get("/api/v1/chats", params={"cursor": wrong})
        assert (refused.status_code, refused.json()["code"]) == (422, "cursor_invalid"), wrong


async def test_chats_are_found_by_a_part_of_key_or_name(http: httpx.AsyncClient, services: Services) -> None:
    for chat_key, name in (("sse-Wx_42", "Garden"), ("web-100%_x", None), ("other", "Wild garden")):
        async with services.database.begin() as tx:
            await tx.chats.ensure(chat_key, channel_name=name)
    for text, keys in (
        ("GARDEN", {"sse-Wx_42", "other"}),
        ("wx_", {"sse-Wx_42"}),
        ("0%_", {"web-100%_x"}),
        ("%", {"web-100%_x"}),
        ("nothing", set()),
        ("\0", set()),
        ("", {"sse-Wx_42", "web-100%_x", "other"}),
    ):
        assert {chat["chat_key"] for chat in await listed(http, q=text)} == keys, text


async def test_a_chat_has_the_first_words_as_its_title_unless_the_platform_or_the_api_names_it(
    http: httpx.AsyncClient, services: Services
) -> None:
    async def title(chat_key: str) -> Any:
        (listed_one,) = await listed(http, q=chat_key)
        answer = await http.get(f"/api/v1/chats/{chat_key}")
        assert (answer.status_code, answer.json()) == (200, listed_one)
        return listed_one["title"]

    await say(services, "web-7", "Welcome!", kind=MessageKind.ASSISTANT)
    assert await title("web-7") is None  # people have said nothing
    await say(services, "web-7", "")
    await say(services, "web-7", "  Plan\n\u202etonight's\u200b dinner\x00 \ud800\n```python\ncook()\n```")
    await say(services, "web-7", "and tomorrow's")
    assert await title("web-7") == "Plan tonight's dinner"
    async with services.database.begin() as tx:
        await tx.chats.ensure("web-7", channel_name="The\u200b kitchen")
    assert await title("web-7") == "The kitchen"
    given = await http.patch("/api/v1/chats/web-7", json={"title": " My\n\u2066dinner\u2069  plan "})
    assert (given.status_code, given.json()) == (200, {"chat_key": "web-7", "title": "My dinner plan"})
    assert await title("web-7") == "My dinner plan"
    assert {chat["chat_key"] for chat in await listed(http, q="DINNER plan")} == {"web-7"}
    for nothing in ("\u200b \ufeff", "", None):
        await http.patch("/api/v1/chats/web-7", json={"title": "x"})
        taken = await http.patch("/api/v1/chats/web-7", json={"title": nothing})
        assert taken.json() == {"chat_key": "web-7", "title": None}
        assert await title("web-7") == "The kitchen"


async def test_a_title_is_given_with_the_right_to_post_in_the_chat(
    http: httpx.AsyncClient, services: Services
) -> None:
    await say(services, "shop-1", "secret words")

    async def key(*scopes: Scope, chats: str = "shop-*") -> dict[str, str]:
        new, secret = new_key("test", scopes=scopes, chats=chats)
        await store_key(services.database, new, by=None, request_id=None)
        return {"Authorization": f"Bearer {secret}"}

    path = "/api/v1/chats/shop-1"
    poster, reader = await key(Scope.POST), await key(Scope.READ)
    assert (await http.patch(path, json={"title": "a"}, headers=reader)).status_code == 403
    assert (await http.get(path, headers=poster)).status_code == 403
    answer = await http.patch(path, json={"title": None}, headers=poster)
    assert answer.status_code == 200 and "secret" not in answer.text
    other = await key(Scope.POST, Scope.READ, chats="web-*")
    assert (await http.patch(path, json={"title": "a"}, headers=other)).status_code in (403, 404)
    assert (await http.get(path, headers=other)).status_code in (403, 404)
    assert (await http.patch("/api/v1/chats/none", json={"title": "a"})).status_code == 404
    assert (await http.get("/api/v1/chats/none")).status_code == 404
    for wrong in ({"title": "x" * 201}, {}, {"title": 7}, {"title": "a", "name": "b"}):
        assert (await http.patch(path, json=wrong)).status_code == 422, wrong


@pytest.mark.parametrize(
    ("text", "title"),
    [
        ("", None),
        (" \u200b\n", None),
        ("a" * 60, "a" * 60),
        ("a" * 61, "a" * 60 + "…"),
        ("word " * 30, "word " * 11 + "word…"),
        ("x " + "y" * 100, "x " + "y" * 58 + "…"),
        ("one, " * 13, "one, " * 11 + "one…"),
        ("猫" * 100, "猫" * 60 + "…"),
        ("```\nls\n``` please", "ls please"),
        ("Run ```ls```", "Run"),
        ("👨\u200d👩\u200d👧 hello", "👨\u200d👩\u200d👧 hello"),
    ],
)
def test_first_words_are_cut_between_words(text: str, title: str | None) -> None:
    assert words_of(text) == title


async def test_a_key_lists_its_chats_only(
    http: httpx.AsyncClient, services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes, "_BATCH", 2)
    for number in range(5):
        for name in ("shop-", "Shop-", "shop_"):
            await say(services, f"{name}{number}", "x")

    async def key(*scopes: Scope, chats: str) -> dict[str, str]:
        new, secret = new_key("test", scopes=scopes, chats=chats)
        await store_key(services.database, new, by=None, request_id=None)
        return {"Authorization": f"Bearer {secret}"}

    cursors: list[str] = []

    async def all_of(headers: dict[str, str]) -> list[str]:
        found: list[str] = []
        cursor: dict[str, str] = {}
        while True:
            answer = await http.get("/api/v1/chats", params={"limit": 2, **cursor}, headers=headers)
            page = answer.json()
            found += [chat["chat_key"] for chat in page["items"]]
            if page["next_cursor"] is None:
                return found
            cursor = {"cursor": page["next_cursor"]}
            cursors.append(page["next_cursor"])

    for pattern, keys in (
        ("shop-*", [f"shop-{number}" for number in (4, 3, 2, 1, 0)]),
        ("*[_-]3", ["shop_3", "Shop-3", "shop-3"]),
        ("shop-1", ["shop-1"]),
        ("none*", []),
    ):
        assert await all_of(await key(Scope.READ, chats=pattern)) == keys, pattern
    monkeypatch.setattr(routes, "_MOST_LOOKED_AT", 4)
    headers = await key(Scope.READ, chats="*-0")
    page = (await http.get("/api/v1/chats", headers=headers)).json()
    assert page["items"] == [] and page["next_cursor"]  # it says that it has not looked at all
    cursors.clear()
    assert await all_of(headers) == ["Shop-0", "shop-0"]
    # Nor do its cursors name chats that the key does not have.
    named = {base64.urlsafe_b64decode(f"{cursor}==").decode().partition(" ")[2] for cursor in cursors}
    assert "" in named and named <= {"", "Shop-0", "shop-0"}
    for number in (0, 1, 2):  # many chats may have been active at the same time
        async with services.database.begin() as tx:
            later = sql(f"UPDATE chats SET active_at = :at WHERE chat_key LIKE '%{number}'")
            await tx.connection.execute(later, {"at": shared_time().isoformat(sep=" ")[:26]})
        assert sorted(await all_of(headers)) == ["Shop-0", "shop-0"]
    for path in ("/api/v1/chats", "/api/v1/chats/shop-1/turns"):
        poster = await key(Scope.POST, chats="*")
        assert (await http.get(path, headers=poster)).status_code == 403
    assert (await http.get("/api/v1/chats/other/turns", headers=headers)).status_code == 404


async def test_failures_since_the_reader_looked_are_counted(
    http: httpx.AsyncClient, services: Services
) -> None:
    before = shared_time() - timedelta(seconds=5)
    await begin(services, "a")
    await end(services, "a", fault=TurnFault(code="turn_limit", text='{"state": "done"'))
    await begin(services, "a")
    await end(services, "a")
    await begin(services, "b", '{"state": "failed"')
    await end(services, "b")

    async def failures(since: Any) -> dict[str, int]:
        found = await listed(http, failures_since=since.isoformat())
        return {chat["chat_key"]: chat["failures"] for chat in found}

    assert await failures(before) == {"a": 1, "b": 0}
    assert await failures(shared_time() + timedelta(seconds=5)) == {"a": 0, "b": 0}
    for wrong in ("2026-01-01T00:00:00", "0001-01-01T00:00:00+14:00", "x"):
        assert (await http.get("/api/v1/chats", params={"failures_since": wrong})).status_code == 422, wrong


async def test_turns_of_one_state_are_listed_by_pages(
    http: httpx.AsyncClient, services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = []
    for number in range(9):
        done.append((await begin(services, "a")).id)
        await end(services, "a", fault=None if number % 4 == 0 else TurnFault(code="no_answer", text="none"))
    wanted = [one for number, one in enumerate(done) if number % 4 == 0][::-1]

    async def pages(state: str, limit: int) -> list[list[str]]:
        found, cursor = [], None
        while True:
            params = {"state": state, "limit": limit, **({"cursor": cursor} if cursor else {})}
            page = (await http.get("/api/v1/chats/a/turns", params=params)).json()
            found.append([item["id"] for item in page["items"]])
            cursor = page["next_cursor"]
            if cursor is None:
                return found

    assert await pages("done", 10) == [wanted]
    assert await pages("cancelled", 10) == [[]]
    monkeypatch.setattr(turn_lists, "_BATCH", 2)
    monkeypatch.setattr(turn_lists, "_MOST_SEEN", 2)
    short = await pages("done", 2)
    assert [one for page in short for one in page] == wanted
    wrong = await http.get("/api/v1/chats/a/turns", params={"state": "merged"})
    assert wrong.status_code == 422


async def test_turns_are_found_by_the_beginning_of_their_ids(
    http: httpx.AsyncClient, services: Services
) -> None:
    ids = [(await begin(services, chat_key)).id for chat_key in ("a", "a", "b")]

    async def found(beginning: str, path: str = "/turns", **headers: str) -> list[str]:
        answer = await http.get(f"/api/v1{path}", params={"id": beginning}, headers=headers)
        return [item["id"] for item in answer.json()["items"]]

    assert await found("") == ids[::-1] and await found("%") == await found("_") == []
    for turn_id in ids:
        assert await found(turn_id[:20]) == await found(turn_id) == [turn_id]
    assert await found(ids[0], "/chats/a/turns") == [ids[0]] and await found(ids[2], "/chats/a/turns") == []
    assert await found(ids[0], **await key_of(services, Scope.READ, chats="b")) == []


@pytest.mark.parametrize(
    "path",
    [
        "/chats?",
        "/chats/a/messages?",
        "/chats/a/messages?order=asc&",
        "/chats/a/rounds?",
        "/chats/a/turns?",
        "/turns?",
        "/turns?state=waiting&",
        "/chats/a/files?",
    ],
)
async def test_a_page_that_has_all_names_no_next_one(
    http: httpx.AsyncClient, services: Services, path: str
) -> None:
    for name in ("a", "b"):
        await begin(services, "a")
        await http.put(f"/api/v1/chats/a/files/{name}.txt", content=b"x")
        await begin(services, "b" if path == "/chats?" else "a")
    total = len((await http.get(f"/api/v1{path}limit=50")).json()["items"])
    assert total in (2, 4)
    page = (await http.get(f"/api/v1{path}limit={total}")).json()
    assert (len(page["items"]), page["next_cursor"]) == (total, None)
    first = (await http.get(f"/api/v1{path}limit={total - 1}")).json()
    rest = (await http.get(f"/api/v1{path}limit={total - 1}&cursor={first['next_cursor']}")).json()
    assert (len(first["items"]), len(rest["items"]), rest["next_cursor"]) == (total - 1, 1, None)


async def test_turns_of_a_chat_are_listed_with_state_cost_and_cause(
    http: httpx.AsyncClient, services: Services
) -> None:
    done = await begin(services, "a", "y" * 300)
    await end(services, "a")
    merging, merged = await begin(services, "a", "one"), await begin(services, "a", "two")
    await end(services, "a", fault=TurnFault(code="no_answer", text="none"))
    open_ = await begin(services, "a", "three")
    answer = await http.get("/api/v1/chats/a/turns", params={"limit": 3})
    page = answer.json()
    assert answer.status_code == 200, answer.text
    assert [turn["id"] for turn in page["items"]] == [open_.id, merged.id, merging.id]
    rest = await http.get("/api/v1/chats/a/turns", params={"limit": 3, "cursor": page["next_cursor"]})
    first = rest.json()["items"][0]
    assert rest.json()["next_cursor"] is None and first["id"] == done.id
    assert (first["state"], first["text"], first["user_id"]) == ("done", "y" * 200, "u1")
    assert (first["rounds"], first["models"], first["cost"], first["prompt_tokens"]) == (1, ["m1"], 0.5, 10)
    assert first["cause"]["kind"] == "message" and first["finished_at"] and not first["has_retries"]
    waiting, taken, failed = page["items"]
    assert (waiting["state"], waiting["finished_at"], waiting["cost"]) == ("waiting", None, None)
    assert (taken["state"], taken["merged_into"]) == ("failed", merging.id)
    assert failed["error"] == {"code": "no_answer", "text": "none"}
    assert (await http.get("/api/v1/chats/none/turns")).status_code == 404


async def test_turns_of_all_chats_are_found_by_state_time_model_and_cost(
    http: httpx.AsyncClient, services: Services
) -> None:
    async def found(**params: Any) -> list[str]:
        ids, cursor = [], None
        while True:
            more = {"cursor": cursor} if cursor else {}
            answer = await http.get("/api/v1/turns", params={**params, **more, "limit": 2})
            assert answer.status_code == 200, answer.text
            ids += [item["id"] for item in answer.json()["items"]]
            cursor = answer.json()["next_cursor"]
            if cursor is None:
                return ids

    done = await begin(services, "a")
    await end(services, "a", cost=2)
    failed = await begin(services, "b")
    await end(services, "b", fault=TurnFault(code="no_answer", text="none"))
    waiting = await begin(services, "a")
    assert await found() == [waiting.id, failed.id, done.id]
    assert await found(state="failed") == [failed.id]
    assert await found(state="waiting") == [waiting.id]
    assert await found(model="m1") == [failed.id, done.id]
    assert await found(plugin="a.b") == []
    assert await found(min_cost=1) == [done.id]
    assert await found(since=failed.requested_at.isoformat()) == [waiting.id, failed.id]
    assert await found(until=failed.requested_at.isoformat(), state="done") == [done.id]
    of_chat = await http.get("/api/v1/chats/a/turns", params={"min_cost": 1, "model": "m1"})
    assert [item["id"] for item in of_chat.json()["items"]] == [done.id]
    cursor = base64.urlsafe_b64encode(b"2026-01-01T00:00:00+00:00 x").decode()
    for wrong in ({"state": "x"}, {"since": "2026-01-01"}, {"min_cost": "nan"}, {"min_cost": -1},
                  {"model": ""}, {"plugin": "x" * 201}, {"cursor": cursor}, {"cursor": "x"}):  # fmt: skip
        assert (await http.get("/api/v1/turns", params=wrong)).status_code == 422, wrong


async def test_a_key_finds_turns_of_its_chats_only(
    http: httpx.AsyncClient, services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turn_lists, "_BATCH", 2)
    own = []
    for number in range(3):
        for chat_key in (f"shop-{number}", f"Shop-{number}", f"other-{number}"):
            turn = await begin(services, chat_key)
            own += [turn.id] if chat_key.startswith("shop-") else []

    async def pages(headers: dict[str, str], limit: int = 50) -> list[list[str]]:
        ids, cursor = [], None
        while True:
            params = {"limit": limit, **({"cursor": cursor} if cursor else {})}
            answer = await http.get("/api/v1/turns", headers=headers, params=params)
            assert answer.status_code == 200, answer.text
            ids.append([item["id"] for item in answer.json()["items"]])
            cursor = answer.json()["next_cursor"]
            if cursor is None:
                return ids

    async def found(headers: dict[str, str]) -> list[str]:
        return [one for page in await pages(headers) for one in page]

    assert await found(await key_of(services, Scope.READ, chats="shop-*")) == own[::-1]
    assert await found(await key_of(services, Scope.READ, chats="*op-1")) == [
        turn["id"] for turn in (await http.get("/api/v1/turns")).json()["items"]
        if turn["chat_key"].endswith("op-1")
    ]  # fmt: skip
    assert await found(await key_of(services, Scope.READ, chats="none")) == []
    poster = await key_of(services, Scope.POST, chats="*")
    assert (await http.get("/api/v1/turns", headers=poster)).status_code == 403
    monkeypatch.setattr(turn_lists, "_MOST_SEEN", 2)
    some = await pages(await key_of(services, Scope.READ, chats="*hop-0"), limit=1)
    assert [] in some and len([one for page in some for one in page]) == 2


async def test_only_a_key_with_admin_for_the_chat_sees_what_was_sent_to_the_model(
    http: httpx.AsyncClient, services: Services
) -> None:
    turn = await begin(services, "shop-1")
    await end(services, "shop-1")
    prompt = [{"role": "system", "parts": [{"type": "text", "content": "be kind"}]}]
    async with services.database.begin() as tx:
        await tx.prompts.keep(turn.id, json.dumps(prompt))

    async def asked(*scopes: Scope, chats: str = "shop-*", **params: Any) -> httpx.Response:
        headers = await key_of(services, *scopes, chats=chats)
        return await http.get(f"/api/v1/turns/{turn.id}", headers=headers, params=params)

    plain = (await asked(Scope.READ)).json()["rounds"][0]
    assert (plain["prompt_kept"], plain["prompt"]) == (True, None)
    assert (await asked(Scope.READ, prompts=True)).status_code == 403
    assert (await asked(Scope.ADMIN, prompts=True)).status_code == 403
    both = await asked(Scope.READ, Scope.ADMIN, prompts=True, values=False)
    assert both.json()["rounds"][0]["prompt"] == prompt
    assert (await asked(Scope.READ, Scope.ADMIN, chats="x", prompts=True)).status_code == 404


async def key_of(services: Services, *scopes: Scope, chats: str) -> dict[str, str]:
    """Create a key; returns the header that presents it."""
    new, secret = new_key("test", scopes=scopes, chats=chats)
    await store_key(services.database, new, by=None, request_id=None)
    return {"Authorization": f"Bearer {secret}"}
