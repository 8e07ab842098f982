"""Calls, catalogue, configuration, jobs, timers, dead letters and queues, with real workers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis
from gateway_server import served
from key_ring import make_key
from waiting import eventually
from worker_fleet import Fleet

from broker_config.keys import Keys
from nekro.base.release import release
from nekro.gateway.app import create_app
from nekro.operations.actor import Scope
from nekro_agent.ports import CronJob, WorkdayMode
from nekro_agent.shared_clock import shared_time
from nekro_client import AsyncClient, Client, ConflictError
from storage.engine import Database

CHAT = {"chat_key": "group_1"}


@pytest.fixture(scope="module")
def database_url(sqlite_url: str) -> str:
    """One kind of database: the rows of jobs, timers and calls are tested on both."""
    return sqlite_url


@pytest.fixture(scope="module")
def operated(make_fleet: Callable[..., Fleet]) -> Fleet:
    """A fleet with workers for calls and jobs."""
    fleet = make_fleet()
    fleet.start("methods", "methods", "long")
    return fleet


@pytest.fixture(scope="module")
def readers(operated: Fleet) -> tuple[str, str]:
    """Keys that only read: the chat of the calls, and other chats."""
    own = make_key(operated.settings, Scope.READ, chats=CHAT["chat_key"])
    return own, make_key(operated.settings, Scope.READ, chats="x-*")


@pytest.fixture
async def api(operated: Fleet) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a gateway on the fleet."""
    async with served(create_app(operated.settings)) as client:
        client.base_url = client.base_url.join("/api/v1/")
        client.timeout = httpx.Timeout(120)
        yield client


async def call(api: httpx.AsyncClient, method: str, *args: Any, **more: Any) -> httpx.Response:
    return await api.post("calls", json={"method": method, "args": args, **CHAT, **more})


async def test_a_command_s_files_can_be_fetched(api: httpx.AsyncClient) -> None:
    body = {"line": "/chart", "user_id": "u", **CHAT}
    drawn, done = (await api.post("commands", json=body)).json()["responses"]
    assert done["status"] == "success"
    picture, foreign, missing = drawn["output_segments"]
    assert (picture["type"], picture["file_name"], picture["file"]["name"]) == ("image", *["chart.svg"] * 2)
    assert (await api.get(str(api.base_url.copy_with(path=picture["file"]["url"])))).text == "<svg/>"
    for part, name in ((foreign, "host.txt"), (missing, "gone.svg")):
        # The reason, which names paths of the host, is in the log.
        assert (part["type"], part["text"], part["file"]) == (
            "text", f"[the image {name} could not be sent]", None,
        )  # fmt: skip


async def test_a_call_returns_its_value(api: httpx.AsyncClient) -> None:
    value = {"ü": [1, 2.5, None, True, "x" * 100_000]}
    done = (await call(api, "Ada.operated.echo", value)).json()
    assert (done["state"], done["value"], done["type"]) == ("done", value, "tool")
    assert done["method"] == "Ada.operated.echo" and done["worker"]
    strange = (await call(api, "strange")).json()
    assert strange["value"] == [None, {"base64": "Ynl0ZXM="}]


async def test_errors_of_calls_are_problems(api: httpx.AsyncClient) -> None:
    for answer, status, code in (
        (await call(api, "fail"), 422, "method_failed"),
        (await call(api, "nothing"), 404, "method_not_found"),
        (await call(api, "echo"), 422, "argument"),
        (await call(api, "echo", 1, timeout_seconds=0), 422, "invalid_request"),
    ):
        assert (answer.status_code, answer.json()["code"]) == (status, code), answer.text
        assert answer.headers["content-type"] == "application/problem+json"


async def test_a_repeated_call_has_one_effect_also_after_a_crash(
    operated: Fleet, api: httpx.AsyncClient
) -> None:
    before = int((await call(api, "count")).json()["value"])
    body = {"method": "count", **CHAT}
    first = await api.post("calls", json=body, headers={"Idempotency-Key": "c"})
    database = Database(operated.settings.database, operated.settings.data_dir)
    async with database.begin() as transaction:
        await transaction.connection.exec_driver_sql(
            "UPDATE idempotent_requests SET status = NULL, answer = NULL,"
            " lease_until = '2020-01-01 00:00:00.000000'"
        )
    await database.dispose()
    again = await api.post("calls", json=body, headers={"Idempotency-Key": "c"})
    assert first.json()["value"] == again.json()["value"] == str(before + 1)
    assert first.json()["id"] == again.json()["id"]
    failed = [
        await api.post("calls", json={"method": "fail", **CHAT}, headers={"Idempotency-Key": "f"})
        for _ in range(2)
    ]
    assert [one.json()["code"] for one in failed] == ["method_failed"] * 2
    assert failed[1].headers["idempotency-replayed"] == "true"


