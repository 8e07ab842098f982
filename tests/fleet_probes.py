"""Reads of a fleet's Redis and database."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import text
from worker_fleet import Fleet

from broker_config.partitions import ChatServers
from broker_config.redis_endpoint import RedisEndpoint
from broker_config.settings import Settings
from storage.engine import Database


def client_of(fleet: Fleet) -> Any:
    """A plain client of the fleet's Redis; a context manager."""
    return RedisEndpoint(fleet.settings.broker, fleet.settings.broker.url).client()


def key(fleet: Fleet, name: str) -> str:
    """A key under the fleet's prefix."""
    return f"{fleet.settings.broker.key_prefix}{name}"


def chats_of(settings: Settings, server: int, *, count: int) -> list[str]:
    """Chats of one of the Redis servers, numbered from 0; the addresses determine which."""
    servers = ChatServers(settings.broker)
    names = (f"chat-{number}" for number in range(1000))
    return [name for name in names if servers.order(name)[0] == server][:count]


def left_in_lane(fleet: Fleet, client: Any, lane: str) -> dict[str, Any]:
    """Queued messages of a lane and those its workers hold; empty when there are none."""
    found = {
        "waiting": client.lrange(key(fleet, lane), 0, -1),
        "waiting for their turn": client.keys(key(fleet, f"{lane}:fair*")),
        "held": client.hgetall(key(fleet, f"unacked.{lane}")),
        "leases": client.zrange(key(fleet, f"unacked.{lane}_index"), 0, -1, withscores=True),
    }
    return {name: value for name, value in found.items() if value}


async def ask(database: Database, query: str, **values: Any) -> Sequence[Any]:
    """Run a query on the database."""
    async with database.read() as transaction:
        return (await transaction.connection.execute(text(query), values)).all()


#: Queries that must find nothing once every round has ended, by the violation that they find.
ROUND_FAULTS = {
    "two rounds of one trigger": """
        SELECT trigger_kind, trigger_id FROM rounds GROUP BY 1, 2 HAVING count(*) > 1""",
    "a message of a person without a round": """
        SELECT m.id FROM messages m LEFT JOIN rounds r ON r.trigger_kind = 'message' AND r.trigger_id = m.id
        WHERE m.kind = 'user' AND r.id IS NULL""",
    "an AGENT result without a round": """
        SELECT c.id FROM calls c LEFT JOIN rounds r ON r.trigger_kind = 'call' AND r.trigger_id = c.id
        WHERE c.type = 'agent' AND c.state = 'done' AND r.id IS NULL""",
    "a round of a call that left no result": """
        SELECT r.id FROM rounds r LEFT JOIN calls c
        ON c.id = r.trigger_id AND (c.state = 'done' OR c.detached_at IS NOT NULL)
        WHERE r.trigger_kind = 'call' AND c.id IS NULL""",
    "a round that is not over": "SELECT id, state, error FROM rounds WHERE state NOT IN ('done', 'merged')",
    "a trigger that went along with nothing": """
        SELECT r.id FROM rounds r LEFT JOIN rounds into_
        ON into_.id = r.merged_into AND into_.state IN ('done', 'failed')
        WHERE r.state = 'merged' AND into_.id IS NULL""",
    # A later round of a chat started before an earlier one had ended: out of order, or concurrent.
    "two rounds of a chat at once or out of order": """
        SELECT a.id, b.id FROM rounds a JOIN rounds b ON a.chat_key = b.chat_key AND a.sequence < b.sequence
        WHERE a.state = 'done' AND b.state = 'done' AND b.started_at < a.finished_at""",
}
