"""Another writer on the broker sends messages that are built to end a worker or to block its queue."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from waiting import WAIT_SECONDS, wait_until
from worker_process import WorkerProcess

from broker_config.app import create_app
from broker_config.settings import Settings
from broker_config.urls import redis_address

pytestmark = pytest.mark.extended

NESTED = "[" * 100_000 + "]" * 100_000


@pytest.fixture
def settings(make_settings: Callable[..., Settings]) -> Settings:
    return make_settings()


@pytest.fixture
def worker(settings: Settings, tmp_path: Path) -> Iterator[Callable[[], WorkerProcess]]:
    started: list[WorkerProcess] = []

    def start() -> WorkerProcess:
        process = WorkerProcess(
            settings, tmp_path / "worker.log", pool="asyncio", lane="methods", concurrency=4, options=()
        )
        started.append(process)
        return process.wait_ready()

    yield start
    for process in started:
        process.kill()


def message(body: str = '[[0], {}, {"callbacks": null, "errbacks": null, "chain": null, "chord": null}]',
            **headers: Any) -> str:  # fmt: skip
    """A queued task message."""
    known = {"lang": "py", "task": "t.wait", "id": "x", "root_id": "x", "parent_id": None, "group": None}
    return json.dumps(
        {
            "body": base64.b64encode(body.encode("utf-8", "surrogatepass")).decode(),
            "content-encoding": "utf-8",
            "content-type": "application/json",
            "headers": known | headers,
            "properties": {
                "correlation_id": "x",
                "reply_to": "y",
                "delivery_mode": 2,
                "delivery_info": {"exchange": "", "routing_key": "methods"},
                "priority": 0,
                "body_encoding": "base64",
                "delivery_tag": "z",
            },
        }
    )


HOSTILE = (
    NESTED,
    message().replace('"headers": {', '"headers": {"deep": ' + NESTED + ", "),
    message(NESTED),
    message("[[" + NESTED + "], {}, {}]"),
    message('[["\\ud800"], {}, {}]'),
    message('[[{"__type__": "decimal", "__value__": "1E+999999999"}], {}, {}]'),
    message('[[{"__type__": "nobody", "__value__": 1}], {}, {}]'),
    message("[[" + "9" * 5000 + "], {}, {}]"),
    message('[0, 0, 0]'),
    message('{"args": 1}'),
    message(id=None),
    message(id=["a"]),
    message(id="i" * 1_000_000),
    message(task=["t.wait"]),
    message(task={"a": 1}),
    message(eta="tomorrow"),
    message(eta=["x"]),
    message(eta="9999-12-31T23:59:59+00:00"),
    message(expires="never"),
    message(expires={"a": 1}),
    message(timelimit=["a", "b"]),
    message(timelimit=7),
    message(retries="many"),
    message(root_id={"a": []}),
    message(kwargsrepr=7, argsrepr={"a": 1}),
    message(origin=["x"]),
    message(stamps=7, stamped_headers="x"),
    message(replaced_task_nesting="x"),
    message(compression="zlib"),
    message(compression="nothing"),
    message(shadow={"a": 1}),
    message(ignore_result="x", group=["a"], group_index="b"),
)  # fmt: skip


def test_no_message_ends_a_worker_or_blocks_the_next_one(
    settings: Settings, worker: Callable[[], WorkerProcess]
) -> None:
    app = create_app(settings)
    prefix = settings.broker.key_prefix
    with redis.Redis.from_url(redis_address(str(settings.broker.url)).server_url) as client:
        for number, raw in enumerate(HOSTILE):
            client.lpush(f"{prefix}methods", raw)
            client.hset(f"{prefix}unacked.methods", f"tag{number}", f'[{raw}, "", "methods"]')
            client.zadd(f"{prefix}unacked.methods_index", {f"tag{number}": 1})
        running = worker()
        for _ in range(3):
            result = app.send_task("t.wait", args=(0,), queue="methods")
            assert result.get(WAIT_SECONDS) == "done", running.log.read_text()[-3000:]
        wait_until(
            lambda: not client.llen(f"{prefix}methods"),
            what=lambda: "the queue to be empty:\n" + running.log.read_text()[-3000:],
        )
    app.backend.result_consumer.stop()
    app.close()
    assert running.process.poll() is None
    text = running.log.read_text()
    assert "Unrecoverable" not in text
