"""Webhooks, routes and pages of plugins through a gateway and real workers."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest
from gateway_server import served
from metric_values import figures_of
from raw_http import raw, request_bytes
from waiting import WAIT_SECONDS, eventually
from worker_fleet import Fleet

from broker_config.settings import Settings
from nekro.gateway.app import create_app
from nekro_client.models import Problem
from storage.caller_reads import lane_overrides

#: The catalogue names the servers of plugins; tests/storage/test_storage_catalogue.py and test_plugin_sites
#: test it on both databases.
pytestmark = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)

ACCESS = ("Ada.web_shop=open", "Ada.web_bad=plugin", "Ada.web_pages=open")
KEYED = ("Ada.web_shop=key", "Ada.web_bad=closed", "Ada.web_pages=key")


@pytest.fixture(scope="module")
def fleet(make_fleet: Callable[..., Fleet]) -> Fleet:
    fleet = make_fleet(agent={"lease_seconds": 8})  # so long a dead worker is listed
    fleet.start("methods", "long")
    return fleet


def with_access(settings: Settings, *access: str, **options: Any) -> Settings:
    values = {"plugin_http": access, "plugin_seconds": WAIT_SECONDS / 2, **options}
    return settings.model_copy(update={"gateway": settings.gateway.model_copy(update=values)})


@pytest.fixture
async def client(fleet: Fleet) -> AsyncIterator[httpx.AsyncClient]:
    async with served(create_app(with_access(fleet.settings, *ACCESS))) as client:
        await until_served(client, "/plugins/Ada.web_shop/", "/plugins/Ada.web_pages/count")
        yield client


@pytest.fixture
async def hasty(fleet: Fleet) -> AsyncIterator[httpx.AsyncClient]:
    """Of a gateway that waits 5 s for a plugin."""
    async with served(create_app(with_access(fleet.settings, *ACCESS, plugin_seconds=5.0))) as client:
        await until_served(client, "/plugins/Ada.web_shop/", "/plugins/Ada.web_pages/count")
        yield client


async def until_served(client: httpx.AsyncClient, *paths: str) -> None:
    for path in paths:

        async def answers(path: str = path) -> bool:
            return (await client.get(path)).status_code < 500

        await eventually(answers, what=f"{path} is served")


async def has_no_worker(client: httpx.AsyncClient, path: str) -> bool:
    answer = await client.get(path)
    return answer.status_code == 503 and answer.json()["code"] == "no_worker"


@pytest.mark.extended
async def test_published_kinds_of_routes_work(client: httpx.AsyncClient) -> None:
    index = await client.get("/plugins/Ada.web_shop/")
    assert index.headers["content-type"].startswith("text/html")
    assert f"{client.base_url}/plugins/Ada.web_shop/orders/1" in index.text
    added = await client.post("/plugins/Ada.web_shop/orders/1", json={"name": "tea", "count": 2})
    assert added.json()["number"] == 1
    assert (await client.get("/plugins/Ada.web_shop/orders/1")).json() == {"name": "tea", "count": 2}
    missing = await client.get("/plugins/Ada.web_shop/orders/2")
    assert (missing.status_code, missing.json()) == (404, {"detail": "no order 2"})
    wrong = await client.post("/plugins/Ada.web_shop/orders/1", json={"count": "many"})
    assert wrong.status_code == 422
    content = os.urandom(3 << 20)
    files = {"file": ("a.bin", content, "application/x-thing")}
    uploaded = await client.post("/plugins/Ada.web_shop/upload", files=files)
    assert uploaded.json() == {"name": "a.bin", "size": len(content), "type": "application/x-thing"}
    async with client.stream("GET", "/plugins/Ada.web_shop/numbers?count=100") as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        lines = [line async for line in stream.aiter_lines() if line]
    assert lines == [f"data: {number}" for number in range(100)]


async def test_requests_arrive_whole_and_without_what_a_client_may_not_state(
    client: httpx.AsyncClient,
) -> None:
    headers = {
        "X-Forwarded-For": "10.9.9.9",
        "X-Forwarded-Proto": "https",
        "Forwarded": "for=10.9.9.9",
        "X-Nekro-User": "root",
        "X-Nekro-Signature": "1.2.3",
        "Connection": "keep-alive, X-Dropped",
        "X-Dropped": "1",
        "X-Kept": "2",
        "Cookie": "session=1",
        "Authorization": "Bearer secret",
    }
    answer = await client.put("/plugins/Ada.web_shop/echo?a=%2F&b=%C3%BC", content=b"body", headers=headers)
    seen = answer.json()
    assert (seen["method"], seen["query"], seen["body"]) == ("PUT", "a=%2F&b=%C3%BC", "body")
    assert seen["url"] == f"{client.base_url}/plugins/Ada.web_shop/echo?a=%2F&b=%C3%BC"
    assert seen["headers"]["x-kept"] == "2"
    assert seen["headers"]["x-forwarded-for"] == "127.0.0.1"
    assert seen["headers"]["x-forwarded-proto"] == "http"
    gone = {"forwarded", "x-nekro-user", "x-nekro-signature", "x-dropped", "cookie", "authorization"}
    assert not gone & seen["headers"].keys()
    assert "x-nekro-proof" not in answer.headers
    cookie = await client.get("/plugins/Ada.web_shop/cookie")
    assert not {"set-cookie", "service-worker-allowed"} & cookie.headers.keys()


async def test_routes_of_a_pinned_plugin_share_the_state_of_its_methods(
    client: httpx.AsyncClient, fleet: Fleet
) -> None:
    before = (await client.get("/plugins/Ada.web_pages/count")).json()
    called = await asyncio.to_thread(fleet.run, "call", "increase", "--json")
    assert called.returncode == 0, called.stderr
    after = (await client.get("/plugins/Ada.web_pages/count")).json()
    assert after == {"count": before["count"] + 1, "pid": before["pid"]}
    hook = (await client.post("/api/webhook/pages")).json()
    assert hook["data"]["results"] == [{"plugin_key": "Ada.web_pages", "result": list(after.values())}]
    ordinary = (await client.post("/plugins/Ada.web_shop/orders/3", json={"name": "x"})).json()
    assert ordinary["pid"] != after["pid"]
    assert ordinary["thread"] == "nekro-http-Ada.web_shop"


async def test_pages_are_served_and_no_path_leads_out_of_them(
    client: httpx.AsyncClient, fleet: Fleet
) -> None:
    index = await client.get("/plugins/Ada.web_pages/")
    assert (index.status_code, "<title>Pages</title>" in index.text) == (200, True)
    script = await client.get("/plugins/Ada.web_pages/app.js")
    assert script.headers["content-type"].startswith("text/javascript")
    redirected = await client.get("/plugins/Ada.web_pages")
    assert redirected.headers["location"].endswith("/plugins/Ada.web_pages/")
    for path in (
        "../__init__.py",
        "..%2f__init__.py",
        "%2e%2e/__init__.py",
        "..%5c__init__.py",
        "%2fetc%2fpasswd",
        "/etc/passwd",
        "app.js%00.html",
        "%2e%2e%2f%2e%2e%2f%2e%2e%2fetc/passwd",
        "....//__init__.py",
    ):
        request = client.build_request("GET", "/")
        request.url = request.url.copy_with(raw_path=f"/plugins/Ada.web_pages/{path}".encode())
        answer = await client.send(request)
        assert answer.status_code in (400, 404, 405), (path, answer.status_code)
        assert "NekroPlugin" not in answer.text
        assert "root:" not in answer.text


async def test_access_is_closed_unless_opened_and_pages_with_a_key_are_inert(fleet: Fleet) -> None:
    async with served(create_app(with_access(fleet.settings))) as client:
        texts = set()
        for path in ("/plugins/Ada.web_shop/", "/plugins/Ada.nothing/", "/plugins/Ada.web_pages/"):
            answer = await client.get(path)
            assert (answer.status_code, answer.json()["code"]) == (404, "not_found")
            texts.add(answer.json()["detail"].replace(path, "…"))
        assert len(texts) == 1
        assert (await client.post("/api/webhook/paid", json={})).status_code == 404
    async with served(create_app(with_access(fleet.settings, *KEYED))) as client:
        page = await client.get("/plugins/Ada.web_shop/cookie")
        assert (page.status_code, page.headers["content-security-policy"]) == (200, "sandbox")
        assert page.headers["x-content-type-options"] == "nosniff"
        answer = (await client.post("/api/webhook/paid", json={})).json()
        assert [one["plugin_key"] for one in answer["data"]["results"]] == ["Ada.web_shop"]
        # Before the body, which does not come here.
        headers = {"Authorization": "Bearer none", "Content-Length": "1000"}
        refused = await raw(client.base_url.port or 0, request_bytes("POST", "/api/webhook/paid", headers))
        assert (refused.status, refused.code) == (401, "key_invalid")


async def test_requests_to_plugins_are_counted_by_plugin_and_class_of_status(
    hasty: httpx.AsyncClient,
) -> None:
    before = await figures_of(hasty)
    for path in ("Ada.web_shop/", "Ada.web_shop/", "Ada.web_shop/orders/77", "Ada.web_bad/silent"):
        await hasty.get(f"/plugins/{path}")
    with pytest.raises(httpx.ReadTimeout):
        await hasty.get("/plugins/Ada.web_bad/silent", timeout=0.2)
    # No label for what no plugin has.
    await hasty.get("/plugins/Ada.nothing/")

    async def counted() -> dict[tuple[str, ...], float]:
        found = {
            key: value - before.get(key, 0)
            for key, value in (await figures_of(hasty)).items()
            if key[0] in ("nekro_plugin_http_requests_total", "nekro_plugin_http_seconds_count")
        }
        return {key[1:]: value for key, value in found.items() if value}

    wanted = {
        ("Ada.web_shop", "2xx"): 2,
        ("Ada.web_shop", "4xx"): 1,
        ("Ada.web_bad", "5xx"): 1,
        ("Ada.web_bad", "left"): 1,
        ("Ada.web_shop",): 3,
        ("Ada.web_bad",): 2,
    }

    async def is_counted() -> bool:
        return await counted() == wanted

    await eventually(is_counted, what=lambda: f"{wanted}")


async def test_a_webhook_runs_every_plugin_and_reports_each(client: httpx.AsyncClient, fleet: Fleet) -> None:
    answer = await client.post(
        "/api/webhook/paid",
        json={"order": [1, 2.5, None, "ü"]},
        headers={"Cookie": "c=1", "User-Agent": "sender"},
    )
    data = answer.json()
    assert (answer.status_code, data["success"], data["data"]["errors"]) == (200, True, [])
    results = {one["plugin_key"]: one["result"] for one in data["data"]["results"]}
    assert results["Ada.web_bad"] == "noted"
    assert results["Ada.web_shop"]["body"] == {"order": [1, 2.5, None, "ü"]}
    assert results["Ada.web_shop"]["agent"] == "sender"
    assert "cookie" not in results["Ada.web_shop"]["headers"]
    called = await asyncio.to_thread(fleet.run, "call", "was_paid", "--json")
    assert '"value": "yes"' in called.stdout
    failed = (await client.post("/api/webhook/paid", json={"fail": True})).json()
    assert (failed["success"], len(failed["data"]["results"])) == (False, 1)
    assert "no such order" in failed["data"]["errors"][0]["error"]
    for body, seen in ((b"a=1&b=2", "a=1&b=2"), (b"\xff\x00", "\ufffd\x00"), (b"[" * 100_000, "[" * 100_000)):
        raw = (await client.post("/api/webhook/paid", content=body)).json()
        got = {one["plugin_key"]: one["result"] for one in raw["data"]["results"]}
        assert got["Ada.web_shop"]["body"] == {"raw_content": seen}
    assert (await client.post("/api/webhook/unknown", json={})).status_code == 404


async def test_no_plugin_receives_a_key_or_a_session_of_the_gateway(fleet: Fleet) -> None:
    """Also a plugin that checks requests itself, and so receives their other tokens and cookies."""
    key = f"nk_{'0a' * 8}_{'A' * 43}"
    own = {
        "Authorization": f"bearer  {key}",
        "X-Webhook-Token": key,
        "X-Api-Key": f"key={key[:-1]}",
        "Cookie": f"nekro_console_8600=nc_0_0; session=1;__Host-nekro_console=x; k={key}; nk_mine=2",
        "X-Nekro-User": "root",
    }
    others = {
        "Authorization": "Bearer nk_of-another-service",
        "X-Webhook-Token": "the sender's",
        "X-Hub-Signature-256": "sha256=0a",
    }
    async with served(create_app(with_access(fleet.settings, "Ada.web_shop=plugin"))) as client:
        await until_served(client, "/plugins/Ada.web_shop/numbers")

        async def seen(headers: dict[str, str]) -> list[dict[str, str]]:
            routed = (await client.get("/plugins/Ada.web_shop/echo", headers=headers)).json()["headers"]
            hook = (await client.post("/api/webhook/paid", json={}, headers=headers)).json()["data"]
            return [routed, hook["results"][0]["result"]["headers"]]

        for received in await seen(own):
            assert "0a0a" not in str(received)
            assert not {"authorization", "x-webhook-token", "x-api-key", "x-nekro-user"} & received.keys()
            assert received["cookie"] == "session=1; nk_mine=2"
        for received in await seen(others):
            assert received.items() >= {name.lower(): value for name, value in others.items()}.items()
        for received in await seen({"Cookie": "nekro_console_8600=nc_0_0"}):
            assert "cookie" not in received


async def test_a_slow_webhook_ends_at_its_time_limit_and_others_answer(
    client: httpx.AsyncClient, hasty: httpx.AsyncClient
) -> None:
    slow = asyncio.create_task(hasty.post("/api/webhook/paid", json={"sleep": 3600}))
    others = [client.post("/api/webhook/pages") for _ in range(5)]
    assert all(answer.json()["success"] for answer in await asyncio.gather(*others))
    data = (await slow).json()["data"]
    assert [one["plugin_key"] for one in data["results"]] == ["Ada.web_shop"]
    assert [one["plugin_key"] for one in data["errors"]] == ["Ada.web_bad"]


async def test_a_webhook_that_blocks_its_loop_moves_to_lane_long(
    client: httpx.AsyncClient, fleet: Fleet
) -> None:
    services = fleet.services()

    async def is_moved() -> bool:
        async with services.database.read() as transaction:
            return "Ada.web_bad.webhook:paid" in await lane_overrides(transaction.connection)

    assert (await client.post("/api/webhook/paid", json={"block": 2})).json()["success"]
    await eventually(is_moved, what="the watchdog has moved it")
    assert (await client.post("/api/webhook/paid", json={"block": 0})).json()["success"]
    await services.database.dispose()


async def test_limits_of_bodies_and_answers(fleet: Fleet) -> None:
    settings = with_access(fleet.settings, *ACCESS, plugin_body_bytes=2000, webhook_body_bytes=1024)
    async with served(create_app(settings)) as client:
        for content in (b"x" * 2001, chunks(b"x" * 500, 5)):
            answer = await client.post("/plugins/Ada.web_shop/echo", content=content)
            assert (answer.status_code, answer.json()["code"]) == (413, "body_too_large")
        assert (await client.post("/api/webhook/paid", content=b" " * 1025)).status_code == 413
        answer = await client.post("/plugins/Ada.web_shop/echo", content=chunks(b"x" * 500, 4))
        assert answer.json()["body"] == "x" * 2000
        with pytest.raises(httpx.RemoteProtocolError):
            await client.get("/plugins/Ada.web_bad/half")
    settings = with_access(fleet.settings, *ACCESS, plugin_seconds=2.0, plugin_requests=2)
    async with served(create_app(settings)) as client:
        silent = [asyncio.create_task(client.get("/plugins/Ada.web_bad/silent")) for _ in range(3)]
        answers = await asyncio.gather(*silent)
        assert sorted(a.json()["code"] for a in answers) == [
            "plugin_busy",
            "plugin_timeout",
            "plugin_timeout",
        ]


async def chunks(part: bytes, count: int) -> AsyncIterator[bytes]:
    for _ in range(count):
        yield part


async def test_a_client_that_leaves_ends_an_endless_answer(client: httpx.AsyncClient) -> None:
    closed = (await client.get("/plugins/Ada.web_bad/closed")).json()
    for _ in range(3):
        async with client.stream("GET", "/plugins/Ada.web_bad/for-ever") as stream:
            assert await anext(stream.aiter_raw())

    async def all_closed() -> bool:
        return bool((await client.get("/plugins/Ada.web_bad/closed")).json() == closed + 3)

    await eventually(all_closed, what="the plugin has ended its streams")


@pytest.mark.extended
async def test_a_blocking_plugin_stops_only_its_own_routes(
    client: httpx.AsyncClient, hasty: httpx.AsyncClient, fleet: Fleet
) -> None:
    # Withdrawn after 6 to 8 s; each request that asks the server until then takes 5 s.
    blocked = asyncio.create_task(hasty.get("/plugins/Ada.web_bad/block?seconds=30"))
    for _ in range(10):
        assert (await client.get("/plugins/Ada.web_shop/numbers")).status_code == 200
    assert (await client.post("/api/webhook/pages")).json()["success"]
    assert (await blocked).json()["code"] == "plugin_timeout"

    async def is_back() -> bool:
        return (await hasty.get("/plugins/Ada.web_bad/closed")).status_code == 200

    await eventually(
        lambda: has_no_worker(hasty, "/plugins/Ada.web_bad/closed"),
        what="gateways do not ask the blocked server",
    )
    await eventually(is_back, what="the server is asked again")
    log = "".join(worker.log.read_text() for worker in fleet.workers)
    assert "plugin_routes_block" in log
    assert "web_bad.py" in log


async def test_only_gateways_of_the_fleet_reach_the_servers_of_plugins(
    client: httpx.AsyncClient, fleet: Fleet
) -> None:
    services = fleet.services()
    await services.start()
    try:
        async with services.database.read() as transaction:
            (site,) = await transaction.catalogue.sites_of("Ada.web_shop")
    finally:
        await services.close()
    async with httpx.AsyncClient(base_url=f"http://{site.address}", timeout=WAIT_SECONDS) as direct:
        for headers in ({}, {"x-nekro-signature": "1.2.3"}, {"x-nekro-signature": "ü.ü.ü".encode()}):
            refused = await direct.get("/plugins/Ada.web_shop/", headers=headers)  # type: ignore[arg-type]
            assert refused.status_code == 403


@pytest.mark.extended
async def test_a_disabled_plugin_answers_404(client: httpx.AsyncClient, fleet: Fleet) -> None:
    async def status() -> int:
        return (await client.get("/plugins/Ada.web_shop/numbers")).status_code

    async def is_gone() -> bool:
        return await status() == 404

    async def is_left_out() -> bool:
        data = (await client.post("/api/webhook/paid", json={})).json()["data"]
        return [one["plugin_key"] for one in data["results"]] == ["Ada.web_bad"]

    async def is_back() -> bool:
        return await status() == 200

    await asyncio.to_thread(fleet.run, "plugins", "disable", "Ada.web_shop")
    await eventually(is_gone, what="its routes are not served")
    await eventually(is_left_out, what="its webhook does not run")
    await asyncio.to_thread(fleet.run, "plugins", "enable", "Ada.web_shop")
    await eventually(is_back, what="its routes are served again")


@pytest.mark.extended
async def test_a_plugin_that_ends_its_process_does_not_hurt_calls_and_comes_back(
    client: httpx.AsyncClient, fleet: Fleet
) -> None:
    crashed = await client.get("/plugins/Ada.web_bad/crash")
    assert (crashed.status_code, crashed.json()["code"]) == (502, "plugin_failed")
    assert (await client.post("/api/webhook/pages")).json()["success"]
    called = await asyncio.to_thread(fleet.run, "call", "increase")
    assert called.returncode == 0, called.stderr

    await eventually(
        lambda: has_no_worker(client, "/plugins/Ada.web_shop/numbers"),
        what="the lease of the dead worker is over",
    )
    await asyncio.to_thread(fleet.start, "long")
    await until_served(client, "/plugins/Ada.web_shop/numbers")


@pytest.mark.extended
async def test_a_webhook_that_ends_its_process_is_reported_and_not_repeated(fleet: Fleet) -> None:
    # If no other worker is left in its lane, the call's row decides at the time limit, after its lease's end.
    async with served(create_app(with_access(fleet.settings, *ACCESS, plugin_seconds=30.0))) as client:
        answer = await client.post("/api/webhook/paid", json={"crash": True}, timeout=WAIT_SECONDS)
        errors = {one["plugin_key"]: one["error"] for one in answer.json()["data"]["errors"]}
        # Like for methods with an effect, whether it happened is not known.
        assert "a worker died inside it" in errors["Ada.web_bad"]
        # One that blocked its loop in another test runs on lane long since.
        await asyncio.to_thread(fleet.start, "methods", "long")
        again = await client.post("/api/webhook/paid", json={"order": 1}, timeout=WAIT_SECONDS)
        assert again.json()["success"], again.json()


@pytest.mark.parametrize("error", ["ValueError", "CancelledError", "SystemExit"])
async def test_an_uncaught_error_of_a_route_is_a_problem_document(
    fleet: Fleet, client: httpx.AsyncClient, error: str
) -> None:
    request_id = f"request-{error}"
    answer = await client.get(
        "/plugins/Ada.web_bad/raises", params={"error": error}, headers={"X-Request-Id": request_id}
    )
    problem = Problem.model_validate_json(answer.content)
    assert (answer.status_code, answer.headers["content-type"]) == (500, "application/problem+json")
    assert (problem.status, problem.code, problem.request_id) == (500, "plugin_route_failed", request_id)
    assert "secret" not in answer.text and "Traceback" not in answer.text
    assert (await client.get("/plugins/Ada.web_bad/closed")).status_code == 200  # its worker still runs

    def logged() -> bool:
        text = "".join(path.read_text() for path in fleet.directory.rglob("*.log"))
        return "plugin_route_failed" in text and request_id in text and "secret of the plugin" in text

    await eventually(logged, what="the worker's log has the error")


async def test_a_request_whose_length_is_ambiguous_reaches_no_plugin(fleet: Fleet) -> None:
    headers = {"Content-Length": "5", "Transfer-Encoding": "chunked"}
    request = request_bytes("POST", "/plugins/Ada.web_shop/echo", headers, b"0\r\n\r\n")
    async with served(create_app(with_access(fleet.settings, *ACCESS)), http="h11") as client:
        answer = await raw(client.base_url.port or 0, request)
    assert (answer.status, answer.code) == (400, "length_ambiguous")
