"""Simulate whole turns of a fleet, with its database, brokers and sandbox hosts.

A turn passes the gateway (a core each), then for each round the loop of a rounds worker (a core each), the
model, which takes time but no core, and a core of a sandbox host. Its calls pass a broker (Redis, one thread)
to a methods worker (a core each) and back. Transactions take a connection of the database's pool, a core of
its server, and wait for the write-ahead log: one sync writes all commits that wait, as in PostgreSQL.
A chat has one broker, by a hash of its key; chats are not equally active. A broker may be away for a while:
a call made meanwhile is refused after a time, a message waits in the database until the sweep finds it.
"""

from __future__ import annotations

import random
from collections.abc import Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchmarks.harness.figures import percentile
from benchmarks.scaling.turns import Mix, Spent, TurnCosts

if TYPE_CHECKING:
    import simpy

__all__ = ["Cell", "Outage", "TurnOutcome", "cell_for", "simulate_turns"]

_WARM_UP = 0.25
#: Processes of a measured system whose event loop a turn passes.
_GATEWAY, _ROUNDS, _METHODS, _REDIS, _DATABASE = "gateway", "rounds", "methods", "redis", "postgresql"
#: Time of a statement's way to the database and back.
_STATEMENT_SECONDS = 0.0003
#: A call that cannot be sent is refused after that time, and a message is found by the sweep of a worker.
_REFUSED_SECONDS = 1.5
_SWEEP_SECONDS = 5.0
_WINDOW_SECONDS = 5.0


@dataclass(frozen=True, kw_only=True)
class Outage:
    """The time during which broker 0 answers nothing."""

    begin_seconds: float
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Cell:
    """The part of a fleet that uses one database."""

    costs: TurnCosts
    mix: Mix
    turns_per_second: float
    gateways: int
    rounds_workers: int
    methods_workers: int
    sandbox_cores: int
    #: CPU time of a run of code, which is a part of a round's.
    run_seconds: float
    #: Share of the chats that each broker has.
    broker_shares: tuple[float, ...]
    #: Share of a broker that idle workers take.
    idle_share: float
    database_cores: int
    connections: int
    #: Until a sync of the write-ahead log has ended; 0 with `synchronous_commit=off`.
    sync_seconds: float
    model_seconds: float = 2.0
    outage: Outage | None = None


@dataclass(frozen=True, kw_only=True)
class TurnOutcome:
    """What people and the database feel; times without the model's."""

    p50_seconds: float
    p99_seconds: float
    #: A commit from its request to the end of the sync.
    commit_p99_seconds: float
    #: Waiting for a connection.
    connection_p99_seconds: float
    #: The most connections that were used at once.
    connections_used: int
    commits_per_sync: float
    calls_refused: int
    turns_delayed: int
    #: After the end of an outage, until a window's p99 is at most twice that before it; None if never.
    recovered_seconds: float | None


