"""A worker takes the messages of its lane from all servers that chats are partitioned over.

Celery's consumer has one connection, to the first server, with control commands, heartbeats and events. For
each further server a ``ServerIntake`` does what else Celery's consumer and hub do: it opens a channel, takes
messages on an event loop (``LoopIntake``), renews and acknowledges them (``DeliveryKeeper``), and requeues
those of lost workers. It passes messages to the consumer's handler. A server that is down does not disturb
the others: what it serves waits until it answers again.

All channels of a worker share its slots (``Slots``), so it takes no more messages than it can run.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Set
from typing import Any, Final

from celery import bootsteps
from loguru import logger

from broker_config.app import NekroApp
from broker_config.keys import DEAD_KEY, DEAD_LIMIT, REFUSED_KEY, REFUSED_LIMIT, Keys
from broker_config.redis_endpoint import RedisEndpoint
from broker_config.redis_library import redis
from nekro.base.loop_thread import LoopThread
from nekro.broker.celery.worker import is_stopping
from nekro.broker.delivery.intake import LoopIntake
from nekro.broker.delivery.leases import keeper_of, running_tasks
from nekro.broker.delivery.transport import Slots
from nekro_agent.durations import CLOSE_STEP_SECONDS, RETRY_SECONDS

__all__ = ["FurtherServers", "FurtherServersStep"]

#: How many times lost deliveries are looked for before dead letters are.
_PASSES_PER_MOVE: Final = 5
#: Most dead letters that are moved at a time.
_MOST_MOVED: Final = 100


class FurtherServers:
    """The intakes of a worker on all servers but the first."""

    def __init__(self, consumer: Any, handle: Callable[[Any], Any]) -> None:
        """Start them.

        Args:
            consumer: the consumer of the first server, which has connected.
            handle: called with each message, on the loop.
        """
        app: NekroApp = consumer.app
        loop = getattr(consumer.pool, "loop", None)
        #: The pool has no loop: its jobs run on threads.
        self._thread = LoopThread("nekro-intakes") if loop is None else None
        if self._thread is not None:
            self._thread.start()
        self.slots = Slots(consumer.max_prefetch_count)
        self._intakes = [
            ServerIntake(one, consumer, handle, loop or self._thread.loop, self.slots)  # type: ignore[union-attr]
            for one in app.servers[1:]
        ]

    def wake(self) -> None:
        """Let the intakes take messages again: there is a free slot."""
        for intake in self._intakes:
            intake.wake()

    def stop(self) -> None:
        """Stop taking messages."""
        for intake in self._intakes:
            intake.stop()

    def close(self, *, running: Set[str]) -> None:
        """Requeue what did not run, and close the connections.

        Args:
            running: see ``DeliveryKeeper.close``.
        """
        for intake in self._intakes:
            intake.close(running=running)
        if self._thread is not None:
            self._thread.stop()


class ServerIntake:
    """Takes the messages of one server; its thread connects and looks after lost deliveries."""

    def __init__(
        self,
        app: NekroApp,
        consumer: Any,
        handle: Callable[[Any], Any],
        loop: asyncio.AbstractEventLoop,
        slots: Slots,
    ) -> None:
        self._app, self._consumer, self._handle = app, consumer, handle
        self._loop, self._slots = loop, slots
        settings = app.nekro_settings
        self._period = settings.broker.visibility_timeout_seconds / 15
        self._channel: Any = None
        self._connection: Any = None
        self._keeper: Any = None
        self._is_lost = False
        self._passes = 0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"nekro-server-{app.server}", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """End the idle pause of the intake, because there is a free slot."""
        if self._channel is not None:
            self._channel.intake.wake()

    def stop(self) -> None:
        """Stop taking messages; those that were claimed are delivered or requeued."""
        self._stopping.set()
        self._thread.join(CLOSE_STEP_SECONDS)
        if self._channel is not None:
            self._channel.intake.stop()

    def close(self, *, running: Set[str]) -> None:
        """Requeue what did not run, and close the connection."""
        self.stop()
        if self._keeper is not None:
            self._keeper.close(running=running)
        if self._connection is not None:
            self._connection.release()

    def _run(self) -> None:
        while not self._stopping.is_set():
            seconds = self._period
            try:
                if self._channel is None:
                    self._open()
                self._look_after(self._channel)
                self._found(is_lost=False)
            except (redis.RedisError, OSError) as exc:
                self._found(is_lost=True, error=str(exc))
                seconds = RETRY_SECONDS
            except Exception:  # only this thread looks after the server
                logger.exception("server_not_served")
            self._stopping.wait(seconds)

    def _found(self, *, is_lost: bool, error: str = "") -> None:
        if is_lost and not self._is_lost:
            logger.bind(server=self._app.server, error=error).error("server_lost")
        elif self._is_lost and not is_lost:
            logger.bind(server=self._app.server).info("server_reached_again")
        self._is_lost = is_lost

    def _open(self) -> None:
        """Connect, and begin to take messages; this is done once, as each part connects again by itself."""
        connection = self._app.connection_for_read()
        try:
            channel = self._consume(connection)
        except BaseException:
            connection.release()
            raise
        self._connection, self._channel = connection, channel
        channel.intake.start()

    def _consume(self, connection: Any) -> Any:
        app, settings = self._app, self._app.nekro_settings
        channel = connection.channel()
        channel.server = app.server
        self._slots.share(channel)
        if self._keeper is None:
            self._keeper = keeper_of(settings.broker, channel)
            self._keeper.start()
        self._keeper.adopt(channel, running=running_tasks(self._consumer))
        channel.intake = LoopIntake(
            channel,
            self._loop,
            keeper=self._keeper,
            settings=settings.broker,
            has_results=settings.results.url == settings.broker.url,
        )
        app.amqp.queues.select([app.lane])
        consumer = app.amqp.TaskConsumer(channel, on_decode_error=self._consumer.on_decode_error)
        consumer.on_message = self._handle
        consumer.qos(prefetch_count=self._slots.count, apply_global=False)
        consumer.consume()
        return channel

    def _look_after(self, channel: Any) -> None:
        channel.qos.restore_visible(num=channel.unacked_restore_limit)
        if self._passes % _PASSES_PER_MOVE == 0:
            with channel.conn_or_acquire() as client:
                has_letters = client.llen(DEAD_KEY) or client.llen(REFUSED_KEY)
            if has_letters:
                self._move_dead_letters()
        self._passes += 1

    def _move_dead_letters(self) -> None:
        """Move dead letters to the first server, where operators look for them, oldest first.

        A letter is there twice if the worker that moves it dies meanwhile; none is lost.
        """
        own, first = self._app.nekro_settings.broker, self._consumer.app.nekro_settings.broker
        keys = Keys(prefix=own.key_prefix)
        with (
            RedisEndpoint(own, own.url).client() as source,
            RedisEndpoint(first, first.url).client() as target,
        ):
            if not source.set(keys.moving, 1, nx=True, px=int(1000 * self._period)):
                return  # another worker moves them
            for key, most in ((keys.dead, DEAD_LIMIT), (keys.refused, REFUSED_LIMIT)):
                letters: Any = source.lrange(key, -_MOST_MOVED, -1)
                for raw in reversed(letters):
                    target.lpush(key, raw)
                    target.ltrim(key, 0, most - 1)
                    source.lrem(key, -1, raw)


class FurtherServersStep(bootsteps.StartStopStep):  # type: ignore[misc]
    """Ends the intakes of further servers with the worker, and not with the connection to the first one."""

    requires = ("celery.worker.consumer.tasks:Tasks",)

    def start(self, c: Any) -> None:
        """Do nothing: the consumer starts them when it has its handler."""

    def stop(self, c: Any) -> None:
        """Stop taking messages if the worker stops."""
        if c.further is not None and is_stopping():
            c.further.stop()

    def shutdown(self, c: Any) -> None:
        """Close the intakes after the pool has drained."""
        if c.further is not None:
            c.further.close(running=running_tasks(c))
            c.further = None
