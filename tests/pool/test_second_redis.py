"""Results on a second Redis: `NEKRO_RESULTS__URL` moves the answers of calls there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import redis
from redis_process import RedisServer
from worker_process import WorkerProcess

from broker_config.app import create_app
from broker_config.settings import Settings
from nekro.broker.calls import MethodCaller
from nekro.wire.invocation import Invocation, new_id
from nekro_agent.methods import Lane

CALLS = 60


@pytest.fixture
def settings(make_settings: Callable[..., Settings], own_redis: RedisServer) -> Settings:
    """Settings with the results on the test's own Redis."""
    return make_settings(results={"url": own_redis.url})


def ran(client: Any) -> dict[str, int]:
    """How often the server has run each command, also in scripts."""
    stats = client.info("commandstats")
    return {name.removeprefix("cmdstat_"): entry["calls"] for name, entry in stats.items()}


async def test_answers_go_through_the_second_redis_alone(
    settings: Settings, own_redis: RedisServer, start_worker: Callable[..., WorkerProcess]
) -> None:
    start_worker("asyncio")
    assert settings.broker.url is not None
    prefix = settings.broker.key_prefix
    with redis.Redis(port=own_redis.port) as results, redis.Redis.from_url(settings.broker.url) as broker:
        async with MethodCaller(create_app(settings), settings) as caller:
            before = ran(results)

            async def call() -> str | None:
                now = datetime.now(UTC)
                invocation = Invocation(
                    call_id=new_id(), method="m.noop", chat_key="c", container_key="k",
                    issued_at=now, deadline=now + timedelta(seconds=30), args="",
                )  # fmt: skip
                return (await caller.call(invocation, lane=Lane.METHODS)).text

            assert set(await asyncio.gather(*(call() for _ in range(CALLS)))) == {"x"}
        after = ran(results)
        assert len(results.keys(f"{prefix}celery-task-meta-*")) == CALLS
        assert not broker.keys(f"{prefix}celery-task-meta-*")
        assert after.get("publish", 0) - before.get("publish", 0) >= CALLS, "it announced the answers"
        assert not results.exists(f"{prefix}methods", f"{prefix}epochs")
        assert broker.exists(f"{prefix}epochs"), "the calls were published there"
