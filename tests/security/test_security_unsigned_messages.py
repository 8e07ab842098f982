"""Another writer on the broker sends workers requests that only holders of the signing key may make."""

from __future__ import annotations

import json
import zlib
from base64 import b64encode
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from waiting import WAIT_SECONDS, wait_until
from worker_process import WorkerProcess

from broker_config.app import NekroApp
from broker_config.keys import REFUSED_LIMIT, Keys
from broker_config.settings import Settings
from nekro.broker.publishing import encode_message
from nekro.wire.invocation import new_id

PLUGIN = "a.pinned"
#: Pool and queue of each lane.
LANES = (("asyncio", "methods"), ("threads", "long"), ("asyncio", "rounds"), ("asyncio", f"pinned.{PLUGIN}"))
NOTE = {"task": "t.note", "args": [], "kwargs": {}, "options": {"queue": "methods"}, "subtask_type": None,
        "immutable": False}  # fmt: skip
#: Arguments with which Celery's own tasks would run ``t.note``, or at least themselves.
BUILT_IN: dict[str, list[Any]] = {
    "celery.accumulate": [1, 2],
    "celery.backend_cleanup": [],
    "celery.chain": [],
    "celery.chord": [[NOTE], NOTE],
    "celery.chord_unlock": ["group", NOTE],
    "celery.chunks": [NOTE, [["ran"]], 1],
    "celery.group": [[NOTE], [], "group"],
    "celery.map": [NOTE, ["ran"]],
    "celery.starmap": [NOTE, [["ran"]]],
}
OK = {"how": "ok", "value": 7}


@pytest.fixture
def settings(make_settings: Callable[..., Settings]) -> Settings:
    return make_settings(workers={"pinned_plugins": (PLUGIN,)})


@pytest.fixture
def worker(settings: Settings, tmp_path: Path) -> Iterator[Callable[..., WorkerProcess]]:
    started: list[WorkerProcess] = []

    def start(pool: str = "asyncio", queue: str = "methods") -> WorkerProcess:
        log = tmp_path / f"worker{len(started)}.log"
        started.append(WorkerProcess(settings, log, pool=pool, lane=queue, concurrency=4, options=()))
        return started[-1].wait_ready()

    yield start
    for process in started:
        process.kill()


class Queue:
    """One queue, with another writer beside the application."""

    def __init__(self, app: NekroApp, client: Any, settings: Settings, name: str = "methods") -> None:
        self._app, self._client, self.name = app, client, name
        self.prefix = settings.broker.key_prefix
        self.key = f"{self.prefix}{name}"

    def message(self, task: str, *args: Any, **options: Any) -> dict[str, Any]:
        """A message of the application itself, as it is queued."""
        task_id = options.pop("task_id", None) or new_id()
        queue = self._app.amqp.queues[self.name]
        made = self._app.amqp.create_task_message(task_id, task, args, {}, queue=queue, **options)
        found: dict[str, Any] = json.loads(encode_message(made, queue=self.name))
        return found

    def put(self, *messages: dict[str, Any]) -> None:
        """Put messages into the queue."""
        for message in messages:
            self._client.lpush(self.key, json.dumps(message))

    def result(self, message: dict[str, Any]) -> Any:
        """The stored result of a message; None: nothing."""
        raw = self._client.get(f"{self.prefix}celery-task-meta-{message['headers']['id']}")
        return None if raw is None else json.loads(raw)

    def finish(self) -> None:
        """Wait until an ordinary task that was sent after all others is done, and nothing is left."""
        result = self._app.send_task("f.run", [OK], queue=self.name)
        assert result.get(WAIT_SECONDS) == 7
        wait_until(self._is_empty, what=f"queue {self.name} to be empty")

    def ran(self) -> list[str]:
        """Ids of ``f.run`` that started, and everything that ``t.note`` recorded."""
        entries = [json.loads(raw) for raw in self._client.lrange(f"{self.prefix}ledger", 0, -1)]
        return [entry[0] if entry[1] == "started" else "noted" for entry in entries]

    def refused(self) -> list[dict[str, Any]]:
        """Refused messages, oldest first."""
        raws = self._client.lrange(Keys(prefix=self.prefix).refused, 0, -1)
        return [json.loads(raw) for raw in reversed(raws)]

    def _is_empty(self) -> bool:
        held = f"{self.prefix}unacked.{self.name}"
        return not self._client.llen(self.key) and not self._client.hlen(held)


