"""Keys: creation, scopes, rates, budgets, revocation; over a socket."""

from __future__ import annotations

import asyncio
import hmac
import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from forked_process import run_forked
from gateway_server import served
from redis_relay import RedisRelay
from worker_fleet import Fleet

from nekro.app.budgets import day_of
from nekro.app.chats.writer import request_round
from nekro.gateway.app import create_app
from nekro.operations.actor import Scope
from nekro.operations.keys import new_key, revoke_stored_key, store_key
from nekro_agent.errors import UsageError
from nekro_agent.shared_clock import shared_time
from storage.accounts.keys import KeyRepository
from storage.accounts.spendings import ModelUse, NewSpending
from storage.engine import Database
from storage.repositories.rounds import RoundRequest
from storage.states import TriggerKind, new_id

ALL = tuple(Scope)


async def key_of(fleet: Fleet, *scopes: Scope, **limits: Any) -> dict[str, str]:
    """Create a key; returns the header of its requests."""
    database = Database(fleet.settings.database, fleet.settings.data_dir)
    try:
        new, key = new_key("test", scopes=scopes, **limits)
        await store_key(database, new, by=None, request_id=None)
    finally:
        await database.dispose()
    return {"Authorization": f"Bearer {key}"}


async def test_every_request_needs_a_key_also_before_the_first_one_was_created(gateway: Any) -> None:
    _, client = gateway
    without = {"Authorization": ""}
    del client.headers["Authorization"]
    for headers in ({}, without, {"X-Forwarded-For": "127.0.0.1"}):
        refused = await client.get("/api/v1/keys", headers=headers)
        assert refused.status_code == 401, headers
        assert refused.headers["www-authenticate"].startswith("Bearer")


async def test_a_revoked_key_is_refused(gateway: Any) -> None:
    _, client = gateway
    created = await client.post("/api/v1/keys", json={"name": "first", "scopes": ["admin", "read"]})
    assert created.status_code == 201
    key = created.json()
    headers = {"Authorization": f"Bearer {key['key']}"}
    listed = (await client.get("/api/v1/keys", headers=headers)).json()["items"]
    assert [one["id"] for one in listed] == [key["id"]]
    assert "key" not in listed[0] and "digest" not in listed[0]
    revoked = await client.delete(f"/api/v1/keys/{key['id']}", headers=headers)
    assert revoked.status_code == 200 and revoked.json()["revoked_at"]
    assert (await client.get("/api/v1/keys", headers=headers)).json()["code"] == "key_invalid"


async def test_an_expired_key_is_refused(gateway: Any) -> None:
    fleet, client = gateway
    headers = await key_of(fleet, *ALL, expires_at=shared_time() + timedelta(days=1))
    assert (await client.get("/api/v1/keys", headers=headers)).status_code == 200
    database = Database(fleet.settings.database, fleet.settings.data_dir)
    async with database.begin() as transaction:
        await transaction.connection.exec_driver_sql(
            "UPDATE api_keys SET expires_at = '2020-01-01 00:00:00.000000'"
        )
    await database.dispose()
    assert (await client.get("/api/v1/keys", headers=headers)).json()["code"] == "key_invalid"


async def test_a_key_gives_no_scope_that_it_lacks(gateway: Any) -> None:
    fleet, client = gateway
    headers = await key_of(fleet, Scope.ADMIN)
    refused = await client.post("/api/v1/keys", json={"name": "x", "scopes": ["run"]}, headers=headers)
    assert (refused.status_code, refused.json()["code"]) == (403, "scope_missing")
    restricted = await key_of(fleet, *ALL, chats="a-*")
    body = {"name": "x", "scopes": ["read"]}
    refused = await client.post("/api/v1/keys", json=body, headers=restricted)
    assert (refused.status_code, refused.json()["code"]) == (403, "key_restricted")


OWN_LIMITS: dict[str, Any] = {"cost_per_day": 5.0, "tokens_per_day": 1000, "requests_per_minute": 60}
OWN_LIMITS["stored_bytes_limit"] = 1 << 20
SOON = datetime.now(UTC).replace(microsecond=0) + timedelta(days=1)


