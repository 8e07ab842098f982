"""Simulate fleets that are too large for this machine, from the measured costs.

Four kinds of station, each first come, first served: callers and worker loops (a core each),
Redis (one thread each), and the methods' own waiting, which takes time but no core. A call
passes caller → Redis (push) → worker loop via Redis (claim) → waiting → loop → Redis (result)
→ caller. A worker fetches messages when it has room, so the simulation gives a call to the
less loaded of two random workers, a common approximation of that. Redis also serves the
commands of idle workers.
"""

from __future__ import annotations

import functools
import hashlib
import random
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from benchmarks.harness.figures import percentile
from benchmarks.scaling.measure import Costs

if TYPE_CHECKING:
    import simpy

__all__ = ["Capacity", "Outcome", "System", "broker_shares", "capacity", "simulate", "system_for"]

#: Shares of a call's Redis time in its three visits.
_VISITS = (0.3, 0.4, 0.3)
#: Share of the calls that is left out of the figures, while the system fills.
_WARM_UP = 0.25
#: Activity of chats: a few are many times as active as most (Pareto's distribution), at most so many times
#: as the least active one.
_ACTIVITY_SHAPE, _MOST_ACTIVE = 1.5, 1_000.0


@dataclass(frozen=True, kw_only=True)
class System:
    """A fleet, and the time that its components need for one call."""

    workers: int
    callers: int
    #: The share of the calls that each Redis server has.
    redis_shares: tuple[float, ...]
    #: Calls that one worker runs at the same time.
    concurrency: int
    worker_seconds: float
    caller_seconds: float
    redis_seconds: float
    #: Share of one Redis that one idle worker takes.
    idle_share: float
    #: How long methods wait for others, on average (exponential).
    wait_seconds: float


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """Maximum calls per second of each kind of component."""

    workers: float
    callers: float
    redis: float
    slots: float

    @property
    def first(self) -> tuple[str, float]:
        """The bottleneck, and its calls per second."""
        parts = {
            "worker CPU": self.workers,
            "caller CPU": self.callers,
            "Redis": self.redis,
            "worker slots": self.slots,
        }
        name = min(parts, key=lambda part: parts[part])
        return name, parts[name]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Latencies for callers at a load, without the methods' own waiting, and the use of components."""

    p50_seconds: float
    p99_seconds: float
    #: Of the Redis server with the most calls.
    redis_use: float
    worker_use: float


@functools.cache
def broker_shares(brokers: int, *, chats: int = 20_000, seed: int = 1) -> tuple[float, ...]:
    """Return the shares of the load when chats of different activity are spread by a hash of their keys."""
    chance = random.Random(seed)
    loads = [0.0] * brokers
    for number in range(chats):
        digest = hashlib.sha256(f"chat-{number}".encode()).digest()
        loads[int.from_bytes(digest[:8]) % brokers] += min(
            _MOST_ACTIVE, chance.paretovariate(_ACTIVITY_SHAPE)
        )
    return tuple(load / sum(loads) for load in loads)


def system_for(costs: Costs, *, workers: int, redises: int = 1, wait_seconds: float = 0.2) -> System:
    """Return a fleet of ``workers`` workers, with 1.5 times the callers that can keep them busy."""
    ratio = costs.caller_cpu_seconds_per_call / costs.worker_cpu_seconds_per_call
    return System(
        workers=workers,
        callers=max(1, round(workers * ratio * 1.5)),
        redis_shares=broker_shares(redises),
        concurrency=1000,
        worker_seconds=costs.worker_cpu_seconds_per_call,
        caller_seconds=costs.caller_cpu_seconds_per_call,
        redis_seconds=costs.redis_cpu_seconds_per_call,
        idle_share=costs.idle_worker_redis_cpu_share,
        wait_seconds=wait_seconds,
    )


def capacity(system: System) -> Capacity:
    """Return the computed capacity; the simulation shows the latencies below it."""
    return Capacity(
        workers=system.workers / system.worker_seconds,
        callers=system.callers / system.caller_seconds,
        redis=_redis_left(system) / max(system.redis_shares) / system.redis_seconds,
        slots=system.workers * system.concurrency / max(system.wait_seconds, system.worker_seconds),
    )


def simulate(system: System, *, calls_per_second: float, calls: int, seed: int = 1) -> Outcome:
    """Simulate calls with Poisson arrivals; the same seed gives the same figures."""
    import simpy

    run = _Run(simpy.Environment(), system, random.Random(seed))
    run.environment.process(run.arrivals(calls_per_second, calls))
    run.environment.run()
    measured = run.latencies[int(_WARM_UP * calls) :]
    return Outcome(
        p50_seconds=percentile(measured, 50),
        p99_seconds=percentile(measured, 99),
        redis_use=1
        - _redis_left(system)
        + calls_per_second * system.redis_seconds * max(system.redis_shares),
        worker_use=calls_per_second * system.worker_seconds / system.workers,
    )


def _redis_left(system: System) -> float:
    """Return the share of a Redis that idle workers do not use; workers are spread over the servers."""
    return max(1e-6, 1 - system.workers * system.idle_share / len(system.redis_shares))


class _Run:
    def __init__(self, environment: simpy.Environment, system: System, chance: random.Random) -> None:
        import simpy

        self.environment = environment
        self.latencies: list[float] = []
        self._chance = chance
        # The commands of idle workers slow Redis down for calls.
        self._system = replace(system, redis_seconds=system.redis_seconds / _redis_left(system))
        self._callers = [simpy.Resource(environment) for _ in range(system.callers)]
        self._redises = [simpy.Resource(environment) for _ in system.redis_shares]
        self._loops = [simpy.Resource(environment) for _ in range(system.workers)]
        self._slots = [simpy.Resource(environment, system.concurrency) for _ in range(system.workers)]

    def arrivals(self, calls_per_second: float, calls: int) -> Generator[Any, Any, None]:
        """Start calls at random intervals."""
        for _ in range(calls):
            yield self.environment.timeout(self._chance.expovariate(calls_per_second))
            self.environment.process(self._call())

    def _call(self) -> Generator[Any, Any, None]:
        system, begin = self._system, self.environment.now
        caller = self._chance.choice(self._callers)
        (server,) = self._chance.choices(self._redises, system.redis_shares)
        push, claim, answer = (share * system.redis_seconds for share in _VISITS)
        yield from self._use(caller, system.caller_seconds / 2)
        yield from self._use(server, push)
        number = self._worker()
        with self._slots[number].request() as slot:
            yield slot
            yield from self._use(server, claim)
            yield from self._use(self._loops[number], system.worker_seconds / 2)
            waited = self._chance.expovariate(1 / system.wait_seconds) if system.wait_seconds else 0.0
            yield self.environment.timeout(waited)
            yield from self._use(self._loops[number], system.worker_seconds / 2)
        yield from self._use(server, answer)
        yield from self._use(caller, system.caller_seconds / 2)
        self.latencies.append(self.environment.now - begin - waited)

    def _use(self, station: simpy.Resource, seconds: float) -> Generator[Any, Any, None]:
        with station.request() as turn:
            yield turn
            yield self.environment.timeout(seconds)

    def _worker(self) -> int:
        one, other = self._chance.randrange(len(self._loops)), self._chance.randrange(len(self._loops))
        return min(one, other, key=self._load)

    def _load(self, number: int) -> tuple[int, int]:
        loop: Sequence[Any] = self._loops[number].queue
        return len(loop) + self._loops[number].count, self._slots[number].count
