"""Every POST of the API runs once per ``Idempotency-Key``, also after its gateway died."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from datetime import UTC, datetime, timedelta
from functools import partial
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any, Final

import httpx
import pytest
import redis
from gateway_server import served
from loguru import logger
from pydantic import BaseModel, SecretStr
from test_gateway_keys import key_of
from waiting import eventually
from worker_fleet import Fleet

from broker_config.keys import Keys
from broker_config.settings import Settings
from nekro.app import use_cases
from nekro.app.leases import HeldLease
from nekro.app.services import Services
from nekro.broker.delivery.messages import CallMessage
from nekro.broker.publishing import encode_message
from nekro.extensions.mcp.questions import answer_key
from nekro.gateway import idempotency
from nekro.gateway.app import create_app
from nekro.gateway.document.openapi import document
from nekro.gateway.idempotency import IdempotentRequest
from nekro.operations.actor import RefusedError, Scope
from nekro.wire.invocation import Invocation, Signer, new_id
from nekro_agent.errors import (
    ArgumentError,
    BrokerUnavailableError,
    FencedError,
    OutcomeUnknownError,
    OverloadedError,
    StorageUnavailableError,
)
from storage.repositories.jobs import NewJob
from storage.repositories.rounds import RoundRequest
from storage.states import JobState, TriggerKind
from storage.transaction import Transaction

pytestmark = pytest.mark.extended

Bodies = tuple[Any, Any]
NONE: Final[Bodies] = (b"", b"{}")
_CHAT: Final = "/api/v1/chats/{chat}"
#: Two bodies of each POST; the second one differs. A tuple is a file of a form, bytes are sent as they are.
BODIES: Final[Mapping[str, Bodies]] = {
    f"{_CHAT}/messages": ({"text": "a", "user_id": "u"}, {"text": "b", "user_id": "u"}),
    f"{_CHAT}/reset": NONE,
    f"{_CHAT}/cancel": NONE,
    f"{_CHAT}/files": (("a.txt", b"one"), ("a.txt", b"two")),
    "/api/v1/turns/{turn}/cancel": NONE,
    "/api/v1/turns/{asked}/replay": ({}, {"chat_key": "elsewhere"}),
    "/api/v1/runs": ({"code": "print(1)", "chat_key": "once"}, {"code": "print(2)", "chat_key": "once"}),
    "/api/v1/calls": (
        {"method": "count", "chat_key": "once"},
        {"method": "count", "chat_key": "once", "timeout_seconds": 9},
    ),
    "/api/v1/commands": (
        {"line": "/tally", "chat_key": "once", "user_id": "u"},
        {"line": "/tally more", "chat_key": "once", "user_id": "u"},
    ),
    "/api/v1/approvals/{approval}/decision": (
        {"decision": "approve", "scope": "chat"},
        {"decision": "approve", "scope": "once"},
    ),
    "/api/v1/approvals/{approval}/revoke": NONE,
    "/api/v1/plugins/Ada.speaker/enable": NONE,
    "/api/v1/plugins/Ada.speaker/disable": NONE,
    "/api/v1/jobs/{job}/signals": ({"key": "never"}, {"key": "other"}),
    "/api/v1/jobs/{job}/cancel": NONE,
    "/api/v1/jobs/{failed}/retry": NONE,
    "/api/v1/dead-letters/{letter}/retry": ({}, {"timeout_seconds": 9}),
    "/api/v1/mcp/servers/{server}/test": NONE,
    "/api/v1/mcp/questions/{question}/answer": (
        {"action": "accept", "content": {"city": "Rome"}},
        {"action": "decline"},
    ),
    "/api/v1/webhooks": ({"url": "http://127.0.0.1:9/a"}, {"url": "http://127.0.0.1:9/b"}),
    "/api/v1/webhooks/{webhook}/secret": NONE,
    "/api/v1/webhooks/{webhook}/replay": ({}, {"delivery_id": "x"}),
    "/v1/responses": (
        {"model": "nekro", "input": "a", "background": True},
        {"model": "nekro", "input": "b", "background": True},
    ),
    "/v1/responses/{response}/cancel": NONE,
    "/v1/chat/completions": (
        {"model": "nekro", "messages": [{"role": "user", "content": "a"}], "stream": True},
        {"model": "nekro", "messages": [{"role": "user", "content": "b"}], "stream": True},
    ),
    "/api/v1/keys": ({"name": "a", "scopes": ["admin"]}, {"name": "b", "scopes": ["admin"]}),
}
#: Tested where their other side is: ``test_sse_adapter.py``.
ELSEWHERE: Final = {"/api/v1/adapters/sse/requests"}
#: Their effect cannot be found again, so the fate of a request whose gateway died is unknown.
NOT_REPEATABLE: Final = {
    "/api/v1/jobs/{job}/signals",
    "/api/v1/dead-letters/{letter}/retry",
    "/api/v1/webhooks/{webhook}/replay",
    "/api/v1/mcp/questions/{question}/answer",
}
#: Found by their message, and a copy waits for the first one: there is no request that runs or has died.
FOUND_BY_MESSAGE: Final = {f"{_CHAT}/messages", "/v1/responses", "/v1/chat/completions"}


LATER: Final = "2999-01-01 00:00:00.000000"
EARLIER: Final = "2020-01-01 00:00:00.000000"


@pytest.fixture(scope="module")
def operated(make_fleet: Callable[..., Fleet], tmp_path_factory: pytest.TempPathFactory) -> Fleet:
    script = tmp_path_factory.mktemp("model") / "script.yaml"
    script.write_text("- when: '.*'\n  answer: ''\n")
    fleet = make_fleet(
        gateway={"webhook_allow_private": ("127.0.0.1",)},
        llm={"script": script},
        approval={"require": ("Ada.operated.strange",)},
    )
    fleet.start("methods", "methods", "long", "rounds")
    return fleet


@pytest.fixture
async def gateway(operated: Fleet) -> AsyncIterator[tuple[httpx.AsyncClient, Services]]:
    app = create_app(operated.settings)
    headers = await key_of(operated, *Scope)
    async with served(app) as client:
        client.timeout = httpx.Timeout(60)
        client.headers.update(headers)
        await client.get("/healthz")  # answered when the services have started
        yield client, app.state.services


async def post(client: httpx.AsyncClient, path: str, body: Any, key: str) -> tuple[int, httpx.Headers, Any]:
    """Post; of a stream the first event is the answer."""
    content: dict[str, Any] = {"json": body}
    if isinstance(body, bytes):
        content = {"content": body, "headers": {"Content-Type": "application/json"}}
    elif isinstance(body, tuple):
        content = {"files": {"file": body}}
    sent = {"Idempotency-Key": key, **content.pop("headers", {})}
    async with client.stream("POST", path, headers=sent, **content) as answer:
        if answer.headers["content-type"].startswith("text/event-stream"):
            async for line in answer.aiter_lines():
                if line.startswith("data: "):
                    return answer.status_code, answer.headers, json.loads(line[6:])
        return answer.status_code, answer.headers, json.loads(await answer.aread())


async def query(services: Services, statement: str) -> list[Any]:
    async with services.database.begin() as transaction:
        result = await transaction.connection.exec_driver_sql(statement)
        return list(result) if statement.startswith("SELECT") else []


def named(answer: Any) -> Any:
    """What an answer names, which a repetition after a crash finds again."""
    if not isinstance(answer, dict):
        return answer
    return {name: answer.get(name) for name in ("id", "turn_id", "key", "secret", "chat_key", "responses")}


async def named_things(client: httpx.AsyncClient, services: Services) -> dict[str, str]:
    """Make what the paths name; returns ids."""
    async with services.database.begin() as transaction:
        await transaction.chats.ensure("other")
        turn, _ = await transaction.rounds.request(
            RoundRequest(chat_key="other", trigger_kind=TriggerKind.MANUAL, trigger_id="x")
        )
    message = {"text": "hello", "user_id": "u1"}
    asked = (await client.post("/api/v1/chats/asked/messages", json=message)).json()
    begun = await client.post("/api/v1/calls", json={"method": "begin", "args": ["job"], "chat_key": "once"})
    assert begun.status_code == 200, begun.text
    (job,) = (await client.get("/api/v1/jobs?open=true")).json()["items"]
    async with services.database.begin() as transaction:
        new = NewJob(type="x", task_id="failed", plugin_key=job["plugin"], chat_key="once", args={})
        failed = await transaction.jobs.add(new)
        await transaction.jobs.claim(failed.id, worker="w", lease_seconds=60)
        await transaction.jobs.finish(failed.id, fence=1, state=JobState.FAILED, message="it broke")
        await transaction.job_signals.begin(failed.id, key=answer_key("5d2e-0"), waiter="w")
    webhook = (await client.post("/api/v1/webhooks", json={"url": "http://127.0.0.1:9/"})).json()
    body = {"model": "nekro", "input": "a", "background": True}
    response = (await client.post("/v1/responses", json=body)).json()
    approval = await use_cases.ask_approval(services, "strange", (), {}, chat_key="other", user_id=None)
    declared = {"declaration": {"url": "http://127.0.0.1:9/mcp"}}
    server = (await client.put("/api/v1/mcp/servers/nowhere", json=declared)).json()
    return {
        "chat": "once", "turn": turn.turn_id, "asked": asked["turn_id"], "job": job["id"],
        "failed": failed.id,
        "letter": dead_letter(services),
        "webhook": webhook["id"], "response": response["id"], "approval": approval.id,
        "server": server["name"],
        "question": "5d2e-0",
    }  # fmt: skip


def dead_letter(services: Services) -> str:
    """Add a signed call to the dead letters; returns its id."""
    now = datetime.now(UTC)
    invocation = Invocation(
        call_id=new_id(), method="Ada.operated.echo", chat_key="once", container_key="once", user_id=None,
        issued_at=now, deadline=now + timedelta(seconds=60), args="",
    )  # fmt: skip
    call = CallMessage.of(
        invocation, signer=Signer.from_text("test-signing-key"), lane="methods", reply_to=new_id()
    )
    broker = services.settings.broker
    with redis.Redis.from_url(str(broker.url)) as connection:
        raw = encode_message(call.build(services.app), queue="methods")
        connection.lpush(Keys(prefix=broker.key_prefix).dead, raw)
    return invocation.call_id


# One kind: the tests below keep, renew, lose and end the rows of requests on both.
@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True, scope="module")
async def test_every_post_runs_once_per_idempotency_key(
    gateway: tuple[httpx.AsyncClient, Services],
) -> None:
    client, services = gateway
    ids = await named_things(client, services)
    for template, (body, other) in BODIES.items():
        path = template.format(**ids)
        status, _, first = await post(client, path, body, "k")
        assert status < 300, (path, first)
        status_again, _, again = await post(client, path, body, "k")
        assert (status_again, again) == (status, first), path
        refused = await post(client, path, other, "k")
        assert refused[0] == 422 and "idempotency_key_reused" in str(refused[2]), (path, refused)
        if template in FOUND_BY_MESSAGE:
            continue
        # Its gateway still runs it; then that one has died.
        await query(services, f"UPDATE idempotent_requests SET status = NULL, lease_until = '{LATER}'")
        running = await post(client, path, body, "k")
        assert running[0] == 409 and running[1]["retry-after"] == "1", (path, running)
        assert "idempotent_request_running" in str(running[2]), (path, running)
        await query(services, f"UPDATE idempotent_requests SET lease_until = '{EARLIER}'")
        status, _, after_crash = await post(client, path, body, "k")
        if template in NOT_REPEATABLE:
            assert (status, after_crash["code"]) == (502, "outcome_unknown"), path
        elif template == "/api/v1/webhooks/{webhook}/secret":  # the secret was not shown before
            assert status == 200 and after_crash["secret"] != first["secret"]
        else:
            assert status < 300 and named(after_crash) == named(first), (path, after_crash)


async def test_a_request_keeps_its_lease_while_it_runs_and_stores_nothing_after_a_loss(
    gateway: tuple[httpx.AsyncClient, Services], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, services = gateway
    monkeypatch.setattr(idempotency, "_LEASE_SECONDS", 2.0)
    request: Any = SimpleNamespace(app=SimpleNamespace(state=SimpleNamespace(services=services)))
    begun, may_end = asyncio.Event(), asyncio.Event()

    class Answer(BaseModel):
        text: str = "done"

    async def work() -> Answer:
        begun.set()
        await may_end.wait()
        return Answer()

    async def until() -> list[Any]:
        return [row[0] for row in await query(services, "SELECT lease_until FROM idempotent_requests")]

    await query(services, "DELETE FROM idempotent_requests")
    for name, is_lost in (("ab" * 32, False), ("cd" * 32, True)):
        begun.clear()
        may_end.clear()
        running = asyncio.create_task(IdempotentRequest(request, name=name, body=b"x").respond(work))
        await begun.wait()
        await eventually(partial(_changed, until, {str(await until())}), what="two renewals")
        with pytest.raises(RefusedError, match="still running"):
            await IdempotentRequest(request, name=name, body=b"x").respond(work)
        if is_lost:  # another gateway has it
            await query(services, "UPDATE idempotent_requests SET fence = fence + 1")
        may_end.set()
        assert (await running).status_code == 200
        stored = await query(services, "SELECT status FROM idempotent_requests")
        assert [row[0] for row in stored] == [None if is_lost else 200]
        await query(services, "DELETE FROM idempotent_requests")


@pytest.mark.parametrize("works", [True, False], ids=["answered", "forgotten"])
async def test_a_renewal_just_after_the_end_of_a_request_reports_no_loss(
    gateway: tuple[httpx.AsyncClient, Services], monkeypatch: pytest.MonkeyPatch, works: bool
) -> None:
    _, services = gateway
    request: Any = SimpleNamespace(app=SimpleNamespace(state=SimpleNamespace(services=services)))
    held, logged, hold = list[HeldLease](), list[str](), services.leases.hold
    # The answer is stored together with its bytes; a failure is deleted by one statement.
    name = "begin" if works else "autocommit"
    transact = getattr(services.database, name)

    def hold_noted(*args: Any, **options: Any) -> HeldLease:
        held.append(hold(*args, **options))
        return held[-1]

    @contextlib.asynccontextmanager
    async def commit_and_renew() -> AsyncIterator[Transaction]:
        async with transact() as transaction:
            yield transaction
        monkeypatch.setattr(services.database, name, transact)
        with contextlib.suppress(FencedError):  # as the keeper does, on its own loop
            await held[0].confirm()

    class Answer(BaseModel):
        text: str = "done"

    async def work() -> Answer:
        monkeypatch.setattr(services.database, name, commit_and_renew)
        if not works:
            raise ArgumentError("refused")
        return Answer()

    monkeypatch.setattr(services.leases, "hold", hold_noted)
    sink = logger.add(lambda line: logged.append(line.record["message"]))  # type: ignore[attr-defined]
    with contextlib.nullcontext() if works else pytest.raises(ArgumentError):
        await IdempotentRequest(request, name=("ef" if works else "fe") * 32, body=b"x").respond(work)
    logger.remove(sink)
    assert held[0].is_lost and "lease_lost" not in logged


class Done(BaseModel):
    """The answer of works of these tests."""

    text: str = "done"


def once_of_gateway(services: Services) -> Callable[[], IdempotentRequest]:
    """Return what makes executions of one request."""
    app = SimpleNamespace(state=SimpleNamespace(services=services))
    request: Any = SimpleNamespace(app=app, state=SimpleNamespace())
    name = (new_id() * 2)[:64]
    return lambda: IdempotentRequest(request, name=name, body=b"x")


@pytest.mark.parametrize("is_repeatable", [True, False], ids=["repeatable", "not repeatable"])
@pytest.mark.parametrize("error", [None, StorageUnavailableError("no connection"), ValueError("unexpected")])
async def test_work_that_may_have_been_done_is_a_repetition_or_unknown_the_next_time(
    gateway: tuple[httpx.AsyncClient, Services], is_repeatable: bool, error: Exception | None
) -> None:
    _, services = gateway
    make, begun, ran = once_of_gateway(services), asyncio.Event(), list[bool]()

    async def work(once: IdempotentRequest) -> Done:
        ran.append(once.is_repetition)
        if len(ran) > 1:
            return Done()
        begun.set()
        if error is not None:
            raise error
        await asyncio.Event().wait()
        return Done()

    def run() -> Coroutine[Any, Any, Any]:
        once = make()
        return once.respond(partial(work, once), is_repeatable=is_repeatable)

    first = asyncio.create_task(run())
    await begun.wait()
    if error is None:
        first.cancel()  # as a gateway that stops
    with pytest.raises(asyncio.CancelledError if error is None else type(error)):
        await first
    if is_repeatable:
        assert (await run()).status_code == 200
        assert ran == [False, True]
    else:
        for _ in range(2):
            with contextlib.suppress(OutcomeUnknownError):
                assert (await run()).status_code == 502  # the stored answer
        assert ran == [False]


@pytest.mark.parametrize(
    "error",
    [
        ArgumentError("refused"),
        BrokerUnavailableError("no connection"),
        OverloadedError("full"),
        RefusedError(HTTPStatus.CONFLICT, "job_ended", "it has ended"),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_work_that_was_refused_is_run_again(
    gateway: tuple[httpx.AsyncClient, Services], error: Exception
) -> None:
    _, services = gateway
    make, errors = once_of_gateway(services), [error]

    async def work() -> Done:
        if errors:
            raise errors.pop()
        return Done()

    with pytest.raises(type(error)):
        await make().respond(work, is_repeatable=False)
    again = make()
    assert (await again.respond(work, is_repeatable=False)).status_code == 200
    assert not again.is_repetition


async def test_a_command_whose_gateway_died_in_it_runs_once(
    gateway: tuple[httpx.AsyncClient, Services],
) -> None:
    client, services = gateway
    body, key = {"line": "/tally", "chat_key": new_id(), "user_id": "u"}, new_id()
    (_, _, first) = await post(client, "/api/v1/commands", body, key)
    assert [response["message"] for response in first["responses"]] == ["1"]
    await query(services, f"UPDATE idempotent_requests SET status = NULL, lease_until = '{EARLIER}'")
    assert (await post(client, "/api/v1/commands", body, key))[2] == first
    (_, _, other) = await post(client, "/api/v1/commands", body, new_id())
    assert [response["message"] for response in other["responses"]] == ["2"]


async def test_the_answer_to_a_question_is_unknown_if_its_gateway_died_in_it(
    gateway: tuple[httpx.AsyncClient, Services],
) -> None:
    client, services = gateway
    chat_key, key = new_id(), new_id()
    asked = {"line": "/ask", "chat_key": chat_key, "user_id": "u"}
    assert (await post(client, "/api/v1/commands", asked, new_id()))[2]["status"] == "waiting"
    answer = {**asked, "line": "blue"}
    (_, _, first) = await post(client, "/api/v1/commands", answer, key)
    assert [response["message"] for response in first["responses"]] == ["chose blue"]
    await query(services, f"UPDATE idempotent_requests SET status = NULL, lease_until = '{EARLIER}'")
    (status, _, again) = await post(client, "/api/v1/commands", answer, key)
    assert (status, again["code"]) == (502, "outcome_unknown")


async def _changed(read: Callable[[], Awaitable[list[Any]]], seen: set[str]) -> bool:
    seen.add(str(await read()))
    return len(seen) > 2


def test_the_table_has_every_post() -> None:
    paths = json.loads(document(create_app(Settings.model_construct())))["paths"]
    taking = {
        path
        for path, operations in paths.items()
        if any(one["name"] == "Idempotency-Key" for one in operations.get("post", {}).get("parameters", ()))
    }
    without = {path for path, operations in paths.items() if "post" in operations} - taking
    assert without == {
        *("/api/v1/stream-tickets", "/api/adapters/sse/connect", "/api/webhook/{endpoint}"),
        "/console/session",
    }
    tested = {re.sub(r"\{\w+\}|Ada.speaker", "{}", path) for path in (*BODIES, *ELSEWHERE)}
    assert {re.sub(r"\{\w+\}", "{}", path) for path in taking} == tested


async def test_secrets_of_answers_are_not_stored_and_are_shown_again(
    gateway: tuple[httpx.AsyncClient, Services],
) -> None:
    client, services = gateway
    for path, body, secret in (
        ("/api/v1/keys", {"name": "s", "scopes": ["read"]}, "key"),
        ("/api/v1/webhooks", {"url": "http://127.0.0.1:9/"}, "secret"),
    ):
        first = await post(client, path, body, "secret")
        again = await post(client, path, body, "secret")
        assert again[2] == first[2] and again[1]["idempotency-replayed"] == "true"
        stored = str(await query(services, "SELECT * FROM idempotent_requests"))
        assert first[2]["id"] in stored and first[2][secret].split("_", 2)[-1] not in stored
        other = await post(client, path, body, "another")
        assert other[2][secret] != first[2][secret]
    key = (await post(client, "/api/v1/keys", {"name": "s", "scopes": ["admin"]}, "used"))[2]
    headers = {"Authorization": f"Bearer {key['key']}"}
    assert (await client.get("/api/v1/chats/none/messages", headers=headers)).status_code == 403
    # The secret follows from the signing key; it has changed since.
    changed = SecretStr("another-signing-key")
    settings = services.settings
    security = settings.security.model_copy(update={"signing_key": changed})
    async with served(create_app(settings.model_copy(update={"security": security}))) as later:
        later.headers.update({"Authorization": client.headers["Authorization"]})
        lost = await post(later, "/api/v1/keys", {"name": "s", "scopes": ["admin"]}, "used")
        assert (lost[0], lost[2]["code"]) == (409, "secret_unavailable")


async def test_the_answer_of_a_failed_call_has_no_secret_at_its_repetition(
    operated: Fleet,
) -> None:
    secret = "only-the-gateway-knows-it"
    opened = operated.settings.gateway.model_copy(update={"sse_access_key": SecretStr(secret)})
    body = {"method": "fail_with", "chat_key": "once", "args": [f"{secret}!"]}
    app = create_app(operated.settings.model_copy(update={"gateway": opened}))
    async with served(app) as client:
        client.timeout = httpx.Timeout(60)
        client.headers.update(await key_of(operated, *Scope))
        first, again = [await post(client, "/api/v1/calls", body, "failed") for _ in range(2)]
        stored = str(await query(app.state.services, "SELECT answer FROM idempotent_requests"))
    assert (first[0], first[2]["code"], again[0]) == (422, "method_failed", 422)
    assert again[2] == first[2] and again[1]["content-type"] == "application/problem+json"
    assert "[secret]!" in first[2]["detail"] and "[secret]!" in stored and secret not in stored