@pytest.mark.parametrize("fresh_fleet", ["sqlite"], indirect=True)
async def test_a_key_gives_no_more_than_its_own_limits(gateway: Any) -> None:
    fleet, client = gateway
    headers = await key_of(fleet, Scope.ADMIN, Scope.READ, expires_at=SOON, **OWN_LIMITS)
    body = {"name": "x", "scopes": ["admin"], "expires_at": SOON.isoformat(), **OWN_LIMITS}
    later = (SOON + timedelta(seconds=1)).isoformat()
    for name, value, most in (
        ("expires_at", None, SOON.isoformat()),
        ("expires_at", later, SOON.isoformat()),
        ("cost_per_day", None, "5.0"),
        ("cost_per_day", 5.01, "5.0"),
        ("tokens_per_day", None, "1000"),
        ("tokens_per_day", 1001, "1000"),
        ("requests_per_minute", None, "60"),
        ("requests_per_minute", 0, "60"),
        ("requests_per_minute", 61, "60"),
        ("stored_bytes_limit", None, "1048576"),
        ("stored_bytes_limit", 0, "1048576"),
    ):
        refused = await client.post("/api/v1/keys", json=body | {name: value}, headers=headers)
        assert (refused.status_code, refused.json()["code"]) == (403, "key_limited"), (name, value)
        assert f"state {name}, at most {most}" in refused.json()["detail"]
    lower = {"tokens_per_day": 0, "requests_per_minute": 1, "cost_per_day": 0.1}
    for limits in ({}, lower):
        made = await client.post("/api/v1/keys", json=body | limits, headers=headers)
        assert made.status_code == 201, made.text
    assert len((await client.get("/api/v1/keys", headers=headers)).json()["items"]) == 3


@pytest.mark.parametrize("fresh_fleet", ["sqlite"], indirect=True)
async def test_a_key_without_limits_makes_any_key_also_one_that_approves(gateway: Any) -> None:
    fleet, client = gateway
    headers = await key_of(fleet, *ALL, requests_per_minute=0)
    for body in ({}, OWN_LIMITS, {"requests_per_minute": 0}):
        made = await client.post(
            "/api/v1/keys", json={"name": "x", "scopes": ["approve"], **body}, headers=headers
        )
        assert made.status_code == 201, made.text
        assert made.json()["scopes"] == ["approve"]


async def test_a_rate_is_shared_by_gateways(gateway: Any) -> None:
    fleet, client = gateway
    headers = await key_of(fleet, Scope.ADMIN, requests_per_minute=6)
    async with served(create_app(fleet.settings)) as other:
        answers = [await one.get("/api/v1/keys", headers=headers) for one in (client, other) * 4]
    assert [answer.status_code for answer in answers[:6]] == [200] * 6
    assert answers[7].status_code == 429
    assert answers[7].json()["code"] == "rate_exceeded"
    assert 1 <= int(answers[7].headers["retry-after"]) <= 60
    assert {answer.headers["ratelimit-policy"] for answer in answers} == {'"key";q=6;w=60'}
    left = [answer.headers["ratelimit"].split(";") for answer in answers]
    assert [int(one[1].removeprefix("r=")) for one in left[:3]] == [5, 4, 3]
    assert left[7][1] == "r=0" and 1 <= int(left[7][2].removeprefix("t=")) <= 60


@pytest.mark.parametrize("fresh_fleet", ["sqlite"], indirect=True)
async def test_a_key_without_a_rate_gets_no_headers_of_one(gateway: Any) -> None:
    fleet, client = gateway
    headers = await key_of(fleet, Scope.ADMIN, requests_per_minute=0)
    answer = await client.get("/api/v1/keys", headers=headers)
    assert answer.status_code == 200 and "ratelimit" not in answer.headers


async def spend(database: Database, turn_id: str, **use: float) -> None:
    """Record what a round of a turn used, as rounds workers do."""
    async with database.begin() as transaction:
        key = await transaction.spendings.paying_key([turn_id])
        assert key is not None
        await transaction.spendings.add(
            NewSpending(
                id=new_id(),
                day=day_of(datetime.now(UTC)),
                chat_key="budget",
                key_id=key.id,
                turn_id=turn_id,
                use=ModelUse(**use),  # type: ignore[arg-type]
            )
        )


