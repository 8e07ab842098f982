"""The application of a gateway, served over a socket."""

from __future__ import annotations

import threading

import pytest
from gateway_server import served
from worker_fleet import Fleet

from nekro.gateway.app import create_app


async def test_probes_answer(fleet: Fleet) -> None:
    async with served(create_app(fleet.settings)) as client:
        assert (await client.get("/healthz")).json() == {"ok": True}
        assert (await client.get("/readyz")).json() == {"ok": True}


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/api/v1/chats"),
        ("GET", "/api/v1/turns?limit=5"),
        ("POST", "/api/v1/chats/threads/messages"),
        ("POST", "/api/v1/chats/threads/cancel"),
        ("GET", "/v1/models"),
        ("GET", "/v1/responses/resp_none"),
        ("POST", "/api/adapters/sse/connect"),
    ],
)
async def test_a_request_waits_for_no_thread(fleet: Fleet, method: str, path: str) -> None:
    """FastAPI calls dependencies that are not coroutine functions on threads of AnyIO."""
    body = {"text": "hello", "user_id": "ada", "to_agent": False} if path.endswith("messages") else None
    async with served(create_app(fleet.settings)) as client:
        before = set(threading.enumerate())
        answer = await client.request(method, path, json=body)
        started = set(threading.enumerate()) - before
    assert answer.status_code < 500
    assert [thread.name for thread in started if thread.name.startswith("AnyIO")] == []


async def test_an_unknown_path_is_a_problem_document(fleet: Fleet) -> None:
    async with served(create_app(fleet.settings)) as client:
        answer = await client.get("/nothing")
        wrong_method = await client.delete("/api/v1/chats")
    assert answer.status_code == 404
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json()["code"] == "not_found"
    assert answer.json()["detail"].startswith("GET /nothing: nothing is served there")
    assert wrong_method.json()["code"] == "method_not_allowed"
    assert wrong_method.json()["detail"] == "DELETE /api/v1/chats: this path has other methods: GET"


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("POST", "/v1/embeddings", 404, "not_found"),
        ("PUT", "/v1/chat/completions", 405, "method_not_allowed"),
        ("POST", "/v1/chat/completions", 413, "body_too_large"),
    ],
)
async def test_an_error_below_v1_has_the_form_of_openai(
    fleet: Fleet, method: str, path: str, status: int, code: str
) -> None:
    """Its package for npm says "404 status code (no body)" about any other form."""
    settings = fleet.settings.model_copy(
        update={"gateway": fleet.settings.gateway.model_copy(update={"media_bytes": 9})}
    )
    async with served(create_app(settings)) as client:
        answer = await client.request(method, path, content=b"[" * (10 if status == 413 else 0))
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code), answer.text
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert answer.headers["content-type"] == "application/json"


@pytest.mark.parametrize(
    ("body", "detail"),
    [
        (b'{"method": ', "body: it is not valid JSON: Expecting value at character 11"),
        (b"[" * 100_000, "the body is nested too deeply"),
        (b"9" * 10_000, "a number of the body has too many digits"),
        (b'"\xff"', "the body is not UTF-8"),
    ],
)
async def test_a_body_that_is_no_json_is_refused_with_the_reason(
    fleet: Fleet, body: bytes, detail: str
) -> None:
    headers = {"Content-Type": "application/json"}
    async with served(create_app(fleet.settings)) as client:
        answer = await client.post("/api/v1/calls", content=body, headers=headers)
    assert (answer.status_code, answer.json()["detail"]) == (400, detail)
