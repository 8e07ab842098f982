"""Posting and reading messages, and idempotency keys; over sockets."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextvars import ContextVar
from typing import Any
from uuid import uuid4

import httpx
import pytest
from gateway_server import served
from test_gateway_keys import key_of
from worker_fleet import Fleet

from nekro.app.services import Services
from nekro.gateway.app import create_app
from nekro.operations.actor import Scope
from nekro_agent.schemas.agent_ctx import AgentCtx
from nekro_agent.schemas.chat_message import ChatMessage
from nekro_agent.schemas.signal import MsgSignal
from storage.driver.statements import FixedStatement, prepared
from storage.engine import Database

HELLO = {"text": "hello", "user_id": "ada"}


async def rounds_of(fleet: Fleet, chat_key: str) -> list[Any]:
    database = Database(fleet.settings.database, fleet.settings.data_dir)
    try:
        async with database.read() as transaction:
            return await transaction.rounds.newest(chat_key, limit=5000)
    finally:
        await database.dispose()


@pytest.fixture
async def served_gateway(fresh_fleet: Fleet) -> AsyncIterator[tuple[Services, httpx.AsyncClient]]:
    """The services of a gateway, and its client."""
    app = create_app(fresh_fleet.settings)
    async with served(app) as client:
        yield app.state.services, client


class Hooks:
    """Stands for the plugins of a fleet that have the hook of messages."""

    def __init__(self, signal: MsgSignal = MsgSignal.CONTINUE) -> None:
        self.signal = signal
        self.asked = 0

    async def has_message_hooks(self) -> bool:
        return True

    async def user_message(self, _ctx: AgentCtx, _message: ChatMessage) -> MsgSignal:
        self.asked += 1
        await asyncio.sleep(0.2)  # other copies arrive
        return self.signal

    async def channel_reset(self, _ctx: AgentCtx) -> None: ...


async def test_a_posted_message_starts_a_turn(gateway: tuple[Fleet, httpx.AsyncClient]) -> None:
    fleet, client = gateway
    answer = await client.post("/api/v1/chats/onebot_v11-group_1/messages", json=HELLO)
    assert answer.status_code == 202
    posted = answer.json()
    assert posted["message"]["parts"] == [{"type": "text", "text": "hello"}]
    assert posted["message"]["sender_id"] == "ada"
    (round_,) = await rounds_of(fleet, "onebot_v11-group_1")
    assert posted["turn_id"] == posted["message"]["turn_id"] == round_.turn_id == round_.id
    assert round_.trigger_id == posted["message"]["id"]


async def test_a_text_that_is_not_unicode_is_answered_with_and_without_a_wait(
    gateway: tuple[Fleet, httpx.AsyncClient],
) -> None:
    _, client = gateway
    for wait in (0, 0.1):
        answer = await client.post(
            f"/api/v1/chats/c/messages?wait={wait}",
            content=b'{"text": "half \\ud83d", "user_id": "ada"}',
            headers={"Content-Type": "application/json"},
        )
        assert answer.status_code == 202, answer.text
        assert answer.json()["message"]["text"] == "half \ud83d"


async def test_an_overheard_message_starts_no_turn(gateway: tuple[Fleet, httpx.AsyncClient]) -> None:
    _, client = gateway
    posted = (await client.post("/api/v1/chats/c/messages", json=HELLO | {"to_agent": False})).json()
    assert posted["turn_id"] is None and posted["message"]["turn_id"] is None


async def test_history_is_paged_in_both_orders(gateway: tuple[Fleet, httpx.AsyncClient]) -> None:
    _, client = gateway
    for number in range(5):
        await client.post("/api/v1/chats/c/messages", json=HELLO | {"text": str(number)})
    for order, wanted in (("desc", "43210"), ("asc", "01234")):
        texts, cursor = "", ""
        while True:
            page = (await client.get(f"/api/v1/chats/c/messages?limit=2&order={order}{cursor}")).json()
            texts += "".join(message["text"] for message in page["items"])
            if page["next_cursor"] is None:
                break
            cursor = f"&cursor={page['next_cursor']}"
        assert texts == wanted
    assert all(message["turn_id"] for message in page["items"])
    missing = await client.get("/api/v1/chats/none/messages")
    assert (missing.status_code, missing.json()["code"]) == (404, "not_found")


async def test_a_reset_hides_the_messages_before_it(gateway: tuple[Fleet, httpx.AsyncClient]) -> None:
    _, client = gateway
    await client.post("/api/v1/chats/c/messages", json=HELLO)
    reset = await client.post("/api/v1/chats/c/reset")
    assert [round_["state"] for round_ in reset.json()["cancelled"]] == ["cancelled"]
    assert (await client.get("/api/v1/chats/c/messages")).json()["items"] == []
    assert len((await client.get("/api/v1/chats/c/messages?with_past=true")).json()["items"]) == 1


async def test_a_chat_key_may_contain_slashes_and_any_text(gateway: tuple[Fleet, httpx.AsyncClient]) -> None:
    _, client = gateway
    for key in ("a/messages", "..", "ü %2F?#", "a/../b"):
        path = "".join(f"%{byte:02X}" for byte in key.encode())
        posted = await client.post(f"/api/v1/chats/{path}/messages", json=HELLO)
        assert posted.json()["message"]["chat_key"] == key


async def test_the_user_of_a_key_is_fixed(gateway: tuple[Fleet, httpx.AsyncClient]) -> None:
    fleet, client = gateway
    headers = await key_of(fleet, Scope.POST, user_id="bob")
    posted = await client.post("/api/v1/chats/c/messages", json={"text": "hi"}, headers=headers)
    assert posted.json()["message"]["sender_id"] == "bob"
    refused = await client.post("/api/v1/chats/c/messages", json=HELLO, headers=headers)
    assert (refused.status_code, refused.json()["code"]) == (403, "user_not_allowed")


async def test_a_repeated_request_gets_the_first_answer_from_every_gateway(
    gateway: tuple[Fleet, httpx.AsyncClient],
) -> None:
    fleet, client = gateway
    headers = {"Idempotency-Key": "one"}
    first = await client.post("/api/v1/chats/c/messages", json=HELLO, headers=headers)
    async with served(create_app(fleet.settings)) as other:
        again = await other.post("/api/v1/chats/c/messages", json=HELLO, headers=headers)
    assert (again.status_code, again.json()) == (first.status_code, first.json())
    assert again.headers["idempotency-replayed"] == "true"
    assert len(await rounds_of(fleet, "c")) == 1
    elsewhere = await client.post("/api/v1/chats/d/messages", json=HELLO, headers=headers)
    assert elsewhere.json()["message"]["chat_key"] == "d"
    other_body = await client.post("/api/v1/chats/c/messages", json=HELLO | {"text": "x"}, headers=headers)
    assert (other_body.status_code, other_body.json()["code"]) == (422, "idempotency_key_reused")


async def test_of_simultaneous_repetitions_one_posts(gateway: tuple[Fleet, httpx.AsyncClient]) -> None:
    fleet, client = gateway
    headers = {"Idempotency-Key": "same"}
    async with served(create_app(fleet.settings)) as other:
        posts = [
            one.post("/api/v1/chats/c/messages", json=HELLO, headers=headers) for one in (client, other) * 10
        ]
        answers = await asyncio.gather(*posts)
    assert {answer.status_code for answer in answers} == {202}
    assert len({answer.json()["turn_id"] for answer in answers}) == 1
    assert sum("idempotency-replayed" not in answer.headers for answer in answers) == 1
    assert len(await rounds_of(fleet, "c")) == 1


async def test_a_message_that_a_gateway_of_0_2_recorded_is_found_by_its_key(
    served_gateway: tuple[Services, httpx.AsyncClient],
) -> None:
    services, client = served_gateway
    headers = {"Idempotency-Key": "one"}
    first = await client.post("/api/v1/chats/c/messages", json=HELLO, headers=headers)
    async with services.database.begin() as transaction:
        await transaction.connection.exec_driver_sql("UPDATE messages SET once_digest = NULL")
    again = await client.post("/api/v1/chats/c/messages", json=HELLO, headers=headers)
    assert (again.status_code, again.json()) == (202, first.json())
    assert again.headers["idempotency-replayed"] == "true"


async def test_hooks_run_and_files_are_stored_once_for_copies_at_one_gateway(
    served_gateway: tuple[Services, httpx.AsyncClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    services, client = served_gateway
    hooks = Hooks()
    monkeypatch.setattr(services.intake, "_hooks", hooks)
    sent: dict[str, Any] = {
        "files": {"file": ("a.txt", b"x")},
        "data": HELLO,
        "headers": {"Idempotency-Key": "one"},
    }
    posts = [client.post("/api/v1/chats/c/messages", **sent) for _ in range(5)]
    answers = await asyncio.gather(*posts)
    assert [answer.status_code for answer in answers] == [202] * 5
    assert all(answer.json() == answers[0].json() for answer in answers)
    files = (await client.get("/api/v1/chats/c/files")).json()["items"]
    assert (hooks.asked, len(files)) == (1, 1)


async def test_a_message_that_a_hook_blocked_is_shown_to_it_again_when_it_is_repeated(
    served_gateway: tuple[Services, httpx.AsyncClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    services, client = served_gateway
    hooks = Hooks(MsgSignal.BLOCK_ALL)
    monkeypatch.setattr(services.intake, "_hooks", hooks)
    for number in (1, 2):
        blocked = await client.post(
            "/api/v1/chats/c/messages", json=HELLO, headers={"Idempotency-Key": "one"}
        )
        assert (blocked.status_code, blocked.json()["message"]) == (202, None)
        assert hooks.asked == number


def counting(services: Services, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that gets the write transactions and statements of a request, from its post on."""
    ran: list[str] = []
    inside: ContextVar[bool] = ContextVar("inside", default=False)
    accept, begin = services.intake.accept, Database.begin

    async def accepting(*given: Any, **named: Any) -> Any:
        inside.set(True)
        return await accept(*given, **named)

    def beginning(database: Database) -> Any:
        ran.extend(["begin"] if inside.get() else [])
        return begin(database)

    def noting(*given: Any) -> tuple[Any, ...]:
        kind = "statement" if isinstance(given[0], FixedStatement) else "built statement"
        ran.extend([kind] if inside.get() else [])
        return prepared(*given)

    monkeypatch.setattr(services.intake, "accept", accepting)
    monkeypatch.setattr(Database, "begin", beginning)
    monkeypatch.setattr("storage.driver.statements.prepared", noting)
    return ran