async def test_the_catalogue_is_listed(api: httpx.AsyncClient) -> None:
    methods = (await api.get("methods", params={"text": "Ada.operated"})).json()["items"]
    assert {method["name"] for method in methods} >= {"echo", "count", "begin"}
    (plugin,) = [one for one in (await api.get("plugins")).json()["items"] if one["key"] == "Ada.operated"]
    assert (plugin["status"], plugin["version"], plugin["is_enabled"]) == ("ok", "1.0.0", True)
    workers = (await api.get("workers")).json()["items"]
    assert sorted(worker["lane"] for worker in workers if worker["is_live"]) == ["long", "methods", "methods"]
    (version,) = plugin["versions"]
    assert set(version["workers"]) >= {worker["name"] for worker in workers if worker["is_live"]}
    assert version["status"] == "ok" and version["digest"] and version["methods"] >= 3
    assert {(worker["release"], worker["running_calls"]) for worker in workers} == {(release(), 0)}
    assert all(worker["lease_until"] > worker["started_at"] for worker in workers if worker["is_live"])
    queues = (await api.get("queues")).json()
    assert {queue["lane"] for queue in queues["queues"]} >= {"methods", "long", "rounds"}


async def test_a_configuration_is_changed_on_all_workers_and_its_secrets_stay(api: httpx.AsyncClient) -> None:
    url = "plugins/Ada.operated/config"
    shown = (await api.get(url)).json()
    assert shown["values"] == {"LIMIT": 3, "SERVER": {"url": "http://localhost"}}
    assert shown["secrets"] == {"TOKEN": True, "SERVER.password": False}
    assert "default-token" not in str(shown)
    changed = await api.patch(
        url, json={"values": {"LIMIT": 7, "TOKEN": "s3cret", "SERVER": {"password": "hunter2"}}}
    )
    assert changed.json()["values"]["LIMIT"] == 7
    assert changed.json()["secrets"] == {"TOKEN": True, "SERVER.password": True}
    assert "s3cret" not in changed.text and "hunter2" not in changed.text
    values = [(await call(api, "limit")).json() for _ in range(20)]
    assert {one["value"] for one in values} == {7}
    for body, text in (
        ({"LIMIT": 99}, "LIMIT"),
        ({"NOTHING": 1}, "NOTHING"),
        ({"LIMIT": "many"}, "LIMIT"),
    ):
        refused = await api.patch(url, json={"values": body})
        assert refused.status_code == 422 and text in refused.json()["detail"]
    assert (await api.get(url)).json()["values"]["LIMIT"] == 7
    assert (await api.get("plugins/Ada.nothing/config")).status_code == 404
    acts = (await api.get("audit")).json()["items"]
    assert acts[0]["action"] == "plugin.configure" and "s3cret" not in str(acts)
    for params, count in (
        ({"action": "plugin."}, True),
        ({"action": "key."}, False),
        ({"subject": "Ada.operated"}, True),
        ({"subject": "Ada"}, False),
    ):
        assert bool((await api.get("audit", params=params)).json()["items"]) is count, params


@pytest.mark.extended
async def test_a_plugin_is_disabled_and_enabled(api: httpx.AsyncClient) -> None:
    state = (await api.post("plugins/Ada.operated/disable")).json()
    assert state == {"key": "Ada.operated", "is_enabled": False, "is_changed": True}

    async def is_disabled() -> bool:
        return (await call(api, "echo", 1)).json().get("code") == "method_disabled"

    async def is_enabled() -> bool:
        # Each worker applies the decision by itself, and a call reaches any of them.
        return {(await call(api, "echo", 1)).status_code for _ in range(20)} == {200}

    await eventually(is_disabled, what="all workers disable the plugin")
    assert (await api.post("plugins/Ada.operated/disable")).json()["is_changed"] is False
    await api.post("plugins/Ada.operated/enable")
    await eventually(is_enabled, what="all workers enable the plugin")


