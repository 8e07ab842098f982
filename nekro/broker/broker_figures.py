"""Reads figures of the broker: the lengths of the queues and of the dead list, and its clock."""

from __future__ import annotations

import contextlib
import json
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from datetime import datetime
from itertools import chain
from typing import Any, Final

from celery import Celery
from kombu.exceptions import ChannelError

from broker_config.app import NekroApp
from broker_config.keys import DEAD_QUEUE, REFUSED_QUEUE, Keys
from broker_config.redis_endpoint import RedisEndpoint
from broker_config.redis_library import redis
from broker_config.settings import BrokerSettings
from broker_config.urls import is_drained, is_redis, server_name
from nekro.broker.publishing import stored_body
from nekro.broker.redis.link import RedisLink
from nekro_agent.shared_clock import Reading, read_clock, shared_now

__all__ = [
    "BrokerFigures",
    "QueueFigures",
    "dead_mark",
    "lane_workers",
    "merge_queues",
    "read_broker_clock",
    "read_brokers",
    "read_dead",
    "read_queues",
]

#: SHA-1 of the newest entry of the list KEYS[1]; of "" if it is empty.
_NEWEST: Final = "return redis.sha1hex(redis.call('LINDEX', KEYS[1], 0) or '')"


@dataclass(frozen=True, kw_only=True)
class QueueFigures:
    """Figures of one queue at one moment."""

    #: The lane's name, or ``pinned.<plugin key>``.
    lane: str
    #: Messages that no worker has taken.
    waiting: int
    #: Messages that workers hold; None if the broker does not report it.
    held: int | None = None
    #: Age of the call that is next, mostly the oldest; None when none waits or the message has no date
    #: (rounds and jobs, whose rows have one).
    oldest_seconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class BrokerFigures:
    """A broker, and the figures of its queues."""

    #: Its URL without user and password.
    name: str
    #: Whether nothing new is sent to it (`#drain`).
    is_drained: bool
    #: None if it does not answer.
    queues: list[QueueFigures] | None

    @property
    def messages(self) -> int | None:
        """Number of messages that wait or are held; None if it does not answer."""
        if self.queues is None:
            return None
        return sum(queue.waiting + (queue.held or 0) for queue in self.queues)


def read_brokers(app: NekroApp) -> list[BrokerFigures]:
    """Read the figures of each broker that chats are partitioned over; blocks.

    Raises:
        Exception: an error of the broker's driver, when none of them answers.
    """
    broker = app.nekro_settings.broker
    names = [queue.name for queue in app.conf.task_queues]
    found, error = [], None
    for one, listed in zip(app.servers, (broker.url or "", *broker.partitions), strict=True):
        url, queues = one.nekro_settings.broker.url or "", None
        try:
            queues = _of_redis(one, url, names) if is_redis(url) else _of_others(one, names)
        except Exception as exc:  # each transport of kombu raises errors of its own driver
            error = exc
        figures = BrokerFigures(name=server_name(url), is_drained=is_drained(listed), queues=queues)
        found.append(figures)
    if error is not None and all(one.queues is None for one in found):
        raise error
    return found


def merge_queues(brokers: Iterable[BrokerFigures]) -> list[QueueFigures]:
    """Return the figures of each queue on all brokers that answer."""
    by_lane: dict[str, list[QueueFigures]] = {}
    for queue in chain.from_iterable(broker.queues or () for broker in brokers):
        by_lane.setdefault(queue.lane, []).append(queue)
    return [
        QueueFigures(
            lane=lane,
            waiting=sum(one.waiting for one in each),
            held=None if each[0].held is None else sum(one.held or 0 for one in each),
            oldest_seconds=max(
                (one.oldest_seconds for one in each if one.oldest_seconds is not None), default=None
            ),
        )
        for lane, each in by_lane.items()
    ]


def read_queues(app: NekroApp) -> list[QueueFigures]:
    """Read the figures of every queue in the settings; blocks.

    Raises:
        Exception: an error of the broker's driver, when no broker answers.
    """
    return merge_queues(read_brokers(app))


