"""Dead letters and their operator command, `nekro dead`."""

from __future__ import annotations

import asyncio
import json
from base64 import b64decode
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest
from chaos_world import call, client_of, key, opened, publish_methods, times, until_quiet
from waiting import eventually
from worker_fleet import Fleet
from worker_process import queued

from broker_config.keys import Keys
from nekro.app.services import Services
from nekro.broker.delivery.transport import DELIVERIES_HEADER
from nekro.wire.invocation import Envelope
from nekro_agent.errors import MethodFailedError, OutcomeUnknownError
from storage.repositories.calls import CallRequest
from storage.repositories.jobs import NewJob
from storage.repositories.rounds import RoundRequest
from storage.states import CrashPolicy, TriggerKind

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


async def dead(fleet: Fleet, *arguments: str) -> Any:
    """Run `nekro dead`; returns its JSON, or its text without ``--json``."""
    done = await asyncio.to_thread(fleet.run, "dead", *arguments)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout) if "--json" in arguments else done.stderr


async def test_dead_calls_are_listed_shown_retried_and_dropped(make_chaos: Callable[..., Fleet]) -> None:
    fleet = make_chaos()
    publish_methods(fleet)
    async with opened(fleet) as services:
        waiting = asyncio.create_task(call(services, "work", "T1"))
        with client_of(fleet) as client:
            queue = key(fleet, "methods")
            await eventually(lambda: queued(client, queue) == 1, what="the message")
            message = json.loads(client.rpop(queue))
            message["headers"][DELIVERIES_HEADER] = 3  # as if three workers had died running it
            client.lpush(queue, json.dumps(message))
            client.lpush(queue, b"garbage")
        await asyncio.to_thread(fleet.start, "methods")
        with pytest.raises(OutcomeUnknownError, match="nekro dead"):
            await waiting
    await until_quiet(fleet, what="both to be set aside")
    listed = await dead(fleet, "list", "--json")
    by_task = {item["task"]: item for item in listed}
    assert set(by_task) == {"tests.chaos.work", None}
    assert by_task["tests.chaos.work"]["deliveries"] == 3
    assert "T1" not in json.dumps(listed), "arguments are not shown"
    ours, garbage = by_task["tests.chaos.work"]["id"], by_task[None]["id"]
    assert (await dead(fleet, "show", ours[:8], "--json"))["lane"] == "methods"
    await dead(fleet, "retry", ours)
    await eventually(lambda: times(fleet, "end")["T1"] == 1, what="the call to run after all")
    await dead(fleet, "drop", garbage)
    assert await dead(fleet, "list", "--json") == []
    refused = await asyncio.to_thread(fleet.run, "dead", "retry", "nothing")
    assert refused.returncode == 4 and "nekro dead" in refused.stderr
    with client_of(fleet) as client:
        assert not client.exists(Keys(prefix=fleet.settings.broker.key_prefix).dead)


async def test_the_row_decides_about_a_call_that_no_delivery_acknowledged(
    make_chaos: Callable[..., Fleet], each_database: str
) -> None:
    """Each worker recorded or found the outcome, and its acknowledgement was lost."""
    fleet = make_chaos(each_database)
    publish_methods(fleet)
    async with opened(fleet) as services:
        ended = {"done": asyncio.create_task(call(services, "effect", "E1"))}
        await eventually(lambda: len(services._caller._pending) == 1, what="the first call")
        ended["failed"] = asyncio.create_task(call(services, "effect", "E2"))
        with client_of(fleet) as client:
            queue = key(fleet, "methods")
            await eventually(lambda: queued(client, queue) == 2, what="the messages")
            messages = [json.loads(client.rpop(queue)) for _ in range(2)]
            for message, state in zip(messages, ended, strict=True):
                await end_in_row(services, message["headers"]["id"], state)
                message["headers"][DELIVERIES_HEADER] = 3
                client.lpush(queue, json.dumps(message))
            await asyncio.to_thread(fleet.start, "methods")
            assert await ended["done"] == "effect E1"
            with pytest.raises(MethodFailedError, match="of the method"):
                await ended["failed"]
            await until_quiet(fleet)
            assert client.llen(Keys(prefix=fleet.settings.broker.key_prefix).dead) == 0
            results = [
                json.loads(client.get(key(fleet, f"celery-task-meta-{m['headers']['id']}"))) for m in messages
            ]
            assert [result["status"] for result in results] == ["SUCCESS", "FAILURE"]
    assert times(fleet, "start") == {}


async def test_the_row_decides_about_a_job_and_a_chat_that_no_delivery_acknowledged(
    make_chaos: Callable[..., Fleet], each_database: str
) -> None:
    """What is left to do becomes a dead letter; what is done is acknowledged."""
    fleet = make_chaos(each_database, llm={"base_url": "http://127.0.0.1:1/v1", "model": "never asked"})
    async with opened(fleet) as services:
        async with services.database.begin() as transaction:
            for name in ("done", "open"):
                await transaction.jobs.add(
                    NewJob(
                        id=f"job-{name}",
                        type="t",
                        task_id=name,
                        plugin_key="tests.chaos",
                        chat_key="",
                        on_crash=CrashPolicy.RESTART,
                    )
                )
            await transaction.connection.exec_driver_sql(
                "UPDATE jobs SET state = 'succeeded' WHERE id = 'job-done'"
            )
            await transaction.chats.ensure("done")
            await transaction.chats.ensure("open")
            await transaction.rounds.request(
                RoundRequest(
                    chat_key="open", trigger_kind=TriggerKind.MANUAL, trigger_id="t", delay_seconds=1e6
                )
            )
        for name in ("done", "open"):
            await services.publisher.job_queued(f"job-{name}", "chat")
            await services.publisher.round_requested(name)
        with client_of(fleet) as client:
            for lane in ("long", "rounds"):
                queue = key(fleet, lane)
                await eventually(lambda queue=queue: queued(client, queue) == 2, what="the messages")
                for message in [json.loads(client.rpop(queue)) for _ in range(2)]:
                    message["headers"][DELIVERIES_HEADER] = 3
                    client.lpush(queue, json.dumps(message))
                await asyncio.to_thread(fleet.start, lane)
            letters = Keys(prefix=fleet.settings.broker.key_prefix).dead
            await eventually(lambda: client.llen(letters) == 2, what="what is left to do")
            await until_quiet(fleet, what="all four to be ended")
            bodies = [json.loads(raw)["body"] for raw in client.lrange(letters, 0, -1)]
    arguments = sorted(json.loads(b64decode(body))[0] for body in bodies)
    assert arguments == [["job-open"], ["open"]]


async def end_in_row(services: Services, call_id: str, state: str) -> None:
    """Let a call end in its row, as a worker that dies before it answers."""
    async with services.database.begin() as transaction:
        row = await transaction.calls.get(call_id)
        request = CallRequest(id=call_id, method=row.method, type=row.type, chat_key=row.chat_key)
        claim = await transaction.calls.claim(request, worker="gone", lease_seconds=60)
        if state == "failed":
            await transaction.calls.fail(
                call_id, fence=claim.fence, error_type="ValueError", error_message="of the method"
            )
            return
        now = datetime.now(UTC)
        envelope = Envelope.of(
            call_id=call_id, type=row.type, value=None, text="effect E1", worker="gone",
            started_at=now, finished_at=now,
        )  # fmt: skip
        await transaction.calls.finish(call_id, fence=claim.fence, outcome=envelope.model_dump(mode="json"))
