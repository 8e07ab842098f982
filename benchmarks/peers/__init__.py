"""The contenders, in the order of their turns. The libraries of a peer are imported in its turn only."""

from __future__ import annotations

from benchmarks.harness.contender import Contender
from benchmarks.peers import (
    arq_redis,
    celery_stock,
    dramatiq_redis,
    fastapi_pickle,
    huey_redis,
    ours,
    raw_redis,
    ray_actor,
    taskiq_list,
)

__all__ = ["CONTENDERS", "contender_named"]

CONTENDERS: tuple[Contender, ...] = (
    raw_redis.CONTENDER,
    celery_stock.PREFORK,
    celery_stock.THREADS,
    taskiq_list.CONTENDER,
    dramatiq_redis.CONTENDER,
    huey_redis.CONTENDER,
    arq_redis.CONTENDER,
    fastapi_pickle.SESSION,
    fastapi_pickle.PLAIN,
    ray_actor.CONTENDER,
    ours.BRIDGE,
    ours.SANDBOX,
)


def contender_named(name: str) -> Contender:
    """Return one contender.

    Raises:
        LookupError: there is none of that name; the message lists the known ones.
    """
    for contender in CONTENDERS:
        if contender.name == name:
            return contender
    known = ", ".join(contender.name for contender in CONTENDERS)
    raise LookupError(f"no contender {name!r}; there are {known}")