async def test_a_post_is_one_write_transaction_of_few_statements(
    served_gateway: tuple[Services, httpx.AsyncClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    services, client = served_gateway
    ran = counting(services, monkeypatch)

    async def counted(**body: Any) -> Counter[str]:
        ran.clear()
        posted = await client.post(
            "/api/v1/chats/c/messages", json={**HELLO, **body}, headers={"Idempotency-Key": uuid4().hex}
        )
        assert posted.status_code == 202
        return Counter(ran)

    assert (await counted())["begin"] == 1  # the chat and the person are new
    # By its key; chat, person, open questions, message, round, number of events, events.
    assert await counted() == {"begin": 1, "statement": 8}
    assert await counted(to_agent=False) == {"begin": 1, "statement": 7}
    hooks = Hooks()
    monkeypatch.setattr(services.intake, "_hooks", hooks)
    assert await counted() == {"begin": 1, "statement": 10}
    assert (await counted(user_id="eve"))["begin"] == 2  # hooks may read the row of the person


async def test_a_response_is_kept_with_the_message_of_its_request(
    served_gateway: tuple[Services, httpx.AsyncClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    services, client = served_gateway
    ran = counting(services, monkeypatch)
    body = {"model": "nekro", "input": "hello", "background": True}

    async def created(key: str) -> str:
        ran.clear()
        answer = await client.post("/v1/responses", json=body, headers={"Idempotency-Key": key})
        assert answer.status_code == 200
        return str(answer.json()["id"])

    response = await created("one")
    assert Counter(ran)["begin"] == 1
    kept = await client.get(f"/v1/responses/{response}")
    assert (kept.status_code, kept.json()["status"]) == (200, "queued")
    assert await created("one") == response
    assert Counter(ran) == {"statement": 1}  # the message, by its key
    monkeypatch.setattr(services.intake, "_hooks", Hooks(MsgSignal.BLOCK_ALL))
    blocked = await client.get(f"/v1/responses/{await created('two')}")
    assert (blocked.status_code, blocked.json()["status"]) == (200, "completed")


async def test_a_refused_request_is_not_remembered(gateway: tuple[Fleet, httpx.AsyncClient]) -> None:
    fleet, client = gateway
    headers = {"Idempotency-Key": "one"}
    body = {"method": "nothing", "chat_key": "c"}
    for _ in range(2):
        answer = await client.post("/api/v1/calls", json=body, headers=headers)
        assert (answer.status_code, answer.json()["code"]) == (404, "method_not_found")
    database = Database(fleet.settings.database, fleet.settings.data_dir)
    async with database.read() as transaction:
        rows = await transaction.connection.exec_driver_sql("SELECT * FROM idempotent_requests")
    await database.dispose()
    assert list(rows) == []
