"""A Redis user with exactly the permissions of docs/operations.md."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import redis
from redis_process import RedisServer
from waiting import WAIT_SECONDS
from worker_process import WorkerProcess

from broker_config.app import create_app
from broker_config.settings import Settings
from nekro.broker.broker_figures import read_dead, read_queues
from nekro.broker.calls import MethodCaller
from nekro.wire.invocation import Invocation, new_id
from nekro_agent.methods import Lane

OPERATIONS = Path(__file__).parents[2] / "docs" / "operations.md"


async def test_the_documented_permissions_suffice(
    own_redis: RedisServer, make_settings: Callable[..., Settings], start_worker: Callable[..., WorkerProcess]
) -> None:
    found = re.search(
        r"ACL SETUSER nekro on >PASSWORD ~nekro:\* &\* (?P<rules>[^`\n]+)", OPERATIONS.read_text("utf-8")
    )
    assert found is not None
    password, prefix = uuid.uuid4().hex, f"t{uuid.uuid4().hex}:"
    with redis.Redis(port=own_redis.port) as operator:
        rules = found["rules"].split()
        operator.execute_command("ACL", "SETUSER", "nekro", "on", f">{password}", f"~{prefix}*", "&*", *rules)
    url = f"redis://nekro:{password}@127.0.0.1:{own_redis.port}/0"
    settings = make_settings(broker={"url": url, "key_prefix": prefix})
    worker = start_worker("asyncio", settings=settings)
    app = create_app(settings)
    now = datetime.now(UTC)
    call = Invocation(
        call_id=new_id(), method="m.wait", chat_key="c", container_key="k",
        issued_at=now, deadline=now + timedelta(seconds=WAIT_SECONDS), args="0",
    )  # fmt: skip
    async with MethodCaller(app, settings) as caller:
        assert (await caller.call(call, lane=Lane.METHODS)).call_id == call.call_id
        await caller.revoke(call.call_id)
    assert {figures.lane for figures in read_queues(app)} >= {"methods"}
    assert read_dead(app) == 0
    app.backend.client.close()
    app.close()
    with redis.Redis(port=own_redis.port) as operator:
        refused = [entry["object"] for entry in operator.acl_log()]
    assert set(refused) <= {"client", "client|setinfo"}, worker.log.read_text()
