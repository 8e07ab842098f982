"""Requests that are short for their sender and costly for a gateway."""

from __future__ import annotations

from typing import Any

import pytest
from gateway_server import served
from test_gateway_keys import key_of
from worker_fleet import Fleet

from nekro.gateway.app import create_app
from nekro.operations.actor import Scope

MANY = 20_000


@pytest.fixture(scope="module")
def database_url(sqlite_url: str) -> str:
    """One kind of database: none of this depends on it."""
    return sqlite_url


@pytest.mark.parametrize(
    ("path", "body", "code"),
    [
        ("/api/v1/keys", b'{"name": "x", "scopes": [' + b"1," * MANY + b"1]}", "invalid_request"),
        ("/api/v1/calls", b"{" + b",".join(b'"%x":1' % n for n in range(MANY)) + b"}", "invalid_request"),
        (
            "/api/v1/chats/site-1/messages",
            b"{" + b",".join(b'"%x":1' % n for n in range(MANY)) + b"}",
            "invalid_request",
        ),
        (
            "/v1/chat/completions",
            b'{"model": "nekro", "messages": [' + b"1," * MANY + b"1]}",
            "invalid_request",
        ),
        ("/v1/responses", b'{"model": "nekro", "input": [' + b"1," * MANY + b"1]}", "invalid_request"),
    ],
)
async def test_faults_of_a_body_are_described_only_if_they_are_few(
    fleet: Fleet, path: str, body: bytes, code: str
) -> None:
    headers = {**await key_of(fleet, Scope.READ, Scope.POST), "Content-Type": "application/json"}
    async with served(create_app(fleet.settings)) as client:
        answer = await client.post(path, content=body, headers=headers)
        found = answer.json()
        problem = found.get("error", found)
        assert answer.status_code in (400, 422) and problem["code"] == code
        assert "faults" in (problem.get("detail") or problem["message"])
        few = await client.post("/api/v1/keys", json={"name": "x", "scopes": [1, 2]}, headers=headers)
        assert "body.scopes.0" in few.json()["detail"] and "body.scopes.1" in few.json()["detail"]


async def test_a_login_does_not_describe_the_fields_that_it_does_not_have(fleet: Fleet) -> None:
    body = {f"{number:x}": 1 for number in range(MANY)}
    async with served(create_app(fleet.settings)) as client:
        answer = await client.post("/console/session", json=body)
    assert (answer.status_code, answer.json()["detail"]) == (422, "body: it has 20001 faults")


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user"}] * MANY,
        [{"role": "user", "content": [{"type": "text", "text": "a"}] * MANY}],
    ],
)
async def test_a_completion_has_few_messages_and_parts_of_the_user(
    fleet: Fleet, messages: list[dict[str, Any]]
) -> None:
    headers = await key_of(fleet, Scope.READ, Scope.POST)
    async with served(create_app(fleet.settings)) as client:
        body = {"model": "nekro", "messages": messages}
        answer = await client.post("/v1/chat/completions", json=body, headers=headers)
    assert answer.status_code == 400 and "more than 64" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "fields",
    [
        {"metadata": {str(number): "x" for number in range(17)}},
        {"metadata": {"x": "x" * 513}},
        {"metadata": {"x" * 65: "x"}},
        {"conversation": "x" * 513},
        {"conversation": {"id": "x" * 513}},
        {"user": "x" * 513},
    ],
)
async def test_a_response_stores_no_more_than_the_protocol_has(fleet: Fleet, fields: dict[str, Any]) -> None:
    headers = await key_of(fleet, Scope.READ, Scope.POST, user_id="ada")
    body = {"model": "nekro", "input": "a", "background": True}
    most = {"metadata": {f"{number:64}": "x" * 512 for number in range(16)}, "user": "x" * 512}
    async with served(create_app(fleet.settings)) as client:
        refused = await client.post("/v1/responses", json={**body, **fields}, headers=headers)
        assert refused.status_code == 400 and next(iter(fields)) in refused.json()["error"]["param"]
        stored = await client.post("/v1/responses", json={**body, **most}, headers=headers)
        assert stored.status_code == 200 and stored.json()["metadata"] == most["metadata"]
