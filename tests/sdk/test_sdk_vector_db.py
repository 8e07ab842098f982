"""The Qdrant client of plugins: a server of the settings, or the embedded database."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from file_server import FileServer

from nekro_agent.api.core import get_qdrant_client, get_qdrant_config
from nekro_agent.errors import PackageInstallError, SettingsError
from nekro_agent.runtime import CoreConfig
from nekro_agent.testing import InMemoryRuntime

pytestmark = pytest.mark.extended

#: Adds one point to the database of a data root, in a process of its own.
ADD = """
import asyncio, sys
from pathlib import Path
from qdrant_client import models
from nekro_agent import runtime
from nekro_agent.core.vector_db import get_qdrant_client
async def add(number):
    client = await get_qdrant_client()
    await client.upsert("notes", [models.PointStruct(id=number, vector=[1.0, number / 10])])
runtime.prepare(data_dir=Path(sys.argv[1]))
asyncio.run(add(int(sys.argv[2])))
"""


# The client warns of a key without TLS.
@pytest.mark.filterwarnings("ignore::UserWarning")
async def test_the_client_connects_to_the_server_of_the_settings(
    file_server: FileServer, tmp_path: Path
) -> None:
    pytest.importorskip("qdrant_client", reason="qdrant-client is not installed")

    def collections(handler: BaseHTTPRequestHandler) -> None:
        body = json.dumps(
            {"result": {"collections": [{"name": "notes"}]}, "status": "ok", "time": 0}
        ).encode()
        handler.send_response(200)
        handler.send_header("Content-Type", "application/json")
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)

    file_server.answer_with("/collections", collections)
    core = CoreConfig(QDRANT_URL=file_server.base, QDRANT_API_KEY="q-key")
    async with InMemoryRuntime(data_dir=tmp_path, core=core):
        config = get_qdrant_config()
        assert (config.url, config.api_key) == (file_server.base, "q-key") and "q-key" not in repr(config)
        client = await get_qdrant_client()
        assert client is await get_qdrant_client()
        found = await client.get_collections()
        await client.close()
    assert [item.name for item in found.collections] == ["notes"]
    assert file_server.headers[-1]["api-key"] == "q-key"
    assert not (tmp_path / "qdrant").exists()


async def test_processes_use_the_embedded_database_in_turns(tmp_path: Path) -> None:
    models = pytest.importorskip("qdrant_client.models", reason="qdrant-client is not installed")
    async with InMemoryRuntime(data_dir=tmp_path):
        client = await get_qdrant_client()
        vectors = models.VectorParams(size=2, distance=models.Distance.COSINE)
        assert await client.create_collection("notes", vectors_config=vectors)
        others = [
            subprocess.Popen([sys.executable, "-c", ADD, str(tmp_path), str(number)]) for number in (1, 2)
        ]
        await client.upsert("notes", [models.PointStruct(id=3, vector=[1.0, 0.0], payload={"text": "mine"})])
        assert [await asyncio.to_thread(other.wait, 50) for other in others] == [0, 0]
        assert (await client.count("notes")).count == 3
        (nearest,) = (await client.query_points("notes", query=[1.0, 0.0], limit=1)).points
        assert (nearest.id, nearest.payload) == (3, {"text": "mine"})
        with pytest.raises(AttributeError, match="no method 'fly'"):
            _ = client.fly
        with pytest.raises(ValueError, match="missing"):
            await client.count("missing")
        await client.close()


async def test_names_that_qdrant_client_had_work_in_both_kinds(
    file_server: FileServer, tmp_path: Path
) -> None:
    models = pytest.importorskip("qdrant_client.models", reason="qdrant-client is not installed")
    async with InMemoryRuntime(data_dir=tmp_path):
        client = await get_qdrant_client()
        plain = models.VectorParams(size=2, distance=models.Distance.COSINE)
        await client.create_collection("plain", vectors_config=plain)
        await client.create_collection("named", vectors_config={"text": plain})
        for name, vectors in (("plain", [[1.0, 0.0], [0.0, 1.0]]), ("named", [{"text": [1.0, 0.0]}])):
            points = [models.PointStruct(id=n, vector=v, payload={"n": n}) for n, v in enumerate(vectors)]
            await client.upsert(name, points)
        found = await client.search(
            collection_name="plain", query_vector=[0.1, 0.9], limit=5, with_payload=True, score_threshold=0.5
        )
        assert [(point.id, point.payload) for point in found] == [(1, {"n": 1})]
        assert [point.id for point in await client.search("plain", (0.9, 0.1), limit=1)] == [0]
        assert [point.id for point in await client.search("named", ("text", [1.0, 0.0]))] == [0]
        assert (await client.get_collection("plain")).vectors_count == 2
        await client.close()

    def nearest(handler: BaseHTTPRequestHandler) -> None:
        points = [{"id": 7, "version": 0, "score": 0.5}]
        body = json.dumps({"result": {"points": points}, "status": "ok", "time": 0}).encode()
        handler.send_response(200)
        handler.send_header("Content-Type", "application/json")
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)

    file_server.answer_with("/collections/plain/points/query", nearest)
    async with InMemoryRuntime(data_dir=tmp_path, core=CoreConfig(QDRANT_URL=file_server.base)):
        client = await get_qdrant_client()
        assert [point.id for point in await client.search("plain", query_vector=[1.0, 0.0])] == [7]
        await client.close()


async def test_a_missing_package_is_named_with_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "qdrant_client", None)
    async with InMemoryRuntime(data_dir=tmp_path):
        with pytest.raises(PackageInstallError, match=r"pip install 'nekro-workers\[qdrant\]'"):
            await get_qdrant_client()


async def test_without_a_server_the_address_is_an_error_that_names_the_setting(tmp_path: Path) -> None:
    async with InMemoryRuntime(data_dir=tmp_path):
        with pytest.raises(SettingsError, match="set NEKRO_QDRANT__URL"):
            get_qdrant_config()


MUST = {"must": [{"key": "chat", "match": {"value": "a"}}]}


@pytest.fixture
async def filled(tmp_path: Path) -> AsyncIterator[Any]:
    """An embedded database whose points 1 and 2 are those of chat ``a``; all that it got are dictionaries."""
    pytest.importorskip("qdrant_client", reason="qdrant-client is not installed")
    async with InMemoryRuntime(data_dir=tmp_path):
        client = await get_qdrant_client()
        await client.create_collection("c", vectors_config={"size": 2, "distance": "Cosine"})
        points = [
            {"id": number, "vector": [1.0, number / 10], "payload": {"chat": chat, "n": number}}
            for number, chat in ((1, "a"), (2, "a"), (3, "b"))
        ]
        await client.upsert("c", points=points)
        yield client
        await client.close()


Use = Callable[[Any], Awaitable[object]]


async def _left(client: Any, change: Awaitable[object]) -> set[int]:
    await change
    return {point.id for point in (await client.scroll("c"))[0]}


async def _changed(client: Any, change: Awaitable[object]) -> set[int]:
    await change
    return {p.id for p in (await client.scroll("c"))[0] if p.payload.get("n") != p.id}


@pytest.mark.parametrize(
    ("use", "expected"),
    [
        pytest.param(lambda c: c.count("c", count_filter=MUST), 2, id="count"),
        pytest.param(lambda c: c.scroll("c", MUST, limit=5), {1, 2}, id="scroll"),
        pytest.param(
            lambda c: c.scroll("c", scroll_filter={"should": [{"key": "n", "range": {"gte": 2}}]}),
            {2, 3},
            id="scroll by range",
        ),
        pytest.param(
            lambda c: c.query_points(
                "c", query=[1.0, 0.0], query_filter=MUST, with_payload={"include": ["n"]}
            ),
            {1, 2},
            id="query",
        ),
        pytest.param(
            lambda c: c.query_points(
                "c", prefetch=[{"query": [1.0, 0.0], "filter": MUST}], query={"nearest": [1.0, 0.0]}
            ),
            {1, 2},
            id="query with prefetch",
        ),
        pytest.param(
            lambda c: c.query_batch_points("c", requests=[{"query": [1.0, 0.0], "filter": MUST}]),
            {1, 2},
            id="batch of queries",
        ),
        pytest.param(lambda c: c.search("c", [1.0, 0.0], query_filter=MUST, limit=9), {1, 2}, id="search"),
        pytest.param(lambda c: _left(c, c.delete("c", points_selector=MUST)), {3}, id="delete by filter"),
        pytest.param(
            lambda c: _left(c, c.delete("c", points_selector={"filter": MUST})), {3}, id="delete by selector"
        ),
        pytest.param(
            lambda c: _left(c, c.delete("c", points_selector={"points": [3]})), {1, 2}, id="delete by ids"
        ),
        pytest.param(
            lambda c: _changed(c, c.set_payload("c", payload={"n": {"must": []}}, points=MUST)),
            {1, 2},
            id="set payload",
        ),
        pytest.param(
            lambda c: _changed(c, c.delete_payload("c", keys=["n"], points=MUST)), {1, 2}, id="delete payload"
        ),
        pytest.param(
            lambda c: _left(c, c.batch_update_points("c", update_operations=[{"delete": {"filter": MUST}}])),
            {3},
            id="batch of updates",
        ),
    ],
)
async def test_the_embedded_database_takes_dictionaries_like_a_server(
    filled: Any, use: Use, expected: object
) -> None:
    assert _summary(await use(filled)) == expected


def _summary(answer: Any) -> object:
    """Return the ids of the points in an answer, or a number that it has."""
    if isinstance(answer, tuple):  # of scroll
        answer = answer[0]
    if isinstance(answer, list) and hasattr(answer[0], "points"):  # of a batch
        (answer,) = answer
    answer = getattr(answer, "points", answer)
    return {point.id for point in answer} if isinstance(answer, list) else getattr(answer, "count", answer)


async def test_a_dictionary_that_is_no_filter_is_refused_with_its_key(filled: Any) -> None:
    with pytest.raises(ValueError, match="mustt"):
        await filled.scroll("c", scroll_filter={"mustt": []})


#: As in a worker, the end of the process takes longer than an unused database stays open.
END_SLOWLY = """
import atexit, threading
def wait_for_timers():
    for thread in threading.enumerate():
        if isinstance(thread, threading.Timer):
            thread.join()
atexit.register(wait_for_timers)
"""


async def test_a_process_that_ends_with_an_open_database_writes_nothing_to_stderr(tmp_path: Path) -> None:
    pytest.importorskip("qdrant_client", reason="qdrant-client is not installed")
    async with InMemoryRuntime(data_dir=tmp_path):
        client = await get_qdrant_client()
        await client.create_collection("notes", vectors_config={"size": 2, "distance": "Cosine"})
        await client.close()
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-c", END_SLOWLY + ADD, str(tmp_path), "1"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


async def test_hosts_without_a_shared_disk_need_a_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with InMemoryRuntime(data_dir=tmp_path) as world:
        monkeypatch.setattr(type(world.runtime.areas), "is_synced", True)
        with pytest.raises(SettingsError, match="set NEKRO_QDRANT__URL"):
            await get_qdrant_client()
