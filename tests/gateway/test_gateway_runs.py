"""Runs of code over HTTP: on a rounds worker, as JSON and as a stream, repeated, stopped and refused."""

from __future__ import annotations

import asyncio
import json
import socket
import tracemalloc
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing, contextmanager
from typing import Any

import httpx
import pytest
from event_reader import Frame, frames
from gateway_server import served
from waiting import WAIT_SECONDS, eventually
from worker_fleet import Fleet

from nekro.gateway.app import create_app
from nekro.gateway.web import responses
from nekro_agent.errors import RuntimeNotBoundError
from storage.engine import Database
from storage.repositories.calls import Call
from storage.states import CallState

CHAT = {"chat_key": "group_1"}
STREAMED = {"Accept": "text/event-stream"}
#: Prints, and goes on when the chat has a file.
WAITS = """
import os, time
print("begun", flush=True)
while not os.path.exists("/app/uploads/{name}"):
    time.sleep(0.01)
print("done")
"""
#: Ends after an hour.
ENDLESS = """
import time
print("begun", flush=True)
time.sleep(3600)
"""


@pytest.fixture(scope="module")
def database_url(sqlite_url: str) -> str:
    """One kind of database: runs are calls, whose rows are tested on both."""
    return sqlite_url


@pytest.fixture(scope="module")
def coders(make_fleet: Callable[..., Fleet], tmp_path_factory: pytest.TempPathFactory) -> Fleet:
    """Workers of which one runs code, one at a time and for an hour: a run that is not stopped shows."""
    script = tmp_path_factory.mktemp("model") / "script.yaml"
    script.write_text("- when: '.*'\n  answer: ''\n")
    fleet = make_fleet(llm={"script": script}, sandbox={"wall_seconds": 3600})
    fleet.start("methods")
    fleet.start("rounds", concurrency=1)
    return fleet