def lane_workers(app: Celery) -> dict[str, int]:
    """Ask all workers which lanes they serve; returns the number of workers by lane. Blocks for a second."""
    answers = app.control.inspect().active_queues() or {}
    return dict(Counter(queue["name"] for queues in answers.values() for queue in queues))


def read_dead(app: NekroApp) -> int | None:
    """Count the dead letters; None for brokers other than Redis."""
    settings = app.nekro_settings.broker
    if settings.url is None or not is_redis(settings.url):
        return None
    with _client(app, settings.url) as client:
        return int(client.llen(Keys(prefix=settings.key_prefix).dead))


def dead_mark(app: NekroApp) -> Hashable:
    """Return a value that differs when a dead letter has come or gone; blocks.

    Brokers other than Redis report how many there are.

    Raises:
        Exception: an error of the broker's driver, when the broker does not answer.
    """
    settings = app.nekro_settings.broker
    if settings.url is None or not is_redis(settings.url):
        return tuple(figures.waiting for figures in _of_others(app, [DEAD_QUEUE, REFUSED_QUEUE]))
    keys = Keys(prefix=settings.key_prefix)
    with _client(app, settings.url) as client, client.pipeline(transaction=False) as pipe:
        for key in (keys.dead, keys.refused):
            pipe.llen(key)
            # One that came while another one went leaves the length as it was; each may have megabytes.
            pipe.eval(_NEWEST, 1, key)
        return tuple(pipe.execute())


def _of_redis(app: NekroApp, url: str, names: list[str]) -> list[QueueFigures]:
    prefix = app.nekro_settings.broker.key_prefix
    with _client(app, url) as client, client.pipeline(transaction=False) as pipe:
        for name in names:
            pipe.llen(f"{prefix}{name}")
            pipe.get(Keys(prefix=prefix).fair_length(name))
            pipe.lindex(f"{prefix}{name}", -1)  # workers take from this end
            pipe.zcard(f"{prefix}{Keys.unacked(name)['unacked_index_key']}")
        answers: list[Any] = pipe.execute()
    return [
        QueueFigures(
            lane=name,
            waiting=answers[4 * i] + int(answers[4 * i + 1] or 0),
            held=answers[4 * i + 3],
            oldest_seconds=_age_seconds(answers[4 * i + 2]),
        )
        for i, name in enumerate(names)
    ]


def _of_others(app: NekroApp, names: list[str]) -> list[QueueFigures]:
    figures = []
    with app.connection_for_read() as connection:
        for name in names:
            # The broker closes the channel if the queue does not exist.
            with contextlib.suppress(ChannelError), connection.channel() as channel:
                count = channel.queue_declare(name, passive=True).message_count
                figures.append(QueueFigures(lane=name, waiting=int(count)))
    return figures


def _client(app: NekroApp, url: str) -> redis.Redis:
    return RedisEndpoint(app.nekro_settings.broker, url).client()


def _age_seconds(raw: bytes | None) -> float | None:
    """Return the age of a waiting call; None for any other message."""
    if raw is None:
        return None
    try:
        body = stored_body(json.loads(raw))
        issued_at = datetime.fromisoformat(body[0][0]["invocation"]["issued_at"])
        return max(0.0, shared_now() - issued_at.timestamp())
    except (KeyError, IndexError, TypeError, ValueError):
        return None


async def read_broker_clock(
    broker: BrokerSettings, *, host_clock: Callable[[], float] = time.time
) -> Reading | None:
    """Compare this host's clock with that of Redis; None for other brokers, whose clock cannot be read.

    Raises:
        redis.RedisError, OSError: Redis does not answer.
    """
    if broker.url is None or not is_redis(broker.url):
        return None
    link = RedisLink(broker, broker.url)

    async def ask() -> float:
        seconds, microseconds = await link.execute("TIME")
        return int(seconds) + int(microseconds) / 1_000_000

    try:
        return await read_clock(ask, host_clock=host_clock)
    finally:
        link.abort()