@pytest.mark.extended
async def test_jobs_are_listed_signalled_and_cancelled(
    api: httpx.AsyncClient, readers: tuple[str, str]
) -> None:
    for name in ("one", "two", "three"):
        assert (await call(api, "begin", name)).status_code == 200
    first = (await api.get("jobs", params={"limit": 1, "open": True})).json()
    others = (await api.get("jobs", params={"limit": 2, "cursor": first["next_cursor"]})).json()
    listed = [*first["items"], *others["items"]]
    assert [one["task_id"] for one in listed] == ["three", "two", "one"]
    newest, middle, oldest = (one["id"] for one in listed)
    url, key = str(api.base_url), api.headers["Authorization"].removeprefix("Bearer ")
    async with AsyncClient(url, key=key) as client:
        assert (await client.jobs.signal(newest, "go", {"x": 1})).id == newest
        assert (await client.jobs.cancel(oldest)).id == oldest
    with Client(url, key=key) as client:
        assert (await asyncio.to_thread(client.jobs.signal, middle, "go")).id == middle

    async def have_ended() -> bool:
        states = [(await api.get(f"jobs/{job}")).json()["state"] for job in (newest, middle, oldest)]
        return states == ["done", "done", "cancelled"]

    for reader, seen in zip(readers, ([newest, middle, oldest], []), strict=True):
        headers = {"Authorization": f"Bearer {reader}"}
        page = (await api.get("jobs", headers=headers)).json()
        assert [one["id"] for one in page["items"]][:3] == seen
        assert (await api.get(f"jobs/{newest}", headers=headers)).status_code == (200 if seen else 404)
        refused = await api.post(f"jobs/{newest}/cancel", headers=headers)
        assert refused.json()["code"] == "scope_missing"

    await eventually(have_ended, what="two jobs end by their signals, one by cancellation")
    ended = (await api.get(f"jobs/{newest}")).json()
    assert (ended["message"], ended["attempt"]) == ("got {'x': 1}", 1) and ended["worker"]
    assert (await api.get(f"jobs/{middle}")).json()["message"] == "got None"
    with Client(url, key=key) as client, pytest.raises(ConflictError) as caught:
        await asyncio.to_thread(client.jobs.signal, newest, "go")
    assert caught.value.code == "job_ended"


async def test_timers_are_listed_paused_and_deleted(operated: Fleet, api: httpx.AsyncClient) -> None:
    database = Database(operated.settings.database, operated.settings.data_dir)
    async with database.begin() as transaction:
        await transaction.chats.ensure("timed")
        for number in range(3):
            at = shared_time() + timedelta(days=1 + number)
            await transaction.timers.add("timed", fire_at=at, description=f"t{number}")
    await database.dispose()
    first = (await api.get("timers", params={"chat_key": "timed", "limit": 2})).json()
    cursor = {"chat_key": "timed", "limit": 2, "cursor": first["next_cursor"]}
    rest = (await api.get("timers", params=cursor)).json()
    timers = [*first["items"], *rest["items"]]
    assert sorted(timer["description"] for timer in timers) == ["t0", "t1", "t2"]
    url = f"timers/{timers[0]['id']}"
    assert (await api.patch(url, json={"state": "paused"})).json()["state"] == "paused"
    assert (await api.patch(url, json={"state": "waiting"})).json()["state"] == "waiting"
    assert (await api.delete(url)).status_code == 200
    assert (await api.delete(url)).status_code == 404


async def test_every_timer_is_listed_once_whatever_its_id_is(operated: Fleet, api: httpx.AsyncClient) -> None:
    ids = ["a", "B", "b", "_", "é", "z-9", "Z"]
    services = operated.services()
    async with services.database.begin() as transaction:
        await transaction.chats.ensure("many")
        for number in range(20):
            at = shared_time() + timedelta(days=1 + number)
            timer = await transaction.timers.add("many", fire_at=at, description="t")
            if number == 19:
                await transaction.timers.delete(timer.id)
        for job_id in ids:
            assert await transaction.cron_jobs.add(recurring(f"many-{job_id}"))
    await services.close()
    seen, cursor = [], None
    while True:
        query = {"chat_key": "many", "limit": 4} | ({"cursor": cursor} if cursor else {})
        page = (await api.get("timers", params=query)).json()
        seen += [timer["id"] for timer in page["items"]]
        assert len(page["items"]) == 4 or page["next_cursor"] is None
        cursor = page["next_cursor"]
        if cursor is None:
            break
    assert len(seen) == len(set(seen)) == 19 + len(ids)
    assert {f"many-{job_id}" for job_id in ids} < set(seen)
    for job_id in ids:
        assert (await api.delete(f"timers/many-{job_id}")).status_code == 200


