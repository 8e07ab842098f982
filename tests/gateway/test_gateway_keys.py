"""Keys: creation, scopes, rates, budgets, revocation; over a socket."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from gateway_server import served
from worker_fleet import Fleet

from gateway.access.keys import create_key, new_key
from gateway.app import create_app
from gateway.identity import Scope
from nekro_agent.errors import UsageError
from nekro_agent.shared_clock import shared_time
from storage.engine import Database
from storage.repositories.rounds import RoundRequest
from storage.states import TriggerKind

ALL = tuple(Scope)


async def key_of(fleet: Fleet, *scopes: Scope, **limits: Any) -> dict[str, str]:
    """Create a key; returns the header of its requests."""
    database = Database(fleet.settings.database, fleet.settings.data_dir)
    try:
        new, key = new_key("test", scopes=scopes, **limits)
        await create_key(database, new, by=None, request_id=None)
    finally:
        await database.dispose()
    return {"Authorization": f"Bearer {key}"}


async def test_without_keys_this_machine_has_full_rights(gateway: Any) -> None:
    _, client = gateway
    assert (await client.get("/api/v1/keys")).json() == {"items": [], "next_cursor": None}


async def test_from_the_first_key_on_every_request_needs_one_also_after_its_revocation(gateway: Any) -> None:
    _, client = gateway
    created = await client.post("/api/v1/keys", json={"name": "first", "scopes": ["admin", "read"]})
    assert created.status_code == 201
    key = created.json()
    headers = {"Authorization": f"Bearer {key['key']}"}
    refused = await client.get("/api/v1/keys")
    assert (refused.status_code, refused.json()["code"]) == (401, "key_missing")
    assert refused.headers["www-authenticate"].startswith("Bearer")
    listed = (await client.get("/api/v1/keys", headers=headers)).json()["items"]
    assert [one["id"] for one in listed] == [key["id"]]
    assert "key" not in listed[0] and "digest" not in listed[0]
    revoked = await client.delete(f"/api/v1/keys/{key['id']}", headers=headers)
    assert revoked.status_code == 200 and revoked.json()["revoked_at"]
    assert (await client.get("/api/v1/keys", headers=headers)).json()["code"] == "key_invalid"
    assert (await client.get("/api/v1/keys")).status_code == 401


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


async def test_a_rate_is_shared_by_gateways(gateway: Any) -> None:
    fleet, client = gateway
    headers = await key_of(fleet, Scope.ADMIN, requests_per_minute=6)
    async with served(create_app(fleet.settings)) as other:
        answers = [await one.get("/api/v1/keys", headers=headers) for one in (client, other) * 4]
    assert [answer.status_code for answer in answers[:6]] == [200] * 6
    assert answers[7].status_code == 429
    assert answers[7].json()["code"] == "rate_exceeded"
    assert 1 <= int(answers[7].headers["retry-after"]) <= 60


async def test_a_used_up_budget_refuses_posts(gateway: Any) -> None:
    fleet, client = gateway
    headers = await key_of(fleet, Scope.POST, Scope.READ, tokens_per_day=100)
    posted = await client.post(
        "/api/v1/chats/budget/messages", json={"text": "hello", "user_id": "ada"}, headers=headers
    )
    assert posted.status_code == 202
    turn_id = posted.json()["turn_id"]
    database = Database(fleet.settings.database, fleet.settings.data_dir)
    async with database.begin() as transaction:
        # What the turn's rounds use counts: also that of follow-up rounds, which no request names.
        await transaction.rounds.request(
            RoundRequest(
                chat_key="budget", trigger_kind=TriggerKind.CALL, trigger_id="c", turn_id=turn_id, number=2
            )
        )
        await transaction.connection.exec_driver_sql(
            "UPDATE rounds SET prompt_tokens = 60, completion_tokens = 1 WHERE chat_key = 'budget'"
        )
    await database.dispose()
    refused = await client.post(
        "/api/v1/chats/budget/messages", json={"text": "again", "user_id": "ada"}, headers=headers
    )
    assert (refused.status_code, refused.json()["code"]) == (429, "budget_exceeded")
    assert (await client.get("/api/v1/chats/budget/messages", headers=headers)).status_code == 200


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