@pytest.fixture
async def api(coders: Fleet) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a gateway on the fleet."""
    async with served(create_app(coders.settings)) as client:
        client.base_url = client.base_url.join("/api/v1/")
        client.timeout = httpx.Timeout(120)
        yield client


async def run(api: httpx.AsyncClient, code: str, *, key: str | None = None, **more: Any) -> httpx.Response:
    headers = {} if key is None else {"Idempotency-Key": key}
    return await api.post("runs", json={"code": code, **CHAT, **more}, headers=headers)


async def read_stream(response: httpx.Response) -> list[Frame]:
    return [frame async for frame in frames(response)]


async def row_of(fleet: Fleet, *states: CallState) -> Call | None:
    """The newest run if it is in one of the states."""
    database = Database(fleet.settings.database, fleet.settings.data_dir)
    try:
        async with database.read() as transaction:
            rows = await transaction.connection.exec_driver_sql(
                "SELECT id FROM calls WHERE method = 'nekro.run' ORDER BY requested_at DESC LIMIT 1"
            )
            row = rows.first()
            call = None if row is None else await transaction.calls.find(row[0])
    finally:
        await database.dispose()
    return call if call is not None and call.state in states else None


async def put(api: httpx.AsyncClient, name: str) -> None:
    answer = await api.put(f"chats/group_1/files/{name}", content=b"x")
    assert answer.status_code in (200, 201), answer.text


async def test_code_runs_on_a_rounds_worker_and_calls_methods(api: httpx.AsyncClient, coders: Fleet) -> None:
    done = (await run(api, "print(echo(6) * 7)")).json()
    assert (done["stop_type"], done["output"].strip(), done["error"]) == ("NORMAL", "42", None)
    assert [(one["method"], one["state"]) for one in done["calls"]] == [("Ada.operated.echo", "done")]
    row = await row_of(coders, CallState.DONE)
    assert row is not None and row.id == done["id"]
    assert coders.worker_of(row.worker).lane == "rounds"
    failed = (await run(api, "fail()")).json()
    assert failed["stop_type"] == "ERROR" and failed["calls"][0]["state"] == "failed"


async def test_a_gateway_has_no_sandbox(coders: Fleet) -> None:
    app = create_app(coders.settings)
    async with served(app) as client:
        assert (await client.get("/healthz")).status_code == 200
        with pytest.raises(RuntimeNotBoundError, match="a gateway runs no code"):
            await app.state.services.sandboxes()


async def test_output_is_streamed_while_the_code_runs(api: httpx.AsyncClient) -> None:
    name = f"{uuid.uuid4().hex}.txt"
    await put(api, "first.txt")  # makes the directory, which the sandbox shares
    body = {"code": WAITS.format(name=name), **CHAT}
    async with api.stream("POST", "runs", json=body, headers=STREAMED) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        found: list[Frame] = []
        async with aclosing(frames(response)) as stream:  # type: ignore[type-var]
            async for frame in stream:
                if not found:
                    await put(api, name)
                found.append(frame)
    *chunks, last = found
    first = chunks[0].data
    # The code ends only after its first chunk was read; where the text is cut is not promised.
    assert first["data"]["offset"] == 0 and first["data"]["text"] in ("begun", "begun\n")
    assert last.event == "run.ended"
    assert (last.data["output"], last.data["stop_type"]) == ("begun\ndone\n", "NORMAL")
    # Chunks are live only: the end has the whole output, and may come before the last of them.
    assert "begun\ndone\n".startswith("".join(chunk.data["data"]["text"] for chunk in chunks))
    assert first["call_id"] == last.data["id"]
    assert {chunk.event for chunk in chunks} == {"output.chunk"}


@pytest.mark.parametrize("headers", [{}, STREAMED], ids=["json", "stream"])
async def test_a_client_that_leaves_stops_its_run(
    api: httpx.AsyncClient, coders: Fleet, headers: dict[str, str]
) -> None:
    body = {"code": ENDLESS, **CHAT}

    async def post() -> None:
        async with api.stream("POST", "runs", json=body, headers=headers) as response:
            await read_stream(response)

    request = asyncio.create_task(post())
    running = await eventually(lambda: row_of(coders, CallState.RUNNING), what="the run")
    request.cancel()
    await asyncio.gather(request, return_exceptions=True)
    stopped = await eventually(lambda: row_of(coders, CallState.CANCELLED), what="the end of the run")
    assert stopped.id == running.id
    # The worker runs one program at a time.
    assert (await run(api, "print(1)")).json()["output"] == "1\n"


@pytest.mark.extended
async def test_a_client_that_takes_nothing_slows_no_run_and_fills_no_memory(
    coders: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(responses, "SEND_SECONDS", WAIT_SECONDS)  # else the run would end with its client
    name = f"{uuid.uuid4().hex}.txt"
    app = create_app(coders.settings)
    async with served(app) as client:
        client.base_url = client.base_url.join("/api/v1/")
        await put(client, "first.txt")
        body = json.dumps({"code": WAITS.format(name=name), **CHAT}).encode()
        with silent_post(client.base_url, "runs", body, client.headers["Authorization"]) as silent:
            running = await eventually(lambda: row_of(coders, CallState.RUNNING), what="the run")
            chunk = {"type": "output.chunk", **CHAT, "call_id": running.id}

            async def print_much(chunks: int) -> int:
                """As code that prints for long; returns the bytes that this process allocated meanwhile."""
                tracemalloc.start()
                try:
                    for number in range(chunks):
                        data = {"text": f"{number:08d}" * 1_000}
                        app.state.hub._live("group_1", {**chunk, "data": data})
                        await asyncio.sleep(0)  # the stream sends what its client takes
                    return tracemalloc.get_traced_memory()[0]
                finally:
                    tracemalloc.stop()

            await print_much(2_000)  # more than the buffers of both ends take
            assert await print_much(5_000) < 2 << 20  # of 40 MB
            await put(client, name)
            ended = await eventually(lambda: row_of(coders, CallState.DONE), what="the end of the run")
            assert ended.id == running.id
            # What was printed last is there when the client goes on, and the report is complete.
            text = await asyncio.to_thread(read_all, silent)
        report = json.loads(text.rpartition("data: ")[2].partition("\r\n")[0])
        assert (report["output"], report["stop_type"]) == ("begun\ndone\n", "NORMAL")


@contextmanager
def silent_post(url: httpx.URL, path: str, body: bytes, key: str) -> Iterator[socket.socket]:
    """A client that has posted and reads nothing yet; its buffer is small."""
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect((url.host, url.port))
        head = (
            f"POST {url.path}{path} HTTP/1.1\r\nHost: {url.host}\r\nAccept: text/event-stream\r\n"
            f"Authorization: {key}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        client.sendall(head.encode() + body)
        yield client


def read_all(client: socket.socket) -> str:
    """Read to the end of the connection."""
    client.settimeout(WAIT_SECONDS)
    return b"".join(iter(lambda: client.recv(1 << 20), b"")).decode()


async def test_a_streamed_run_is_one_of_the_streams_of_its_address(coders: Fleet) -> None:
    limited = coders.settings.gateway.model_copy(update={"streams_per_address": 1})
    body = {"code": ENDLESS, **CHAT}
    async with served(create_app(coders.settings.model_copy(update={"gateway": limited}))) as client:
        async with client.stream("POST", "/api/v1/runs", json=body, headers=STREAMED, timeout=120) as one:
            assert one.status_code == 200
            for method, path in (("POST", "/api/v1/runs"), ("GET", "/api/v1/chats/group_1/events")):
                refused = await client.request(method, path, json=body, headers=STREAMED)
                assert (refused.status_code, refused.json()["code"]) == (429, "too_many_streams")
        # A refused run is not started, and one that is stopped has freed the worker.
        await eventually(lambda: row_of(coders, CallState.CANCELLED), what="the end of the run")
        done = await client.post("/api/v1/runs", json={**body, "code": "print(1)"}, timeout=120)
        assert done.json()["output"] == "1\n"


async def test_a_run_ends_at_its_deadline_with_its_output(api: httpx.AsyncClient) -> None:
    for seconds in (4, 16, 64):  # a busy machine may need longer to begin it
        done = (await run(api, ENDLESS, timeout_seconds=seconds)).json()
        if done.get("output"):
            break
    assert (done["stop_type"], done["output"]) == ("TIMEOUT", "begun\n")


async def test_a_run_that_waits_for_a_worker_ends_at_its_deadline(
    api: httpx.AsyncClient, coders: Fleet
) -> None:
    name = f"{uuid.uuid4().hex}.txt"
    await put(api, "first.txt")
    first = asyncio.create_task(run(api, WAITS.format(name=name)))
    await eventually(lambda: row_of(coders, CallState.RUNNING), what="the first run")
    late = await run(api, "print(1)", timeout_seconds=1)
    assert (late.status_code, late.json()["code"]) == (504, "call_timeout")
    async with api.stream(
        "POST", "runs", json={"code": "1", "timeout_seconds": 1, **CHAT}, headers=STREAMED
    ) as response:
        (last,) = await read_stream(response)
    assert (last.event, last.data["status"], last.data["code"]) == ("problem", 504, "call_timeout")
    assert last.data["request_id"] == response.headers["x-request-id"]
    await put(api, name)
    assert (await first).json()["stop_type"] == "NORMAL"


async def test_a_repeated_run_happens_once_also_after_a_crash(coders: Fleet, api: httpx.AsyncClient) -> None:
    code = "print(count())"
    first = await run(api, code, key="r")
    again = await run(api, code, key="r")
    assert again.headers["idempotency-replayed"] == "true" and again.json() == first.json()
    database = Database(coders.settings.database, coders.settings.data_dir)
    async with database.begin() as transaction:
        await transaction.connection.exec_driver_sql(
            "UPDATE idempotent_requests SET status = NULL, answer = NULL,"
            " lease_until = '2020-01-01 00:00:00.000000'"
        )
    await database.dispose()
    assert (await run(api, code, key="r")).json() == first.json()
    body = {"code": code, **CHAT}
    headers = {**STREAMED, "Idempotency-Key": "r"}
    async with api.stream("POST", "runs", json=body, headers=headers) as response:
        (frame,) = await read_stream(response)
    assert response.headers["idempotency-replayed"] == "true"
    assert (frame.event, frame.data) == ("run.ended", first.json())
    other = await api.post("runs", json={**body, "code": "1"}, headers=headers)
    assert (other.status_code, other.json()["code"]) == (422, "idempotency_key_reused")


async def test_a_run_that_was_stopped_is_not_repeated(api: httpx.AsyncClient, coders: Fleet) -> None:
    request = asyncio.create_task(run(api, ENDLESS, key="stopped"))
    await eventually(lambda: row_of(coders, CallState.RUNNING), what="the run")
    request.cancel()
    await asyncio.gather(request, return_exceptions=True)
    await eventually(lambda: row_of(coders, CallState.CANCELLED), what="the end of the run")

    async def is_refused() -> bool:
        return (await run(api, ENDLESS, key="stopped")).json()["code"] == "call_cancelled"

    await eventually(is_refused, what="the answer of a cancelled run")


@pytest.mark.parametrize("headers", [{}, STREAMED], ids=["json", "stream"])
async def test_without_a_rounds_worker_the_answer_says_what_is_missing(
    gateway: tuple[Fleet, httpx.AsyncClient], headers: dict[str, str]
) -> None:
    _, client = gateway
    answer = await client.post("/api/v1/runs", json={"code": "1", **CHAT}, headers=headers)
    assert (answer.status_code, answer.json()["code"]) == (503, "no_worker")
    assert "nekro up --rounds 1" in answer.json()["detail"]
    assert answer.headers["content-type"] == "application/problem+json"


@pytest.mark.parametrize("fresh_fleet", ["sqlite"], indirect=True)
@pytest.mark.parametrize("chat_key", ["", " ", "\ud800"])
async def test_a_chat_without_a_name_is_refused(
    gateway: tuple[Fleet, httpx.AsyncClient], chat_key: str
) -> None:
    _, client = gateway
    for path, body in (("runs", {"code": "1"}), ("calls", {"method": "echo"}), ("stream-tickets", {})):
        answer = await client.post(
            f"/api/v1/{path}",
            content=json.dumps({**body, "chat_key": chat_key}),
            headers={"Content-Type": "application/json"},
        )
        assert (answer.status_code, answer.json()["code"]) == (422, "invalid_request"), answer.text
        assert "chat_key" in answer.json()["detail"]
