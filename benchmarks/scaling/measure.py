"""Measure calls per second, the latency of waiting calls, and the resource usage of a call."""

from __future__ import annotations

import asyncio
import resource
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.harness.contender import NotAvailableError
from benchmarks.harness.figures import percentile
from benchmarks.harness.redis_server import RedisServer, redis_server
from benchmarks.scaling.fleet import Caller, Fleet, opened_caller, running_fleet
from benchmarks.scaling.streams import StreamCosts, measure_streams
from benchmarks.scaling.turns import CHECK, FIT, Turns, measure_turns
from nekro.app import use_cases

__all__ = ["Costs", "Figures", "Plan", "Throughput", "Waiting", "measure"]


#: How calls that wait together are sent.
_AT_ONCE, _STEP_SECONDS = 100, 0.05


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The extent of the measurements."""

    workers: tuple[int, ...] = (1, 2, 4)
    #: Numbers of calls that wait at the same time.
    waiting: tuple[int, ...] = (1, 10, 100, 1_000, 10_000)
    flood_calls: int = 20_000
    in_flight: int = 200
    idle_seconds: float = 10.0
    runs: int = 20
    #: Of each mix, and the time that the system rests before.
    turns: int = 40
    rest_seconds: float = 8.0
    readers: int = 400
    events: int = 8

    @classmethod
    def quick(cls) -> Plan:
        """Return a plan that only checks that all of it works."""
        return cls(
            workers=(1, 2),
            waiting=(1, 10, 100),
            flood_calls=500,
            in_flight=50,
            idle_seconds=1.0,
            runs=3,
            turns=8,
            rest_seconds=1.0,
            readers=40,
            events=2,
        )


@dataclass(frozen=True, kw_only=True)
class Throughput:
    """The maximum rate of calls that do nothing."""

    workers: int
    in_flight: int
    calls_per_second: float
    p50_seconds: float
    p99_seconds: float


@dataclass(frozen=True, kw_only=True)
class Waiting:
    """Calls that all wait at the same time, and their latency beyond the wait."""

    waiting: int
    #: How long each method waits.
    wait_seconds: float
    p50_extra_seconds: float
    p99_extra_seconds: float
    worker_bytes_per_call: float
    redis_bytes_per_call: float


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Resource usage of one call, one idle worker and one run of code."""

    redis_commands_per_call: float
    redis_cpu_seconds_per_call: float
    redis_net_bytes_per_call: float
    worker_cpu_seconds_per_call: float
    caller_cpu_seconds_per_call: float
    idle_worker_commands_per_second: float
    #: Of a Redis that is busy with calls.
    idle_worker_redis_cpu_share: float
    idle_worker_cpu_share: float
    #: All processes of a sandbox and its run; None where there is no sandbox.
    run_cpu_seconds: float | None
    #: CPU time of a call in the first and the second Redis, when the second one has the results.
    broker_cpu_seconds_per_call: float
    results_cpu_seconds_per_call: float


@dataclass(frozen=True, kw_only=True)
class Figures:
    """All measurements."""

    throughput: tuple[Throughput, ...]
    waiting: tuple[Waiting, ...]
    costs: Costs
    #: None where PostgreSQL cannot run.
    turns: Turns | None
    streams: StreamCosts


def measure(server: RedisServer, directory: Path, plan: Plan) -> Figures:
    """Run all measurements; prints progress to stderr."""
    throughput, costs = [], []
    baseline = _redis_alone(server, plan.idle_seconds)
    for workers in plan.workers:
        _tell(f"{workers} workers …")
        with running_fleet(server, directory / f"flood-{workers}", workers=workers, concurrency=200) as fleet:
            figures, found = asyncio.run(_flooded(fleet, plan, baseline))
        throughput.append(figures)
        costs.append(found)
    _tell("results in a second Redis …")
    with (
        redis_server(directory) as second,
        running_fleet(server, directory / "second", workers=1, concurrency=200, results=second) as fleet,
    ):
        _, split = asyncio.run(_flooded(fleet, replace(plan, runs=0), baseline))
    most = max(plan.waiting)
    with running_fleet(server, directory / "waiting", workers=2, concurrency=most) as fleet:
        waiting = asyncio.run(_all_waiting(fleet, plan))
    # A call's usage from one worker, with the least contention; an idle worker's from the most workers.
    idle = {name: value for name, value in vars(costs[-1]).items() if name.startswith("idle_")}
    both = {
        "broker_cpu_seconds_per_call": split.redis_cpu_seconds_per_call,
        "results_cpu_seconds_per_call": split.results_cpu_seconds_per_call,
    }
    _tell("streams …")
    streams = measure_streams(readers=plan.readers, events=plan.events)
    return Figures(
        throughput=tuple(throughput),
        waiting=tuple(waiting),
        costs=replace(costs[0], **idle, **both),
        turns=_turns(plan),
        streams=streams,
    )


def _turns(plan: Plan) -> Turns | None:
    """Measure the mixes, and the one that the others have to predict."""
    _tell("whole turns …")
    try:
        found, turns = measure_turns(mixes=(*FIT, CHECK), turns=plan.turns, idle_seconds=plan.rest_seconds)
    except NotAvailableError as exc:
        _tell(f"no turns: {exc}")
        return None
    return replace(turns, fit=tuple(found[:-1]), check=found[-1])