def cell_for(
    costs: TurnCosts, mix: Mix, *, turns_per_second: float, run_seconds: float, full: float, **given: Any
) -> Cell:
    """Return a cell whose processes are at most ``full`` in use; ``given`` are the other fields."""
    spent = costs.of(mix)

    def needed(seconds: float) -> int:
        return max(2, -(-int(1000 * turns_per_second * seconds / full) // 1000))

    runs = mix.code_rounds * run_seconds
    loops = max(0.0, spent.cpu_seconds[_ROUNDS] - runs)
    return Cell(
        costs=costs,
        mix=mix,
        turns_per_second=turns_per_second,
        gateways=needed(spent.cpu_seconds[_GATEWAY]),
        rounds_workers=needed(loops),
        methods_workers=needed(spent.cpu_seconds[_METHODS]),
        sandbox_cores=needed(runs),
        run_seconds=run_seconds,
        **given,
    )


def simulate_turns(cell: Cell, *, turns: int, seed: int = 1) -> TurnOutcome:
    """Simulate turns with Poisson arrivals; the same seed gives the same figures."""
    import simpy

    run = _Run(simpy.Environment(), cell, random.Random(seed))
    run.environment.process(run.arrivals(turns))
    run.environment.run()
    return run.outcome()


class _Log:
    """The write-ahead log: one sync at a time, for all commits that wait when it begins."""

    def __init__(self, environment: simpy.Environment, seconds: float) -> None:
        self._environment, self._seconds = environment, seconds
        self._waiting: list[simpy.Event] = []
        self._is_syncing = False
        self.syncs = self.commits = 0

    def commit(self) -> simpy.Event:
        """Return an event that happens when the commit is on the disk."""
        event = self._environment.event()
        self._waiting.append(event)
        if not self._is_syncing:
            self._environment.process(self._sync())
        return event

    def _sync(self) -> Generator[Any, Any, None]:
        self._is_syncing = True
        while self._waiting:
            batch, self._waiting = self._waiting, []
            self.syncs, self.commits = self.syncs + 1, self.commits + len(batch)
            yield self._environment.timeout(self._seconds)
            for event in batch:
                event.succeed()
        self._is_syncing = False


class _Run:
    def __init__(self, environment: simpy.Environment, cell: Cell, chance: random.Random) -> None:
        import simpy

        def stations(count: int, capacity: int = 1) -> list[simpy.Resource]:
            return [simpy.Resource(environment, capacity) for _ in range(count)]

        self.environment, self._cell, self._chance = environment, cell, chance
        self._gateways = stations(cell.gateways)
        self._rounds = stations(cell.rounds_workers)
        self._methods = stations(cell.methods_workers)
        self._brokers = stations(len(cell.broker_shares))
        (self._sandboxes,) = stations(1, cell.sandbox_cores)
        (self._database,) = stations(1, cell.database_cores)
        (self._pool,) = stations(1, cell.connections)
        self._log = _Log(environment, cell.sync_seconds)
        #: (end, seconds without the model) of each turn.
        self._turns: list[tuple[float, float]] = []
        self._commits: list[float] = []
        self._connections: list[float] = []
        self._most_connections = self._refused = self._delayed = 0

    def arrivals(self, turns: int) -> Generator[Any, Any, None]:
        """Start turns at random intervals."""
        for _ in range(turns):
            yield self.environment.timeout(self._chance.expovariate(self._cell.turns_per_second))
            self.environment.process(self._turn())

    def outcome(self) -> TurnOutcome:
        """Return the figures; those of the first quarter are left out."""
        ordered = sorted(self._turns)
        measured = [seconds for _, seconds in ordered[int(_WARM_UP * len(ordered)) :]]
        return TurnOutcome(
            p50_seconds=percentile(measured, 50),
            p99_seconds=percentile(measured, 99),
            commit_p99_seconds=percentile(self._commits, 99),
            connection_p99_seconds=percentile(self._connections, 99),
            connections_used=self._most_connections,
            commits_per_sync=self._log.commits / max(1, self._log.syncs),
            calls_refused=self._refused,
            turns_delayed=self._delayed,
            recovered_seconds=self._recovered(ordered),
        )

    def _recovered(self, ordered: list[tuple[float, float]]) -> float | None:
        outage = self._cell.outage
        if outage is None:
            return None
        before = [seconds for end, seconds in ordered if end < outage.begin_seconds]
        limit, last = 2 * percentile(before, 99), outage.begin_seconds + outage.seconds
        slow = [end for end, seconds in ordered if seconds > limit and end > outage.begin_seconds]
        if slow and slow[-1] > ordered[-1][0] - _WINDOW_SECONDS:
            # A hundredth of the turns may be slow at any time; a window with more of them is not.
            window = [seconds for end, seconds in ordered if end > ordered[-1][0] - _WINDOW_SECONDS]
            if percentile(window, 99) > limit:
                return None
        end = last
        while end < ordered[-1][0]:
            window = [seconds for at, seconds in ordered if end < at <= end + _WINDOW_SECONDS]
            if window and percentile(window, 99) <= limit:
                return end - last
            end += 1.0
        return None

    def _turn(self) -> Generator[Any, Any, None]:
        cell, begin = self._cell, self.environment.now
        number = self._chance.choices(range(len(self._brokers)), cell.broker_shares)[0]
        gateway, rounds = self._chance.choice(self._gateways), self._chance.choice(self._rounds)
        words, code = cell.costs.words, cell.costs.code_round
        yield from self._use(gateway, words.cpu_seconds[_GATEWAY] / 2)
        yield from self._transactions(words, share=0.4)
        yield from self._announced(number, words.cpu_seconds[_REDIS] / 2)
        yield from self._use(rounds, words.cpu_seconds[_ROUNDS] / 2)
        waited = 0.0
        for _ in range(cell.mix.code_rounds):
            waited += yield from self._model()
            yield from self._use(rounds, max(0.0, code.cpu_seconds[_ROUNDS] - cell.run_seconds))
            yield from self._use(self._sandboxes, cell.run_seconds)
            for _ in range(cell.mix.tools):
                yield from self._call(number, rounds, cell.costs.tool)
            for _ in range(cell.mix.notes):
                yield from self._call(number, rounds, cell.costs.note)
            yield from self._transactions(code, share=1.0)
            yield from self._use(self._brokers[number], self._redis_seconds(code))
            method = self._chance.choice(self._methods)
            yield from self._use(method, code.cpu_seconds[_METHODS])
            yield from self._use(gateway, code.cpu_seconds[_GATEWAY])
        waited += yield from self._model()
        yield from self._use(rounds, words.cpu_seconds[_ROUNDS] / 2)
        yield from self._transactions(words, share=0.6)
        yield from self._use(self._brokers[number], self._redis_seconds(words) / 2)
        yield from self._use(gateway, words.cpu_seconds[_GATEWAY] / 2)
        self._turns.append((self.environment.now, self.environment.now - begin - waited))

    def _call(self, number: int, rounds: simpy.Resource, costs: Spent) -> Generator[Any, Any, None]:
        if self._away_seconds(number):
            yield self.environment.timeout(min(_REFUSED_SECONDS, self._away_seconds(number)))
            if self._away_seconds(number):
                self._refused += 1
                return
        method = self._chance.choice(self._methods)
        yield from self._use(rounds, costs.cpu_seconds[_ROUNDS])
        yield from self._use(self._brokers[number], self._redis_seconds(costs))
        yield from self._use(method, costs.cpu_seconds[_METHODS])
        yield from self._transactions(costs, share=1.0)

    def _announced(self, number: int, seconds: float) -> Generator[Any, Any, None]:
        away = self._away_seconds(number)
        if away:  # the message is in the database; a sweep after the outage announces it
            self._delayed += 1
            yield self.environment.timeout(away + self._chance.uniform(0, _SWEEP_SECONDS))
        yield from self._use(self._brokers[number], seconds / (1 - self._cell.idle_share))

    def _away_seconds(self, number: int) -> float:
        outage = self._cell.outage
        if outage is None or number != 0:
            return 0.0
        now = self.environment.now - outage.begin_seconds
        return outage.seconds - now if 0 <= now < outage.seconds else 0.0

    def _redis_seconds(self, costs: Spent) -> float:
        return costs.cpu_seconds[_REDIS] / (1 - self._cell.idle_share)

    def _transactions(self, costs: Spent, *, share: float) -> Generator[Any, Any, None]:
        """Run the transactions of a part; the whole ones of its commits, and chance decides the rest."""
        commits = share * costs.commits
        count = int(commits) + (self._chance.random() < commits % 1)
        for _ in range(count):
            asked = self.environment.now
            with self._pool.request() as connection:
                yield connection
                self._connections.append(self.environment.now - asked)
                self._most_connections = max(self._most_connections, self._pool.count)
                yield self.environment.timeout(_STATEMENT_SECONDS * costs.statements / costs.commits)
                yield from self._use(self._database, costs.cpu_seconds[_DATABASE] / costs.commits)
                begin = self.environment.now
                if self._cell.sync_seconds:
                    yield self._log.commit()
                self._commits.append(self.environment.now - begin)

    def _model(self) -> Generator[Any, Any, float]:
        seconds = self._chance.expovariate(1 / self._cell.model_seconds)
        yield self.environment.timeout(seconds)
        return seconds

    def _use(self, station: simpy.Resource, seconds: float) -> Generator[Any, Any, None]:
        with station.request() as turn:
            yield turn
            yield self.environment.timeout(seconds)