async def test_a_used_up_budget_refuses_posts(gateway: Any) -> None:
    fleet, client = gateway
    headers = await key_of(fleet, Scope.POST, Scope.READ, tokens_per_day=100)
    posted = await client.post(
        "/api/v1/chats/budget/messages", json={"text": "hello", "user_id": "ada"}, headers=headers
    )
    assert posted.status_code == 202
    services = fleet.services()
    async with services.database.begin() as transaction:
        # A turn that follows from a call of the key's turn is on its budget too.
        request = RoundRequest(
            chat_key="budget",
            trigger_kind=TriggerKind.CALL,
            trigger_id="c",
            cause_turn_id=posted.json()["turn_id"],
        )
        follows = await request_round(transaction, services.publisher, request)
    assert follows is not None and follows.turn_id != posted.json()["turn_id"]
    await spend(services.database, follows.turn_id, prompt_tokens=60, completion_tokens=61)
    await services.close()
    refused = await client.post(
        "/api/v1/chats/budget/messages", json={"text": "again", "user_id": "ada"}, headers=headers
    )
    assert (refused.status_code, refused.json()["code"]) == (429, "budget_exceeded")
    assert "121 of 100 tokens" in refused.json()["detail"] and "renews at" in refused.json()["detail"]
    assert (await client.get("/api/v1/chats/budget/messages", headers=headers)).status_code == 200


async def test_a_used_up_cost_refuses_everything_that_starts_turns(gateway: Any) -> None:
    fleet, client = gateway
    headers = await key_of(fleet, *ALL, cost_per_day=0.5)
    url = "/api/v1/chats/budget/messages"
    body = {"text": "hello", "user_id": "ada"}
    first = await client.post(url, json=body, headers=headers)
    assert first.status_code == 202
    services = fleet.services()
    await spend(services.database, first.json()["turn_id"], cost=0.4)
    second = await client.post(url, json=body, headers=headers)
    assert second.status_code == 202
    await spend(services.database, second.json()["turn_id"], cost=0.1)
    completion = {"model": "nekro", "messages": [{"role": "user", "content": "hello"}]}
    run = {"code": "1", "chat_key": "budget", "follow_up": True}
    response = {"model": "nekro", "input": "hello"}
    for path, content in (
        (url, body),
        ("/v1/chat/completions", completion),
        ("/v1/responses", response),
        ("/api/v1/runs", run),
    ):
        refused = await client.post(path, json=content, headers=headers)
        assert refused.status_code == 429 and "budget_exceeded" in refused.text, (path, refused.text)
        assert 1 <= int(refused.headers["retry-after"]) <= 86_400
    # What was spent the day before does not count.
    async with services.database.begin() as transaction:
        await transaction.connection.exec_driver_sql("UPDATE spending_totals SET period = '2020-01-01'")
    await services.close()
    assert (await client.post(url, json=body, headers=headers)).status_code == 202


async def test_without_redis_each_gateway_counts_by_itself(fresh_fleet: Fleet, redis_server: Any) -> None:
    headers = await key_of(fresh_fleet, Scope.ADMIN, requests_per_minute=6)
    async with RedisRelay(redis_server.port) as relay:
        broker = fresh_fleet.settings.broker.model_copy(update={"url": relay.url})
        settings = fresh_fleet.settings.model_copy(update={"broker": broker})
        async with served(create_app(settings)) as one, served(create_app(settings)) as other:
            statuses = [(await one.get("/api/v1/keys", headers=headers)).status_code for _ in range(7)]
            assert statuses == [200] * 6 + [429]
            await relay.__aexit__()  # connections are refused from now on
            for client in (one, other):
                answers = [await client.get("/api/v1/keys", headers=headers) for _ in range(7)]
                assert [answer.status_code for answer in answers] == [200] * 6 + [429]
                assert answers[-1].json()["code"] == "rate_exceeded"
            assert (await one.get("/api/v1/keys", headers={"Authorization": ""})).status_code == 401


