"""Revocations that survive a restart of all workers.

Celery's ``revoke`` is a broadcast, which only running workers receive. Here the ids are also stored in
Redis, and a worker reads them each time it connects, before it consumes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import redis
from celery import Celery, bootsteps
from loguru import logger

from broker_config.keys import Keys
from nekro.broker.celery.names import MAILBOX_STEP
from nekro.broker.celery.worker_state import add_revoked
from nekro_agent.shared_clock import shared_now

__all__ = ["RevocationStep", "name_request", "revoke", "revoke_request"]

#: How long an id is kept: longer than any message exists.
REVOKED_SECONDS: Final = 24 * 3600
#: How long the call of a client's request is found.
REQUEST_SECONDS: Final = 3600
#: Maximum number of ids; as many as Celery itself keeps in a worker.
MAX_REVOKED: Final = 50_000


def revoke(app: Celery, task_ids: Sequence[str]) -> None:
    """Make running and future workers drop tasks or stop them; blocks.

    Raises:
        Exception: an error of the drivers, when Redis or the broker does not answer.
    """
    now = shared_now()
    with app.backend.client.pipeline(transaction=False) as pipe:
        key = _key(app)
        pipe.zadd(key, {task_id: now + REVOKED_SECONDS for task_id in task_ids})
        pipe.zremrangebyscore(key, 0, now)
        pipe.zremrangebyrank(key, 0, -MAX_REVOKED - 1)
        pipe.expire(key, REVOKED_SECONDS)
        pipe.execute()
    app.control.revoke(list(task_ids), terminate=True)


def name_request(app: Celery, digest: str, call_id: str) -> None:
    """Keep which call a client's request causes, so that any gateway can revoke it; blocks.

    The newest call counts: clients give several requests the same number.

    Raises:
        Exception: as from ``revoke``.
    """
    app.backend.client.set(_keys(app).request(digest), call_id, ex=REQUEST_SECONDS)


def revoke_request(app: Celery, digest: str) -> None:
    """Revoke the call that a request has caused; nothing if it caused none, or long ago; blocks.

    Raises:
        Exception: as from ``revoke``.
    """
    found = app.backend.client.get(_keys(app).request(digest))
    if found is not None:
        revoke(app, [found.decode(errors="replace")])


class RevocationStep(bootsteps.StartStopStep):  # type: ignore[misc]
    """Reads the ids at each connect, after the mailbox has started listening, so that none is missed."""

    requires = (MAILBOX_STEP,)

    def start(self, c: Any) -> None:
        """Load the ids that were revoked while this worker was not connected."""
        try:
            found = c.app.backend.client.zrangebyscore(
                _key(c.app), shared_now(), "+inf", start=0, num=MAX_REVOKED
            )
        except (redis.RedisError, OSError) as exc:
            # Broadcasts still work, and a call's deadline is checked anyway.
            logger.bind(error=str(exc)).warning("revoked_calls_not_read")
            return
        add_revoked(raw.decode(errors="replace") for raw in found)


def _key(app: Celery) -> str:
    return _keys(app).revoked


def _keys(app: Celery) -> Keys:
    return Keys(prefix=app.conf.result_backend_transport_options.get("global_keyprefix", ""))