@pytest.fixture
def queue(app: NekroApp, client: Any, settings: Settings) -> Callable[..., Queue]:
    return lambda name="methods": Queue(app, client, settings, name)


def changed(message: dict[str, Any], *path: str, value: Any) -> dict[str, Any]:
    """A copy with one other field."""
    copy: dict[str, Any] = json.loads(json.dumps(message))
    part = copy
    for name in path[:-1]:
        part = part[name]
    part[path[-1]] = value
    return copy


def followed(message: dict[str, Any], **embed: Any) -> dict[str, Any]:
    """A copy of a message that requests a follow-up of its task."""
    args, kwargs, _ = json.loads(message["body"])
    return changed(message, "body", value=json.dumps([args, kwargs, embed]))


def test_no_app_has_celerys_built_in_tasks(app: NekroApp) -> None:
    assert [name for name in app.tasks if name.startswith("celery.")] == []


@pytest.mark.extended
@pytest.mark.parametrize(("pool", "lane"), LANES, ids=[lane for _, lane in LANES])
def test_celerys_own_tasks_run_on_no_lane(
    pool: str, lane: str, worker: Callable[..., WorkerProcess], queue: Callable[..., Queue]
) -> None:
    running = worker(pool, lane)
    target = queue(lane)
    signed = target.message("t.note", "signed for t.note")
    forged = []
    for name, args in BUILT_IN.items():
        copy = changed(target.message("t.note"), "headers", "task", value=name)
        forged.append(changed(copy, "body", value=json.dumps([args, {}, {}])))
        forged.append(changed(signed, "headers", "task", value=name))
        forged.append({**forged[-1], "headers": {"task": name, "id": new_id(), "lang": "py"}})
    target.put(*forged)
    target.finish()
    assert len(target.ran()) == 1, "the ordinary task, and no note"
    assert {target.result(message) is None for message in forged} == {True}
    assert len(target.refused()) == len(forged)
    assert running.process.poll() is None


def test_unsigned_follow_ups_are_refused_with_the_signed_task_they_were_added_to(
    worker: Callable[..., WorkerProcess], queue: Callable[..., Queue]
) -> None:
    worker()
    target = queue()
    call = target.message("f.run", OK)
    target.put(
        followed(call, callbacks=[NOTE]),
        followed(call, callbacks=[{**NOTE, "task": "celery.starmap", "args": BUILT_IN["celery.starmap"]}]),
        followed(call, errbacks=[NOTE]),
        followed(call, chain=[NOTE]),
        followed(call, chord={**NOTE, "options": {"task_id": new_id()}}),
        followed(call, extra={"task": "t.note"}),
        changed(call, "body", value=json.dumps([[OK], {"body": OK}, {}])),
        changed(call, "body", value=json.dumps(["args", {}, {}])),
        changed(call, "body", value=json.dumps({"args": [OK], "task": "t.note", "id": "x"})),
    )
    target.finish()
    assert len(target.ran()) == 1
    assert len(target.refused()) == 9


