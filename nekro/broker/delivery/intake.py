"""Takes messages on the event loop that runs their tasks.

Celery reads messages on its hub's thread. With a pool that runs tasks on an event loop, each message
would move between two threads, which compete for Python's interpreter lock. Here the loop itself waits
for messages, claims them (or gets them by direct delivery) and delivers them, with the protocol of
``nekro.broker.delivery.transport``; the hub handles control commands, heartbeats, events and exceptional
messages. While the hub reconnects, no message is taken and running tasks continue.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import Coroutine, Iterator
from typing import TYPE_CHECKING, Any, Final

from kombu.utils.encoding import bytes_to_str
from loguru import logger

from broker_config.redis_library import redis
from nekro.base.metrics import metrics
from nekro.broker.delivery.handoff import Handoff
from nekro.broker.delivery.leases import RENEW, DeliveryKeeper, ack_of
from nekro.broker.delivery.offers import HANDOFF_SECONDS, Ending
from nekro.broker.delivery.transport import held_keys, seen_key
from nekro.broker.redis.link import BLOCK_SECONDS, RedisLink
from nekro_agent.durations import CLOSE_STEP_SECONDS, RETRY_SECONDS

if TYPE_CHECKING:
    from broker_config.settings import BrokerSettings
    from nekro.broker.delivery.transport import ClaimChannel
from nekro.base.tasks import clean_up_timeout

__all__ = ["LoopIntake"]

#: Larger messages are parsed in steps, between which the loop runs other tasks: parsing a MiB of JSON takes
#: 4 ms, and its body takes the same time again.
LONG_BYTES: Final = 64 << 10


class LoopIntake:
    """Takes the messages of one channel; created on the hub's thread, then used on the loop."""

    def __init__(
        self,
        channel: ClaimChannel,
        loop: asyncio.AbstractEventLoop,
        *,
        keeper: DeliveryKeeper,
        settings: BrokerSettings,
        has_results: bool = False,
    ) -> None:
        """Store the parameters; ``start`` begins to take messages.

        Args:
            has_results: whether results are stored in the broker's Redis.
        """
        self._channel, self._loop, self._keeper, self._settings = channel, loop, keeper, settings
        self._has_results = has_results
        self._is_stopping = False
        self._claims = False
        self._handoff: Handoff | None = None
        self._untaken: list[str] = []
        self._thread: int | None = None
        self._taking: RedisLink
        self._task: asyncio.Task[None] | None = None
        self._idle = asyncio.Event()
        #: Background requests to Redis, awaited only at the end.
        self._side_tasks: set[asyncio.Task[None]] = set()

    # Called on the hub's thread.

    def start(self) -> None:
        """Start taking messages."""
        self._loop.call_soon_threadsafe(self._begin)

    def stop(self) -> None:
        """Stop taking messages; when this returns, every claimed message is delivered or requeued.

        If the loop does not respond within ``CLOSE_STEP_SECONDS``, it stops later, and its claimed messages
        are redelivered when their leases expire. A loop that is closed has stopped.
        """
        if self._is_stopping:
            return
        self._is_stopping = True
        end = self._end()
        try:
            asyncio.run_coroutine_threadsafe(end, self._loop).result(CLOSE_STEP_SECONDS)
        except concurrent.futures.TimeoutError:
            logger.bind(seconds=CLOSE_STEP_SECONDS).warning("intake_not_stopped")
            return
        except RuntimeError:  # a worker that must not wait for calls closes the loop first
            end.close()
        for tag in self._untaken:
            self._give_back(tag)

    # Called on any thread.

    def wake(self) -> None:
        """End the idle pause, because there is a free slot or another queue."""
        if self.is_here():
            self._idle.set()
        else:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._idle.set)

    def is_here(self) -> bool:
        """Whether the calling thread is the loop's."""
        return threading.get_ident() == self._thread

    # Called on the loop's thread.

    def _begin(self) -> None:
        self._thread = threading.get_ident()
        if not self._is_stopping:
            self._task = self._loop.create_task(self._serve(), name="nekro-intake")

    async def _end(self) -> None:
        if self._task is None:
            return
        self._idle.set()
        if not self._claims:
            self._task.cancel()
        await asyncio.wait({self._task})

    async def _serve(self) -> None:
        with contextlib.ExitStack() as stack:
            waiting, taking = stack.enter_context(self._link()), stack.enter_context(self._link())
            self._taking = taking
            self._handoff = Handoff(
                self._channel, settings=self._settings, link=taking, on_message=self._on_handed
            )
            try:
                await self._take_forever(waiting, taking)
            finally:
                await self._close_handoff()
                if self._side_tasks:
                    await asyncio.wait(self._side_tasks)

    async def _take_forever(self, waiting: RedisLink, taking: RedisLink) -> None:
        knows_of_some = True
        while not self._is_stopping:
            queues = self._queues()
            if not queues or self._channel.room() <= 0:
                await self._rest(RETRY_SECONDS)
                continue
            try:
                if self._handoff is not None and not knows_of_some:
                    self._handoff.offer()
                found = None if knows_of_some else await self._wait(waiting, queues)
                if knows_of_some or found is not None or len(queues) > 1:
                    knows_of_some = await self._claim(taking, next_message=found)
                    if not knows_of_some:
                        # Let delivered messages start before the next peek.
                        await asyncio.sleep(0)
            except redis.ResponseError as exc:
                # Usually out of memory: both commands write. It is temporary; the pause prevents a busy loop.
                logger.bind(error=str(exc)).error("messages_refused_by_redis")
                await self._rest(RETRY_SECONDS)
            except (redis.RedisError, OSError) as exc:  # the hub detects it as well
                logger.bind(error=str(exc)).warning("messages_not_claimed")
                await self._rest(RETRY_SECONDS)
            except Exception:  # only this task takes messages
                logger.exception("messages_not_claimed")
                await self._rest(RETRY_SECONDS)

    def _start_side_task(self, exchange: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(exchange)
        self._side_tasks.add(task)
        task.add_done_callback(self._side_tasks.discard)

    @contextlib.contextmanager
    def _link(self) -> Iterator[RedisLink]:
        link = RedisLink(self._settings, self._settings.url)
        try:
            yield link
        finally:
            link.abort()

    def _queues(self) -> list[str]:
        channel = self._channel
        queues: list[str] = channel._queue_cycle.consume(len(channel.active_queues))
        return queues

    async def _rest(self, seconds: float) -> None:
        self._idle.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._idle.wait()

    async def _wait(self, link: RedisLink, queues: list[str]) -> bytes | None:
        """Wait for a message of one queue and return it without claiming it; None when none arrived."""
        command = self._channel.peek_command(queues, BLOCK_SECONDS)
        found: bytes | None = await link.execute(*command, blocks_seconds=float(command[-1]))
        return found

    async def _claim(self, link: RedisLink, *, next_message: bytes | None) -> bool:
        """Claim and deliver messages; returns whether there may be more.

        Args:
            next_message: the message that will be claimed unless another worker is faster; None if not known.
        """
        # Read again: during the wait a queue may have been cancelled, or the slot taken.
        queues, room = self._queues(), await self._room_beside_offer()
        if not queues or room <= 0:
            return True
        self._claims = True
        try:
            claim = link.begin(*self._channel.claim_command(queues, room))
            if next_message is not None:
                await self._read_ahead(next_message)
            answer = await claim
            taken = [answer[i : i + 3] for i in range(0, len(answer), 3)]
            for number, tag, message in taken:
                if len(message) > LONG_BYTES and not self._channel.is_predecoded(message):
                    await self._read_ahead(message)
                self._deliver(queues[number - 1], bytes_to_str(tag), message)
        finally:
            self._claims = False
        return self._channel.may_hold_more(len(taken))

    async def _read_ahead(self, message: bytes) -> None:
        """Parse a message before its delivery; a long one in steps, so that the loop can run other tasks."""
        is_long = len(message) > LONG_BYTES
        self._channel.predecode(message)
        if is_long:
            await asyncio.sleep(0)
        self._channel.predecode_body()
        if is_long:
            await asyncio.sleep(0)

    async def _room_beside_offer(self) -> int:
        """Return how many messages may be claimed; an offered slot is excluded, as it may be taken."""
        room = self._channel.room()
        if self._handoff is None or not self._handoff.is_open:
            return room
        if room > 1:
            return room - 1
        await self._handoff.withdraw()
        return self._channel.room()

    def _on_handed(self, text: bytes) -> None:
        """Accept a directly delivered message, unless it is so old that another worker may have it."""
        raw_tag, raw_queue, message = text.split(b"\n", 2)
        tag, queue = raw_tag.decode(), raw_queue.decode()
        age_seconds = float("inf") if self._handoff is None else self._handoff.taken()
        if self._channel.slots is not None and self._channel.room() <= 0:
            # Messages of other servers took the slot after it was offered; another worker may have one.
            self._start_side_task(asyncio.to_thread(self._give_back, tag))
            return
        if age_seconds < HANDOFF_SECONDS / 2:
            self._keeper.renew_soon(tag)
            self._channel.predecode(message)
            self._channel.predecode_body()
            self._deliver(queue, tag, message)
            return
        self._start_side_task(self._take_if_held(queue, tag, message))

    async def _take_if_held(self, queue: str, tag: str, message: bytes) -> None:
        index, _ = held_keys(self._channel)
        try:
            lost = await self._taking.execute(
                "EVAL", RENEW, 2, index, seen_key(index), float(self._channel.visibility_timeout), tag
            )
        except (redis.RedisError, OSError) as exc:  # it is not renewed, so it is redelivered
            logger.bind(tag=tag, error=str(exc)).warning("delivery_not_confirmed")
            return
        if lost:
            logger.bind(tag=tag).warning("delivery_too_late")
            metrics().leases_lost.labels("delivery").inc()
        else:
            self._deliver(queue, tag, message)

    async def _close_handoff(self) -> None:
        assert self._handoff is not None  # noqa: S101 - set by the caller
        try:
            # The rest of the step is left to what closes after it.
            async with clean_up_timeout(CLOSE_STEP_SECONDS / 2):
                await self._handoff.close()
        except (redis.RedisError, OSError) as exc:  # TimeoutError is an OSError
            logger.bind(error=str(exc)).warning("offer_not_withdrawn")
        finally:
            self._handoff = None

    def ending(self, tag: str) -> Ending | None:
        """Return how storing a delivery's result also ends the delivery; None if Celery acknowledges it."""
        qos, handoff, keeper = self._channel.qos, self._handoff, self._keeper
        if not self._has_results or handoff is None or tag not in qos._delivered or tag in qos._dirty:
            return None
        ack = ack_of(self._channel, tag)
        keeper.ending(ack)
        offer = handoff.next_offer()

        def end(is_stored: bool) -> None:
            keeper.ended(ack, is_done=is_stored)
            if offer is not None:
                handoff.offer_arrived()

        return Ending(ack, offer, end)

    def _deliver(self, queue: str, tag: str, message: bytes) -> None:
        if self._is_stopping:
            self._untaken.append(tag)
            return
        if queue not in self._channel.active_queues:  # cancelled during the claim
            self._give_back(tag)
            return
        try:
            self._channel._take(queue, tag, message)
        except (redis.RedisError, OSError) as exc:
            logger.bind(tag=tag, error=str(exc)).warning("delivery_requeued")
            self._channel.qos.reject(tag, requeue=True)

    # Called on either thread.

    def _give_back(self, tag: str) -> None:
        try:
            self._channel.qos.restore_by_tag(tag)
        except (redis.RedisError, OSError) as exc:
            # It is not renewed, so it is redelivered when its lease expires.
            logger.bind(tag=tag, error=str(exc)).warning("delivery_not_requeued")
