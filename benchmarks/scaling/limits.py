"""The parts of a fleet that more workers do not help: what each can do, and the cure of each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.scaling.measure import Costs
from benchmarks.scaling.model import broker_shares
from benchmarks.scaling.streams import StreamCosts
from benchmarks.scaling.turns import Mix, TurnCosts, Turns, part_costs

__all__ = ["CHATS", "CONNECTIONS", "DATABASE_CORES", "FULL", "MIX", "Limit", "fleet_costs", "limits"]

CHATS = 1_000_000
#: The turn of a million chats: 2 rounds with 3 calls each, of which one in the turn is recorded.
MIX = Mix(code_rounds=1, tools=4, notes=1)
#: Highest average use of a component: above it the p99 latency grows quickly.
FULL = 0.6
DATABASE_CORES = 16
#: PostgreSQL's default, and what a server with 64 GB takes.
CONNECTIONS, MOST_CONNECTIONS = 100, 500
_STATEMENT_SECONDS = 0.0003


@dataclass(frozen=True, kw_only=True)
class Limit:
    """One part that a fleet has once."""

    part: str
    turns_per_second: float
    cure: str
    cured_turns_per_second: float

    def per_chat_and_hour(self, turns_per_second: float) -> float:
        """Return how many turns each of the chats can take in an hour."""
        return 3600 * turns_per_second / CHATS


def fleet_costs(costs: Costs, turns: Turns) -> TurnCosts:
    """Return the costs of a turn's parts in a fleet, whose Redis is busy."""
    return part_costs(turns.fit).busy(costs.redis_cpu_seconds_per_call / costs.redis_commands_per_call)


def limits(costs: Costs, turns: Turns, streams: StreamCosts, *, workers: int) -> list[Limit]:
    """Return the limits of a fleet with so many workers, the lowest first."""
    return sorted(_limits(costs, turns, streams, workers), key=lambda limit: limit.turns_per_second)


def _limits(costs: Costs, turns: Turns, streams: StreamCosts, workers: int) -> Iterator[Limit]:
    spent = fleet_costs(costs, turns).of(MIX)
    database = FULL * DATABASE_CORES / spent.cpu_seconds["postgresql"]
    yield Limit(
        part=f"PostgreSQL: CPU of one server with {DATABASE_CORES} cores",
        turns_per_second=database,
        cure="a database for each half of the chats (two fleets)",
        cured_turns_per_second=database * _gain(2),
    )
    hold = (
        turns.sync_seconds
        + (_STATEMENT_SECONDS * spent.statements + spent.cpu_seconds["postgresql"]) / spent.commits
    )
    # Each worker keeps a connection at least, so the default is used up by a tenth of the workers.
    yield Limit(
        part=f"PostgreSQL: `max_connections` = {CONNECTIONS} without a pooler",
        turns_per_second=0.0 if workers > CONNECTIONS else CONNECTIONS / (spent.commits * hold),
        cure=f"pgbouncer in transaction mode, {MOST_CONNECTIONS} connections to the server",
        cured_turns_per_second=FULL * MOST_CONNECTIONS / (spent.commits * hold),
    )
    redis = spent.cpu_seconds["redis"]
    left = max(0.0, FULL - workers * costs.idle_worker_redis_cpu_share)
    stays = costs.broker_cpu_seconds_per_call / (
        costs.broker_cpu_seconds_per_call + costs.results_cpu_seconds_per_call
    )
    yield Limit(
        part="the broker: one thread of Redis",
        turns_per_second=left / redis,
        cure="results in a second Redis, chats over two brokers",
        cured_turns_per_second=(left + (_gain(2) - 1) * FULL) / (redis * stays),
    )
    own = spent.announcements * streams.foreign_cpu_seconds
    yield Limit(
        part="announcements of events: each gateway receives all",
        turns_per_second=FULL / own,
        cure="a fleet (gateways and their Redis) for each half of the chats",
        cured_turns_per_second=FULL / own * _gain(2),
    )


def _gain(servers: int) -> float:
    """Return how much more so many servers do than one, with chats that are spread by a hash."""
    return 1 / max(broker_shares(servers))