@pytest.mark.extended
def test_unsigned_headers_have_no_effect(
    worker: Callable[..., WorkerProcess], queue: Callable[..., Queue]
) -> None:
    running = worker()
    target = queue()
    additions: list[dict[str, Any]] = [
        {"eta": "9999-12-31T23:59:59+00:00"},
        {"expires": "1999-01-01T00:00:00+00:00"},
        {"shadow": "celery.backend_cleanup"},
        {"stamped_headers": ["a"], "stamps": {"a": "b"}, "a": "b"},
        {"group": "g", "group_index": 0, "chord": NOTE},
        {"ignore_result": True},
        {"retries": 99, "replaced_task_nesting": 10**9},
        {"root_id": "other", "parent_id": "other", "origin": "other"},
        {"callbacks": [NOTE], "errbacks": [NOTE], "chain": [NOTE]},
        {"argsrepr": "shown", "kwargsrepr": {"a": 1}},
        {"padding": "A" * (8 << 20)},
    ]
    calls = [target.message("f.run", OK) for _ in additions]
    for call, added in zip(calls, additions, strict=True):
        call["headers"].update(added)
    target.put(*calls)
    target.finish()
    assert [target.result(call)["result"] for call in calls] == [7] * len(calls)
    assert len(target.ran()) == len(calls) + 1, "each once, and nothing that was added"
    assert target.refused() == []
    assert "shown" not in running.log.read_text()


def test_a_signed_message_cannot_be_altered_renamed_or_moved(
    worker: Callable[..., WorkerProcess], queue: Callable[..., Queue]
) -> None:
    worker()
    worker("threads", "long")
    target, other = queue(), queue("long")
    call, caller = target.message("f.run", OK, reply_to="a" * 32), "b" * 32
    elsewhere = changed(call, "properties", "delivery_info", "routing_key", value="methods")
    target.put(
        changed(call, "headers", "id", value=new_id()),
        changed(call, "headers", "task", value="t.note"),
        changed(call, "headers", "timelimit", value=[1e9, 1e9]),
        changed(call, "headers", "timelimit", value=[None]),
        changed(call, "properties", "reply_to", value=caller),
        changed(call, "properties", "reply_to", value=f"x:{caller}"),
        changed(call, "body", value=json.dumps([[{"how": "ok", "value": 8}], {}, {}])),
        changed(call, "headers", "x-nekro-signature", value=None),
        changed(call, "headers", "x-nekro-signature", value="é" * 64),
    )
    other.put(elsewhere)
    target.finish()
    other.finish()
    assert len(target.ran()) == 2
    assert len(target.refused()) == 10
    reply = target._client.llen(f"{target.prefix}reply:{caller}")
    assert reply <= 1 and not target._client.exists(f"{target.prefix}reply:x:{caller}")


@pytest.mark.extended
def test_bodies_in_other_encodings_are_refused(
    worker: Callable[..., WorkerProcess], queue: Callable[..., Queue]
) -> None:
    worker()
    target = queue()
    call = target.message("f.run", OK)
    bomb = b64encode(zlib.compress(b"[" + b"0," * (64 << 20) + b"0]")).decode()
    in_base64 = changed(call, "properties", "body_encoding", value="base64")
    target.put(
        changed(call, "content-type", value="application/x-python-serialize"),
        changed(call, "content-type", value="application/x-yaml"),
        changed(call, "content-encoding", value="utf-7"),
        changed(call, "content-encoding", value="utf-16"),
        changed(call, "content-encoding", value="no-such-charset"),
        changed(changed(in_base64, "headers", "compression", value="zlib"), "body", value=bomb),
        changed(changed(in_base64, "headers", "compression", value="bzip2"), "body", value=bomb),
    )
    target.finish()
    assert len(target.ran()) == 1
    assert len(target.refused()) == 7
    assert all(len(entry["message"]) <= 16_384 for entry in target.refused())


@pytest.mark.extended
def test_a_flood_of_refused_messages_is_bounded_and_displaces_no_call(
    worker: Callable[..., WorkerProcess], queue: Callable[..., Queue]
) -> None:
    target = queue()
    dead = Keys(prefix=target.prefix).dead
    target._client.lpush(dead, b"a call of the operator")
    forged = changed(target.message("t.note"), "headers", "task", value="celery.map")
    target.put(*[forged] * (REFUSED_LIMIT + 50))
    worker()
    target.finish()
    assert len(target.refused()) == REFUSED_LIMIT
    assert target._client.lrange(dead, 0, -1) == [b"a call of the operator"]
    assert target.result(forged) is None, "no caller waits, so nothing is stored"