@pytest.mark.parametrize("fresh_fleet", ["sqlite"], indirect=True)
async def test_a_wrong_key_costs_the_same_work_whether_its_id_is_known_or_not(
    gateway: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet, client = gateway
    key = (await key_of(fleet, *ALL))["Authorization"].removeprefix("Bearer ")
    revoked = (await key_of(fleet, *ALL))["Authorization"].removeprefix("Bearer ")
    database = Database(fleet.settings.database, fleet.settings.data_dir)
    await revoke_stored_key(database, revoked.split("_")[1], by=None, request_id=None)
    await database.dispose()
    work: list[str] = []

    def compare(one: bytes, other: bytes) -> bool:
        work.append(f"compare {len(one)} {len(other)}")
        return compare_digest(one, other)

    async def find(self: KeyRepository, key_id: str) -> Any:
        work.append("find")
        return await find_valid(self, key_id)

    compare_digest, find_valid = hmac.compare_digest, KeyRepository.find_valid
    monkeypatch.setattr("nekro.gateway.access.keys.hmac.compare_digest", compare)
    monkeypatch.setattr(KeyRepository, "find_valid", find)
    first = "B" if key.split("_", 2)[2][0] == "A" else "A"
    wrong = {
        "an unknown id": f"nk_{'0' * 16}_{'A' * 43}",
        "a known id": f"nk_{key.split('_')[1]}_{'A' * 43}",
        "a secret that differs at its start": f"nk_{key.split('_')[1]}_{first}{key.split('_', 2)[2][1:]}",
        "a secret that differs at its end": key[:-1] + ("A" if key[-1] != "A" else "E"),
        "a revoked key": revoked,
    }
    for what, text in wrong.items():
        work.clear()
        refused = await client.get("/api/v1/keys", headers={"Authorization": f"Bearer {text}"})
        assert (refused.status_code, refused.json()["code"]) == (401, "key_invalid"), what
        # Digests of one length, so the position of the first difference tells nothing of the secret.
        assert work == ["find", "compare 32 32"], what


async def test_acts_are_recorded(gateway: Any) -> None:
    _, client = gateway
    made = (await client.post("/api/v1/keys", json={"name": "a", "scopes": ["admin"]})).json()
    headers = {"Authorization": f"Bearer {made['key']}", "X-Request-Id": "revocation-1"}
    other = await client.post("/api/v1/keys", json={"name": "b", "scopes": ["admin"]}, headers=headers)
    await client.delete(f"/api/v1/keys/{other.json()['id']}", headers=headers)
    first = (await client.get("/api/v1/audit?limit=2", headers=headers)).json()
    assert [act["action"] for act in first["items"]] == ["key.revoke", "key.create"]
    assert {act["key_id"] for act in first["items"]} == {made["id"]}
    assert first["items"][0]["request_id"] == "revocation-1"
    assert made["key"] not in str(first)
    rest = (await client.get(f"/api/v1/audit?cursor={first['next_cursor']}", headers=headers)).json()
    assert [(act["subject"], act["key_id"]) for act in rest["items"]] == [(made["id"], None)]


@pytest.mark.parametrize(
    "address", [{"host": "0.0.0.0"}, {"host": "::"}, {"host": "192.0.2.1"}, {"socket": Path("gateway")}]
)
async def test_refuses_other_addresses_than_loopback_without_a_valid_key(
    fresh_fleet: Fleet, address: dict[str, Any]
) -> None:
    elsewhere = fresh_fleet.settings.gateway.model_copy(update=address)
    app = create_app(fresh_fleet.settings.model_copy(update={"gateway": elsewhere}))
    with pytest.raises(UsageError, match="no valid key"):
        async with app.router.lifespan_context(app):
            raise AssertionError("it started")
    await key_of(fresh_fleet, Scope.READ)
    async with app.router.lifespan_context(app):
        pass


@pytest.mark.extended
@pytest.mark.parametrize("fresh_fleet", ["sqlite"], indirect=True)
async def test_the_command_creates_a_key_that_approves_over_a_gateway(gateway: Any, tmp_path: Path) -> None:
    fleet, client = gateway
    key = (await key_of(fleet, *ALL))["Authorization"].removeprefix("Bearer ")
    environ = {"NEKRO_URL": str(client.base_url), "NEKRO_KEY": key, "PATH": "/usr/bin:/bin"}
    command = ("keys", "create", "decider", "--scope", "approve", "--scope", "read", "--json")
    done = await asyncio.to_thread(run_forked, "nekro.cli.main", *command, environ=environ, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["scopes"] == ["approve", "read"]


@pytest.mark.extended
def test_the_command_creates_lists_and_revokes(fresh_fleet: Fleet) -> None:
    run = fresh_fleet.run
    made = run("keys", "create", "site", "--scope", "read", "--chats", "site-*", "--days", "2", "--json")
    key = json.loads(made.stdout)
    assert key["key"].startswith(f"nk_{key['id']}_") and key["expires_at"]
    (listed,) = json.loads(run("keys", "--json").stdout)
    assert listed == {name: value for name, value in key.items() if name != "key"}
    assert run("keys", "revoke", key["id"]).returncode == 0
    assert "revoked" in run("keys").stdout
    assert run("keys", "revoke", "nothing").returncode == 4
    assert run("keys", "create", "site").returncode == 2