def recurring(job_id: str) -> CronJob:
    return CronJob(
        job_id=job_id, chat_key="many", cron_expr="0 0 * * *", timezone="UTC", workday_mode=WorkdayMode.NONE,
        title=None, event_desc="d", next_fire_at=shared_time() + timedelta(days=1), last_fired_at=None,
        created_at=shared_time(), updated_at=shared_time(),
    )  # fmt: skip


async def test_dead_letters_are_listed_by_page_while_others_are_added(
    operated: Fleet, api: httpx.AsyncClient
) -> None:
    broker = operated.settings.broker
    keys = Keys(prefix=broker.key_prefix)
    with redis.Redis.from_url(str(broker.url)) as client:
        client.delete(keys.dead, keys.refused)
        for number in range(30):
            client.lpush(keys.dead, f"dead {number}")
        for number in range(15):
            client.lpush(
                keys.refused, json.dumps({"reason": f"refused {number}", "bytes": 1, "message": f"m{number}"})
            )
        seen: list[str] = []
        cursor: str | None = None
        while True:
            query = {"limit": "10"} | ({"cursor": cursor} if cursor else {})
            page = (await api.get("dead-letters", params=query)).json()
            seen += [letter["id"] for letter in page["items"]]
            cursor = page["next_cursor"]
            if cursor is None:
                break
            client.lpush(keys.dead, f"added {len(seen)}")
        assert len(seen) == len(set(seen)) == 45
        # One that is far from the newest is found by its id.
        assert (await api.get(f"dead-letters/{seen[44]}")).json()["reason"] == "refused 0"
        assert (await api.get(f"dead-letters/{seen[29]}")).status_code == 200
        # A page of the letters whose ids begin with a text looks at as many as its limit says.
        query = {"id": seen[44][:12], "limit": "200"}
        (found,) = (await api.get("dead-letters", params=query)).json()["items"]
        assert found["id"] == seen[44]
        page = (await api.get("dead-letters", params={**query, "limit": "10"})).json()
        assert page["items"] == [] and page["next_cursor"]
        assert (await api.delete(f"dead-letters/{seen[29]}")).status_code == 200
        refused = await api.get("dead-letters", params={"cursor": "x"})
        assert (refused.status_code, refused.json()["code"]) == (422, "cursor_invalid")
        client.delete(keys.dead, keys.refused)
    assert (await api.get("dead-letters")).json() == {"items": [], "next_cursor": None}


async def test_dead_letters_are_shown_and_dropped(operated: Fleet, api: httpx.AsyncClient) -> None:
    broker = operated.settings.broker
    with redis.Redis.from_url(str(broker.url)) as client:
        client.lpush(Keys(prefix=broker.key_prefix).dead, b"no message")
    (letter,) = (await api.get("dead-letters")).json()["items"]
    shown = (await api.get(f"dead-letters/{letter['id']}")).json()
    assert shown["signature"] == "not valid"
    refused = await api.post(f"dead-letters/{letter['id']}/retry", json={})
    assert (refused.status_code, refused.json()["code"]) == (409, "message_refused")
    assert (await api.delete(f"dead-letters/{letter['id']}")).status_code == 200
    assert (await api.get(f"dead-letters/{letter['id']}")).status_code == 404


async def test_the_document_of_the_api_is_served_to_keys(api: httpx.AsyncClient) -> None:
    api.base_url = api.base_url.join("/")
    served_one = (await api.get("openapi.json")).json()
    kept = json.loads((Path(__file__).parents[2] / "docs" / "openapi.json").read_text("utf-8"))
    assert served_one["paths"] == kept["paths"] and served_one["components"] == kept["components"]
    assert served_one["info"]["version"] == release()
    (server,) = served_one["servers"]
    assert (await api.get(f"{server['url']}/healthz")).status_code == 200
    assert (await api.get("openapi.json")).json() == served_one
    assert (await api.get("openapi.json", headers={"Authorization": ""})).status_code == 401
