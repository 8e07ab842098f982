"""Dead letters and their operator command, `nekro dead`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from chaos_world import call, client_of, key, opened, publish_methods, times, until_quiet
from waiting import eventually
from worker_fleet import Fleet

from broker_config.keys import Keys
from messaging.delivery.transport import DELIVERIES_HEADER
from nekro_agent.errors import OutcomeUnknownError

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
            await eventually(lambda: client.llen(queue) == 1, what="the message")
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