def _redis_alone(server: RedisServer, seconds: float) -> float:
    """Return the commands per second that reading the statistics of an idle Redis takes."""
    fleet = Fleet(settings=None, server=server, workers=())
    before, begin = fleet.usage(), time.perf_counter()
    time.sleep(seconds)
    used, gone = fleet.usage().since(before), time.perf_counter() - begin
    return used.redis_commands / gone


async def _flooded(fleet: Fleet, plan: Plan, baseline: float) -> tuple[Throughput, Costs]:
    async with opened_caller(fleet) as caller:
        await _flood(caller, plan.flood_calls // 10, in_flight=plan.in_flight)  # warm
        before, begin = fleet.usage(), time.perf_counter()
        latencies = await _flood(caller, plan.flood_calls, in_flight=plan.in_flight)
        seconds, used = time.perf_counter() - begin, fleet.usage().since(before)
        idle_before, begin = fleet.usage(), time.perf_counter()
        await asyncio.sleep(plan.idle_seconds)
        idle, idle_seconds = fleet.usage().since(idle_before), time.perf_counter() - begin
        run_cpu_seconds = await _run_cpu_seconds(caller, plan.runs)
    calls, workers = plan.flood_calls, len(fleet.workers)
    # An idle Redis wakes up for each command, which takes longer than the command; a busy one does not.
    per_command_second = used.redis_cpu_seconds / used.redis_command_seconds
    costs = Costs(
        redis_commands_per_call=used.redis_commands / calls,
        redis_cpu_seconds_per_call=used.redis_cpu_seconds / calls,
        redis_net_bytes_per_call=used.redis_net_bytes / calls,
        worker_cpu_seconds_per_call=used.worker_cpu_seconds / calls,
        caller_cpu_seconds_per_call=used.caller_cpu_seconds / calls,
        idle_worker_commands_per_second=max(0.0, (idle.redis_commands / idle_seconds - baseline) / workers),
        idle_worker_redis_cpu_share=per_command_second * idle.redis_command_seconds / idle_seconds / workers,
        idle_worker_cpu_share=idle.worker_cpu_seconds / idle_seconds / workers,
        run_cpu_seconds=run_cpu_seconds,
        broker_cpu_seconds_per_call=0.0,
        results_cpu_seconds_per_call=used.results_cpu_seconds / calls,
    )
    figures = Throughput(
        workers=workers,
        in_flight=plan.in_flight,
        calls_per_second=calls / seconds,
        p50_seconds=percentile(latencies, 50),
        p99_seconds=percentile(latencies, 99),
    )
    return figures, costs


async def _flood(caller: Caller, calls: int, *, in_flight: int) -> list[float]:
    numbers, latencies = iter(range(calls)), []

    async def lane() -> None:
        for number in numbers:
            begin = time.perf_counter()
            await caller.call(number, 0)
            latencies.append(time.perf_counter() - begin)

    async with asyncio.TaskGroup() as group:
        for _ in range(in_flight):
            group.create_task(lane())
    return latencies


async def _all_waiting(fleet: Fleet, plan: Plan) -> list[Waiting]:
    found = []
    async with opened_caller(fleet) as caller:
        for waiting in plan.waiting:
            _tell(f"{waiting} calls that wait …")
            found.append(await _wait_together(fleet, caller, waiting))
    return found


async def _wait_together(fleet: Fleet, caller: Caller, waiting: int) -> Waiting:
    # Long enough that the last call starts before the first one ends.
    wait_seconds = 1.0 + waiting / 500
    redis_before, workers_before = fleet.redis_bytes(), fleet.worker_bytes()
    latencies: list[float] = []

    async def one(number: int) -> None:
        begin = time.perf_counter()
        await caller.call(number, wait_seconds)
        latencies.append(time.perf_counter() - begin - wait_seconds)

    async with asyncio.TaskGroup() as group:
        for number in range(waiting):
            group.create_task(one(number))
            if number % _AT_ONCE == _AT_ONCE - 1:  # else a busy machine sends none within the time for it
                await asyncio.sleep(_STEP_SECONDS)
        await asyncio.sleep(wait_seconds / 2)
        redis_bytes, worker_bytes = fleet.redis_bytes(), fleet.worker_bytes()
    return Waiting(
        waiting=waiting,
        wait_seconds=wait_seconds,
        p50_extra_seconds=percentile(latencies, 50),
        p99_extra_seconds=percentile(latencies, 99),
        worker_bytes_per_call=max(0, worker_bytes - workers_before) / waiting,
        redis_bytes_per_call=max(0, redis_bytes - redis_before) / waiting,
    )


async def _run_cpu_seconds(caller: Caller, runs: int) -> float | None:
    from nekro_agent.errors import SandboxUnavailableError

    services = caller.services
    try:
        await services.sandboxes()
    except SandboxUnavailableError:
        return None
    if not runs:
        return None
    before = _cpu_of_us_and_ours()
    for number in range(runs):
        await use_cases.run_code(
            services, "print(1)", chat_key=f"chat-{number}", user_id=None, follow_up=False, file_name="run.py"
        )
    return (_cpu_of_us_and_ours() - before) / runs


def _cpu_of_us_and_ours() -> float:
    kinds = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return sum(used.ru_utime + used.ru_stime for used in map(resource.getrusage, kinds))


def _tell(words: str) -> None:
    print(words, file=sys.stderr, flush=True)
