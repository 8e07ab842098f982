"""Cancelled calls that stay cancelled when every worker restarts.

Celery's ``revoke`` is a broadcast: only workers that are up hear it. The ids are kept in
Redis as well, and a worker reads them each time that it connects, before it consumes.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Final

import redis
from celery import Celery, bootsteps
from celery.worker import state

from broker_config.keys import Keys
from nekro_agent.shared_clock import shared_now

__all__ = ["RevocationStep", "revoke"]

#: How long an id is remembered: longer than any message lives.
REVOKED_SECONDS: Final = 24 * 3600
#: Most ids remembered; as many as Celery itself keeps in a worker.
MAX_REVOKED: Final = 50_000

logger = logging.getLogger(__name__)


def revoke(app: Celery, task_ids: Sequence[str], *, terminate: bool = True) -> None:
    """Have tasks dropped by workers that are up and by those to come; blocks.

    Args:
        terminate: stop them also when they run already.

    Raises:
        Exception: of the drivers, when Redis or the broker does not answer.
    """
    now = shared_now()
    with app.backend.client.pipeline(transaction=False) as pipe:
        key = _key(app)
        pipe.zadd(key, {task_id: now + REVOKED_SECONDS for task_id in task_ids})
        pipe.zremrangebyscore(key, 0, now)
        pipe.zremrangebyrank(key, 0, -MAX_REVOKED - 1)
        pipe.expire(key, REVOKED_SECONDS)
        pipe.execute()
    app.control.revoke(list(task_ids), terminate=terminate)


class RevocationStep(bootsteps.StartStopStep):  # type: ignore[misc]
    """Reads the ids on each connection: after the mailbox listens, so that none falls in between."""

    requires = ("celery.worker.consumer.control:Control",)

    def start(self, c: Any) -> None:
        """Remember what was revoked while this worker was not there to hear it."""
        try:
            found = c.app.backend.client.zrangebyscore(
                _key(c.app), shared_now(), "+inf", start=0, num=MAX_REVOKED
            )
        except (redis.RedisError, OSError) as exc:
            # The broadcast still works, and a call's deadline is checked anyway.
            logger.warning("revoked calls cannot be read: %s", exc)
            return
        for raw in found:
            state.revoked.add(raw.decode(errors="replace"))


def _key(app: Celery) -> str:
    prefix = app.conf.result_backend_transport_options.get("global_keyprefix", "")
    return Keys(prefix=prefix).revoked
