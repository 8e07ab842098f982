"""The peer dramatiq: Redis broker, Redis results and an async actor (its ``AsyncIO`` middleware)."""

from __future__ import annotations

import sys
from typing import Any

from benchmarks.harness.contender import CALL_SECONDS, TEXT, Contender, Setup, WindowClient, probe

__all__ = ["CONTENDER", "DramatiqClient", "create_actor", "setup_broker"]

#: Twice the default: its fetching is paced by its threads, and 8 gave it two fifths fewer calls/s.
_THREADS = 16
_STOP_MILLISECONDS = 5000


def create_actor(setup: Setup) -> Any:
    """Build broker and actor, set the broker as the global one; return the actor."""
    import dramatiq
    from dramatiq.brokers.redis import RedisBroker
    from dramatiq.middleware import AsyncIO
    from dramatiq.results import Results
    from dramatiq.results.backends import RedisBackend

    broker = RedisBroker(url=setup.redis_url)  # type: ignore[no-untyped-call]
    results = RedisBackend(url=setup.redis_url)
    broker.add_middleware(Results(backend=results))  # type: ignore[no-untyped-call]
    broker.add_middleware(AsyncIO())
    dramatiq.set_broker(broker)
    return dramatiq.actor(actor_name="probe", store_results=True, broker=broker)(probe)


def setup_broker() -> None:
    """Build everything; the worker's command line calls this without arguments."""
    create_actor(Setup.from_environment())


def _worker_commands(setup: Setup) -> list[list[str]]:
    options = ["--processes", str(setup.workers), "--threads", str(_THREADS)]
    stop = ["--worker-shutdown-timeout", str(_STOP_MILLISECONDS)]
    return [[sys.executable, "-m", "dramatiq", f"{__name__}:setup_broker", *options, *stop]]


class DramatiqClient(WindowClient[Any]):
    """``send`` and a blocking ``get_result``."""

    def __init__(self, setup: Setup) -> None:
        self._actor = create_actor(setup)

    def send(self, number: int) -> Any:
        return self._actor.send(number, TEXT)

    def receive(self, ticket: Any) -> object:
        return ticket.get_result(block=True, timeout=int(CALL_SECONDS * 1000))

    def close(self) -> None:
        self._actor.broker.close()


CONTENDER = Contender(
    name="dramatiq",
    about=f"dramatiq, RedisBroker and Redis results, {_THREADS} threads per process, an async actor",
    modules=("dramatiq", "redis"),
    worker_commands=_worker_commands,
    open_client=DramatiqClient,
)
