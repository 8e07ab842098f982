"""Another writer on the broker sends control commands; a worker executes signed ones only, each once."""

from __future__ import annotations

import json
import pickle
import time
import zlib
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from waiting import WAIT_SECONDS, wait_until
from worker_process import WorkerProcess

from broker_config.app import NekroApp
from broker_config.settings import Settings
from broker_config.urls import redis_address
from nekro.broker.celery.remote_control import COMMANDS, FRESH_SECONDS
from nekro.wire.invocation import new_id

pytestmark = pytest.mark.extended

BOMB_BYTES = 256 << 20


@pytest.fixture
def start_worker(
    settings: Settings, app: NekroApp, tmp_path: Path
) -> Iterator[Callable[[str], WorkerProcess]]:
    """Start a worker by its name; returns when it receives commands, which is after it is ready."""
    started: list[WorkerProcess] = []

    def start(name: str) -> WorkerProcess:
        log = tmp_path / f"{name}.log"
        process = WorkerProcess(settings, log, pool="asyncio", lane="methods", concurrency=4, options=())
        started.append(process)
        process.wait_ready()
        wait_until(lambda: app.control.ping(timeout=1, limit=1), what=f"{name} to hear commands")
        return process

    yield start
    for process in started:
        process.kill()


@pytest.fixture
def worker(start_worker: Callable[[str], WorkerProcess]) -> WorkerProcess:
    return start_worker("worker")


@pytest.fixture
def stranger(settings: Settings) -> Iterator[Celery]:
    """Unmodified Celery on the same broker and prefix: the tools of a writer without the key."""
    app = Celery(broker=redis_address(str(settings.broker.url)).server_url, set_as_current=False)
    app.conf.broker_transport_options = {"global_keyprefix": settings.broker.key_prefix}
    yield app
    app.close()


def concurrency(app: NekroApp) -> int:
    """The worker's concurrency, as reported to holders of the key."""
    ((stats,),) = [
        list(found.values()) for found in [app.control.inspect(limit=1, timeout=WAIT_SECONDS).stats() or {}]
    ]
    return int(stats["pool"]["max-concurrency"])


def refused(worker: WorkerProcess) -> int:
    """Number of commands that it refused."""
    return worker.log.read_text().count("control_command_refused")


def peak_bytes(worker: WorkerProcess) -> int:
    """Its peak memory so far."""
    status = Path(f"/proc/{worker.process.pid}/status").read_bytes()
    (line,) = [line for line in status.split(b"\n") if line.startswith(b"VmHWM:")]
    return int(line.split()[1]) << 10


UNSIGNED: tuple[tuple[str, dict[str, Any]], ...] = (
    ("shutdown", {}),
    ("pool_grow", {"n": 1000}),
    ("pool_shrink", {"n": 3}),
    ("pool_restart", {"modules": ["os"], "reload": True}),
    ("autoscale", {"max": 1000, "min": 1000}),
    ("rate_limit", {"task_name": "f.run", "rate_limit": "1/h"}),
    ("time_limit", {"task_name": "f.run", "hard": 0.001, "soft": 0.001}),
    ("cancel_consumer", {"queue": "methods"}),
    ("add_consumer", {"queue": "elsewhere"}),
    ("enable_events", {}),
    ("disable_events", {}),
    ("revoke", {"task_id": "r" * 32, "terminate": True}),
    ("revoke_by_stamped_headers", {"headers": {"a": "b"}}),
    ("election", {"id": "1", "topic": "t"}),
    ("hello", {"from_node": "other", "revoked": {"r" * 32: 1}}),
)


def test_unsigned_commands_have_no_effect_and_no_answer(
    worker: WorkerProcess, app: NekroApp, stranger: Celery
) -> None:
    for command, arguments in UNSIGNED:
        stranger.control.broadcast(command, arguments=arguments)
    assert stranger.control.broadcast("ping", reply=True, timeout=1) == []
    wait_until(lambda: refused(worker) == len(UNSIGNED) + 1, what=lambda: worker.log.read_text()[-3000:])
    assert concurrency(app) == 4
    inspect = app.control.inspect(limit=1, timeout=WAIT_SECONDS)
    assert [[queue["name"] for queue in found] for found in inspect.active_queues().values()] == [["methods"]]
    assert list(inspect.revoked().values()) == [[]]
    assert app.send_task("f.run", [{"how": "ok", "value": 1}], queue="methods").get(WAIT_SECONDS) == 1
    assert app.send_task("f.run", [{"how": "ok", "value": 2}], queue="methods").get(WAIT_SECONDS) == 2
    assert worker.process.poll() is None


def test_unlisted_commands_do_not_exist_even_for_holders_of_the_key(
    worker: WorkerProcess, app: NekroApp
) -> None:
    others = [command for command, _ in UNSIGNED if command not in COMMANDS]
    assert {"shutdown", "pool_restart", "autoscale", "enable_events", "hello", "election"} <= set(others)
    for number, command in enumerate(others, start=1):
        app.control.broadcast(command)
        wait_until(lambda n=number: refused(worker) == n, what=f"{command} to be refused")
    assert app.control.ping(timeout=WAIT_SECONDS, limit=1)
    assert worker.process.poll() is None


