"""Renews the leases of a worker's deliveries and acknowledges them, on a separate thread.

A delivery belongs to its worker for the visibility timeout. The keeper renews the lease while the
task runs, so the timeout can be short (a dead worker's tasks are redelivered soon) although tasks
are long. It also sends the acknowledgements: in batches, repeated until Redis has accepted them, and
never on the worker's hub, which must not block. The exception is a stored success, whose script
acknowledges its delivery (``nekro.broker.delivery.offers``).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence, Set
from typing import Any, Final

from celery import bootsteps
from celery.worker import state
from loguru import logger

from broker_config.primaries import Primary
from broker_config.redis_endpoint import RedisEndpoint
from broker_config.redis_library import redis
from broker_config.settings import BrokerSettings
from nekro.base.metrics import metrics
from nekro.broker.delivery.offers import HANDOFF_SECONDS, Ack
from nekro.broker.delivery.transport import LOOK, LOST, ClaimChannel, held_keys, seen_key
from nekro.broker.redis.losses import Repeats
from nekro_agent.durations import CLOSE_STEP_SECONDS, GRACE_SECONDS, RETRY_SECONDS

__all__ = [
    "RENEW",
    "DeliveryKeeper",
    "LeaseStep",
    "ack_commands",
    "ack_of",
    "keeper_of",
    "running_tasks",
]

#: Renewals per lease duration.
RENEWALS_PER_TIMEOUT: Final = 3
#: How long acknowledgements are collected; if the worker dies meanwhile, these tasks run again.
ACK_SECONDS: Final = 0.01
#: Number of acknowledgements that are sent without waiting for more.
MAX_ACKS: Final = 256

#: Renews leases. KEYS: index, seen (see ``LOOK``). ARGV: lease duration in seconds, tags. Returns the tags
#: that are no longer held.
RENEW: Final = f"""{LOOK}
local now = look(KEYS[2], tonumber(ARGV[1]))
local score, lost = now + ARGV[1], {{}}
for i = 2, #ARGV do
    local tag = ARGV[i]
    if redis.call('ZSCORE', KEYS[1], tag) then
        redis.call('ZADD', KEYS[1], score, tag)
    else
        lost[#lost + 1] = tag
    end
end
return lost
"""


def ack_of(channel: ClaimChannel, tag: str) -> Ack:
    """Return the keys and the tag that are needed to acknowledge a delivery."""
    return (*held_keys(channel), tag)


def ack_commands(acks: Iterable[Ack]) -> list[tuple[str, ...]]:
    """Return the commands that acknowledge deliveries, in an order that is safe to interrupt.

    A worker may be killed between two commands. A lease without a message is removed when it expires,
    but a message without a lease would never be found.
    """
    by_keys: dict[tuple[str, str], list[str]] = {}
    for index, held, tag in acks:
        by_keys.setdefault((index, held), []).append(tag)
    return [
        command
        for (index, held), tags in by_keys.items()
        for command in (("HDEL", held, *tags), ("ZREM", index, *tags))
    ]


class DeliveryKeeper:
    """Renews and acknowledges the deliveries of one worker process."""

    def __init__(self, client: redis.Redis, primary: Primary, *, visibility_timeout_seconds: float) -> None:
        self._client = client
        self._repeats: Repeats[Ack] = Repeats(primary, self._write)
        self._lease_seconds = visibility_timeout_seconds
        self._period = visibility_timeout_seconds / RENEWALS_PER_TIMEOUT
        self._channels: list[ClaimChannel] = []
        self._acks: list[Ack] = []
        self._under_way: set[Ack] = set()
        #: Acknowledged together with their results; Celery's own acknowledgement of them is ignored.
        self._ended: set[Ack] = set()
        self._since: dict[str, float] = {}
        self._lost: set[str] = set()
        #: Used directly for each message that need not wait, because entering the condition is slower.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._is_closing = False
        self._renew_at = time.monotonic() + self._period
        #: Tags of deliveries with short leases, and when these are renewed; None if there are none.
        self._brief: set[str] = set()
        self._brief_at: float | None = None
        self._thread = threading.Thread(target=self._run, name="nekro-leases", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def adopt(self, channel: ClaimChannel, *, running: Set[str]) -> None:
        """Renew and acknowledge a channel's deliveries from now on.

        Deliveries of earlier channels whose task is not running are requeued, because Celery drops
        them when it reconnects.

        Args:
            running: ids of the tasks that have started and not ended.
        """
        channel.keeper = self
        with self._changed:
            earlier = [known for known in self._channels if known is not channel]
            self._channels = [*earlier, channel]
        for known in earlier:
            self._give_back(known, running=running)

    def acknowledge(self, channel: ClaimChannel, tag: str) -> None:
        """Acknowledge a delivery in Redis soon, with retries; thread-safe."""
        ack = ack_of(channel, tag)
        with self._lock:
            if ack in self._ended:
                self._ended.discard(ack)
                self._forget([ack])
                return
            self._acks.append(ack)
            if len(self._acks) in (1, MAX_ACKS):
                self._changed.notify()

    def ending(self, ack: Ack) -> None:
        """Record that a script is acknowledging a delivery; call ``ended`` after it."""
        with self._lock:
            self._under_way.add(ack)

    def ended(self, ack: Ack, *, is_done: bool) -> None:
        """Record the outcome; if ``is_done`` is False, the delivery must still be acknowledged."""
        with self._lock:
            self._under_way.discard(ack)
            if is_done:
                self._ended.add(ack)

    def renew_soon(self, tag: str) -> None:
        """Renew a delivery with a short lease within about a second, if it is still held then."""
        with self._lock:
            self._brief.add(tag)
            if self._brief_at is None:
                # Well before the short lease ends, with time for a repetition.
                self._brief_at = time.monotonic() + min(self._period, HANDOFF_SECONDS / 5)
                self._changed.notify()

    def close(self, *, running: Set[str]) -> None:
        """Send the last acknowledgements, requeue deliveries that were not executed, end the thread.

        Args:
            running: ids of tasks that did not stop. Their leases are left to expire: if they were
                requeued, the tasks would start elsewhere before this process has ended.
        """
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join(CLOSE_STEP_SECONDS)
        for channel in self._channels:
            self._give_back(channel, running=running)
        self._client.close()

    def _give_back(self, channel: ClaimChannel, *, running: Set[str]) -> None:
        count = 0
        for tag, message in channel.qos.held().items():
            if message.headers.get("id") in running:
                continue
            try:
                channel.qos.restore_by_tag(tag)
            except LOST as exc:
                logger.bind(error=str(exc)).warning("deliveries_not_requeued")
                return
            channel.qos._quick_ack(tag)
            self._since.pop(tag, None)
            count += 1
        if count:
            logger.bind(count=count).info("deliveries_requeued")

    def _run(self) -> None:
        give_up_at: float | None = None
        while True:
            with self._changed:
                if not self._acks and not self._is_closing:
                    self._changed.wait(max(0.0, self._next_renewal() - time.monotonic()))
                if self._acks and not self._is_closing:
                    # Waking the thread for each acknowledgement would take interpreter time from the tasks.
                    self._changed.wait_for(self._is_due, ACK_SECONDS)
                acks, self._acks, closing = self._acks, [], self._is_closing
            if closing and give_up_at is None:
                give_up_at = time.monotonic() + CLOSE_STEP_SECONDS
            try:
                self._send(acks)
                if time.monotonic() >= self._next_renewal():
                    self._renew_due()
            except Exception as exc:
                if not isinstance(exc, redis.RedisError | OSError):
                    logger.exception("leases_not_renewed")  # only this thread renews
                with self._changed:
                    self._acks = acks + self._acks
                if give_up_at is not None and time.monotonic() > give_up_at:
                    logger.bind(count=len(self._acks)).warning("tasks_not_acknowledged")
                    return
                time.sleep(RETRY_SECONDS)
                continue
            if closing and not self._acks:
                return

    def _is_due(self) -> bool:
        return self._is_closing or len(self._acks) >= MAX_ACKS

    def _send(self, acks: list[Ack]) -> None:
        if not acks:
            return
        term = self._repeats.term
        if not self._write(acks):  # as for renewals
            self._client.connection_pool.disconnect()
            self._write(acks)
        for ack in acks:
            self._repeats.add(ack, size=sum(map(len, ack)), term=term)
        self._forget(acks)

    def _write(self, acks: Sequence[Ack]) -> bool:
        """Acknowledge deliveries; returns whether the server had all of them."""
        commands = ack_commands(acks)
        with self._client.pipeline(transaction=False) as pipe:
            for command in commands:
                pipe.execute_command(*command)  # type: ignore[no-untyped-call]
            removed = pipe.execute()
        return bool(sum(removed[::2]) == len(set(acks)))

    def _forget(self, acks: list[Ack]) -> None:
        for _, _, tag in acks:
            self._since.pop(tag, None)
            self._lost.discard(tag)

    def _next_renewal(self) -> float:
        return self._renew_at if self._brief_at is None else min(self._renew_at, self._brief_at)

    def _renew_due(self) -> None:
        """Renew all leases, or only the short ones if nothing else is due."""
        now = time.monotonic()
        with self._changed:
            brief, self._brief, self._brief_at = self._brief, set(), None
        try:
            self._renew(only=brief if now < self._renew_at else None)
        except BaseException:
            with self._changed:
                self._brief |= brief
                self._brief_at = now
            raise
        if now >= self._renew_at:
            self._renew_at = now + self._period

    def _renew(self, *, only: Set[str] | None) -> None:
        """Renew leases.

        Args:
            only: tags; None means all held deliveries.
        """
        with self._changed:
            channels = list(self._channels)
        for channel in channels:
            held = channel.qos.held()
            if not held and channel.closed:
                with self._changed:
                    self._channels.remove(channel)
                channel._disconnect_pools()
                continue
            tags = [
                tag
                for tag, message in held.items()
                if (only is None or tag in only) and self._may_renew(tag, message)
            ]
            if only is not None and not tags:
                continue
            # Also without tags: the regular calls of workers reveal when Redis was unreachable.
            key, _ = held_keys(channel)
            lost = self._ask_renewal(key, tags)
            if lost:  # the server may not be the one that delivered them
                self._client.connection_pool.disconnect()
                lost = self._ask_renewal(key, tags)
            # Deliveries that were acknowledged during the call are no longer held, but not lost.
            held = channel.qos.held()
            for tag in ({raw.decode() for raw in lost} & held.keys()) - self._lost - self._acknowledged():
                # Restored while this process was suspended or disconnected: another worker has it.
                logger.bind(tag=tag, task_id=held[tag].headers.get("id")).error("delivery_lease_lost")
                metrics().leases_lost.labels("delivery").inc()
                self._lost.add(tag)

    def _ask_renewal(self, key: str, tags: Sequence[str]) -> list[bytes]:
        lost: Any = self._client.eval(RENEW, 2, key, seen_key(key), str(self._lease_seconds), *tags)
        found: list[bytes] = lost
        return found

    def _acknowledged(self) -> set[str]:
        with self._changed:
            return {tag for _, _, tag in (*self._acks, *self._under_way, *self._ended)}

    def _may_renew(self, tag: str, message: Any) -> bool:
        """Whether a delivery is within its task's hard time limit; a hung worker must not keep it."""
        begin = self._since.setdefault(tag, time.monotonic())
        limits = message.headers.get("timelimit") or (None, None)
        hard = limits[0]
        return not isinstance(hard, int | float) or time.monotonic() - begin < hard + 6 * GRACE_SECONDS


def keeper_of(settings: BrokerSettings, channel: ClaimChannel) -> DeliveryKeeper:
    """Return a keeper for the channels of a server; start it."""
    endpoint = RedisEndpoint(settings, settings.url)
    reply_seconds = min(settings.socket_timeout_seconds, channel.visibility_timeout / 6)
    return DeliveryKeeper(
        endpoint.client(reply_seconds=reply_seconds),
        endpoint.primary,
        visibility_timeout_seconds=channel.visibility_timeout,
    )


class LeaseStep(bootsteps.StartStopStep):  # type: ignore[misc]
    """Runs a keeper alongside a worker's consumer; does nothing on other transports."""

    requires = ("celery.worker.consumer.tasks:Tasks",)

    def __init__(self, consumer: Any, **options: Any) -> None:
        super().__init__(consumer, **options)
        self._keeper: DeliveryKeeper | None = None

    def start(self, c: Any) -> None:
        """Adopt the consumer's new channel, at start and after each lost connection."""
        channel = c.task_consumer.channel
        if not isinstance(channel, ClaimChannel):
            return
        if self._keeper is None:
            self._keeper = keeper_of(c.app.nekro_settings.broker, channel)
            self._keeper.start()
        self._keeper.adopt(channel, running=running_tasks(c))

    def stop(self, c: Any) -> None:
        """Requeue claims in flight after a lost connection or at shutdown; running tasks keep leases."""
        channel = c.task_consumer.channel if c.task_consumer else None
        if isinstance(channel, ClaimChannel):
            channel.give_back_unread()

    def shutdown(self, c: Any) -> None:
        """Close the keeper after the pool has drained: deliveries that are still held were not executed."""
        if self._keeper is not None:
            self._keeper.close(running=running_tasks(c))
            self._keeper = None


def running_tasks(consumer: Any) -> set[str]:
    """Return the ids of running tasks; our own pool knows more exactly than Celery which have started."""
    ids = getattr(consumer.pool, "running_ids", None)
    return {request.id for request in state.active_requests} if ids is None else ids()