def test_a_recorded_command_is_executed_once_and_not_altered(
    worker: WorkerProcess, app: NekroApp, client: Any, settings: Settings
) -> None:
    with client.pubsub(ignore_subscribe_messages=True) as listener:
        listener.psubscribe(f"{settings.broker.key_prefix}*pidbox*")
        listener.get_message(timeout=WAIT_SECONDS)
        assert app.control.pool_grow(1, reply=True, limit=1, timeout=WAIT_SECONDS)
        record = wait_until(lambda: listener.get_message(timeout=WAIT_SECONDS), what="the broadcast")
    channel, raw = record["channel"], record["data"]
    message = json.loads(raw)
    body = json.loads(b64decode(message["body"]))

    def send(**changes: Any) -> None:
        copy = {**message, "body": b64encode(json.dumps({**body, **changes}).encode()).decode()}
        client.publish(channel, json.dumps(copy))

    client.publish(channel, raw)
    send(arguments={"n": 100})
    send(method="pool_shrink")
    send(destination=["other@host"], matcher="glob", pattern="*")
    send(proof={**body["proof"], "nonce": new_id()})
    send(proof={**body["proof"], "sent_at": repr(time.time() + 1)})
    send(proof="x")
    send(reply_to={"exchange": "elsewhere", "routing_key": "x"})
    send(unknown=1)
    wait_until(lambda: refused(worker) >= 8, what=lambda: worker.log.read_text()[-3000:])
    assert concurrency(app) == 5
    assert not client.keys(f"{settings.broker.key_prefix}*elsewhere*")


def test_attack_R22_a_recorded_command_is_not_executed_by_a_worker_that_starts_later(
    worker: WorkerProcess,
    app: NekroApp,
    client: Any,
    settings: Settings,
    start_worker: Callable[[str], WorkerProcess],
) -> None:
    """The successor has no record of the commands that its predecessor received."""
    with client.pubsub(ignore_subscribe_messages=True) as listener:
        listener.psubscribe(f"{settings.broker.key_prefix}*pidbox*")
        listener.get_message(timeout=5)
        assert app.control.pool_grow(1, reply=True, limit=1, timeout=WAIT_SECONDS)
        record = wait_until(lambda: listener.get_message(timeout=5), what="the broadcast")
    worker.kill()
    successor = start_worker("successor")
    client.publish(record["channel"], record["data"])
    assert concurrency(app) == 4
    wait_until(lambda: refused(successor) == 1, what=lambda: successor.log.read_text()[-3000:])


def test_a_signed_command_expires(
    worker: WorkerProcess, app: NekroApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time()
    with monkeypatch.context() as patch:
        patch.setattr("nekro.broker.celery.remote_control.shared_now", lambda: now - FRESH_SECONDS - 5)
        app.control.pool_grow(1)
    wait_until(lambda: refused(worker) == 1, what="the old command to be refused")
    assert "too long ago" in worker.log.read_text()
    assert concurrency(app) == 4


class Harmful:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self._path,)


def test_broadcasts_in_other_formats_are_not_decoded(
    worker: WorkerProcess, app: NekroApp, client: Any, settings: Settings, tmp_path: Path
) -> None:
    assert app.control.ping(timeout=WAIT_SECONDS, limit=1)
    channel = f"{settings.broker.key_prefix}/0.celery.pidbox"
    mark = tmp_path / "unpickled"
    plain = json.dumps({"method": "ping", "arguments": {}}).encode()

    def send(body: bytes, content_type: str = "application/json", **headers: Any) -> None:
        message = {
            "body": b64encode(body).decode(),
            "content-encoding": "utf-8",
            "content-type": content_type,
            "headers": headers,
            "properties": {
                "delivery_info": {"exchange": "celery.pidbox", "routing_key": ""},
                "delivery_tag": new_id(),
                "body_encoding": "base64",
            },
        }
        assert client.publish(channel, json.dumps(message)) == 1

    send(
        pickle.dumps({"method": "ping", "arguments": {"x": Harmful(mark)}}), "application/x-python-serialize"
    )
    send(b"method: ping", "application/x-yaml")
    send(b"[]")
    send(b"1")
    send(plain, clock="soon")
    send(plain.replace(b"ping", b"shutdown"), clock=10**40)
    send(zlib.compress(b"0" * BOMB_BYTES), compression="zlib")
    client.publish(channel, "[" * 100_000 + "]" * 100_000)
    client.publish(channel, "[]")
    client.publish(channel, "{}")
    assert app.control.ping(timeout=WAIT_SECONDS, limit=1), worker.log.read_text()[-3000:]
    assert not mark.exists()
    assert peak_bytes(worker) < BOMB_BYTES
    assert app.send_task("f.run", [{"how": "ok", "value": 1}], queue="methods").get(WAIT_SECONDS) == 1
    assert worker.process.poll() is None
