"""A worker's consumer that accepts only signed messages and answers the callers of refused ones.

Every delivery passes ``nekro.broker.celery.tasks`` before Celery reads it. Celery itself drops a message
that it cannot decode, so that its caller waits forever, and writes the message's content to the log. Here a
refused message is logged by name and size only, kept for the operator (``nekro dead``) and, if it names a
caller, answered with an error.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from celery import signals
from celery.app.task import Context
from celery.exceptions import NotRegistered
from celery.worker import state
from celery.worker.consumer import Consumer
from kombu.transport import redis
from loguru import logger

from broker_config.app import NekroApp
from broker_config.keys import is_caller_id
from nekro.base.metrics import metrics
from nekro.broker.celery.further_servers import FurtherServers
from nekro.broker.celery.tasks import MAX_ID_CHARS, admit
from nekro.broker.celery.worker import is_stopping
from nekro.broker.delivery.connection import publish_dead
from nekro.broker.delivery.intake import LoopIntake
from nekro.broker.delivery.leases import DeliveryKeeper
from nekro.broker.delivery.transport import LOST, ClaimChannel, deliveries, server_of
from nekro_agent.durations import FRESH_SECONDS, REFRESH_SECONDS
from nekro_agent.errors import MessageRefusedError, NekroError, OutcomeUnknownError, StorageError

__all__ = ["AnsweringConsumer"]


class AnsweringConsumer(Consumer):  # type: ignore[misc]
    """Celery's consumer with admission and answers; configured by ``worker_consumer``."""

    _is_flush_due = False
    _hub_thread = 0
    _intake: LoopIntake | None = None
    _ending: ThreadPoolExecutor | None = None
    #: The intakes of the other servers that chats are partitioned over; None without partitions.
    further: FurtherServers | None = None

    def create_task_handler(self, *args: Any, **kwargs: Any) -> Callable[[Any], Any]:
        """Return the handler of deliveries: Celery's own, protected against messages that would stop it."""
        self._is_flush_due = False  # a lost connection discarded the hub's scheduled calls
        handle = super().create_task_handler(*args, **kwargs)
        limit = self.app.nekro_settings.broker.max_deliveries
        self._hub_thread = threading.get_ident()
        if self.hub is not None and isinstance(self.task_consumer.channel, redis.Channel):
            self.hub.call_repeatedly(FRESH_SECONDS, self._look_for_watchers)
        self._start_intake()

        def on_task_received(message: Any) -> Any:
            if threading.get_ident() == self._hub_thread:
                return on_any(message)
            try:
                admit(message, self.app.task_seal)
            except Exception as exc:  # bodies and headers of any shape
                return self._refuse_on_thread(message, exc)
            if deliveries(message.headers) < limit and self._is_ordinary(message):
                return self._guarded(self._begin, message)
            return self.hub.call_soon(on_hub, message)

        def on_hub(message: Any) -> None:
            # If its channel was lost meanwhile, the message is delivered again.
            if self._is_connected(message):
                on_admitted(message)

        def on_any(message: Any) -> Any:
            try:
                admit(message, self.app.task_seal)
            except Exception as exc:  # bodies and headers of any shape
                return self.on_refused(message, exc)
            return on_admitted(message)

        def on_admitted(message: Any) -> Any:
            if deliveries(message.headers) >= limit:
                return self.on_poison(message)
            return self._guarded(handle, message)

        self._start_further(on_task_received)
        return on_task_received

    def _start_further(self, handle: Callable[[Any], Any]) -> None:
        """Take messages from the other servers too; a lost connection to the first one does not end that."""
        if len(self.app.servers) == 1:
            return
        if self.further is None and not is_stopping():
            self.further = FurtherServers(self, handle)
        if self.further is not None and isinstance(self.task_consumer.channel, ClaimChannel):
            self.further.slots.share(self.task_consumer.channel)

    def _is_connected(self, message: Any) -> bool:
        """Whether the channel that delivered a message is in use."""
        if server_of(message):
            return True  # it stays, and connects again by itself
        return self.task_consumer is not None and message.channel is self.task_consumer.channel

    def _start_intake(self) -> None:
        """Let the pool's event loop consume the messages, if the pool has one."""
        channel, loop = self.task_consumer.channel, getattr(self.pool, "loop", None)
        settings = self.app.nekro_settings
        if loop is None or not isinstance(channel, ClaimChannel):
            return
        if not isinstance(channel.keeper, DeliveryKeeper):
            return
        self._intake = channel.intake = LoopIntake(
            channel,
            loop,
            keeper=channel.keeper,
            settings=settings.broker,
            has_results=settings.results.url in (None, settings.broker.url),
        )
        self._intake.start()

    def _is_ordinary(self, message: Any) -> bool:
        """Whether an admitted message can be passed to the pool without any of Celery's special handling."""
        headers = message.headers
        return (
            headers["task"] in self.strategies
            and self.task_buckets[headers["task"]] is None  # no rate limit
            and headers["id"] not in state.revoked
            # After a lost connection Celery counts finished tasks until it has restored the prefetch count.
            and (self._maximum_prefetch_restored or not self.restart_count or server_of(message) > 0)
        )

    def _guarded(self, take: Callable[[Any], Any], message: Any) -> Any:
        """Handle a message so that nothing in it can stop the worker."""
        try:
            return take(message)
        except LOST:
            raise
        except Exception as exc:  # not of the shape that Celery expects
            return self.on_invalid_task(None, message, exc)

    def _begin(self, message: Any) -> None:
        """Pass an ordinary message to the pool, without the special cases of Celery's handler."""
        self.strategies[message.headers["task"]](
            message,
            None,
            _Ending(self, message, is_rejection=False),
            _Ending(self, message, is_rejection=True),
            self.on_task_message,
        )

    def on_close(self) -> None:
        """Stop taking messages first, because the connection is lost."""
        if self._intake is not None:
            self._intake.stop()
        super().on_close()

    def call_soon_ack(self, p: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Acknowledge on the thread that the task ended on, if a lease keeper sends acknowledgements.

        Celery passes acknowledgements to the hub. The hub is blocked while it reconnects, and a
        task that ends meanwhile would count as not executed.
        """
        if self.further is not None:
            return self._ack_beside_others(p, *args, **kwargs)
        channel = self.task_consumer.channel if self.task_consumer else None
        if not isinstance(channel, ClaimChannel) or self.hub is None:
            return super().call_soon_ack(p, *args, **kwargs)
        was_full = not channel.qos.can_consume()
        p(*args, **kwargs)
        if was_full and self._intake is not None:
            self._intake.wake()
        elif was_full:
            self.hub.call_soon(_wake_up)  # the hub had stopped asking for messages and may ask again
        return None

    def _ack_beside_others(self, p: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Acknowledge as above, on any server, and let all intakes have the slot."""
        assert self.further is not None  # noqa: S101 - checked by the caller
        was_full = self.further.slots.left() <= 0
        p(*args, **kwargs)
        if not was_full:
            return
        self.further.wake()
        if self._intake is not None:
            self._intake.wake()
        elif self.hub is not None:
            self.hub.call_soon(_wake_up)

    def on_send_event_buffered(self) -> None:
        """Schedule the publication of task events; called on the thread that sent one."""
        if self.hub and not self._is_flush_due:
            self._is_flush_due = True
            self.hub.call_soon(self._plan_flush)

    def _look_for_watchers(self) -> None:
        """Send events only while a queue is bound to them; kombu drops bindings of dead consumers."""
        if self.event_dispatcher is None or self.task_consumer is None:
            return
        try:
            bound = self.task_consumer.channel.get_table(self.app.conf.event_exchange)
        except LOST:  # the hub detects it itself
            return
        self.event_dispatcher.is_watched = bool(bound)

    def _plan_flush(self) -> None:
        self.hub.call_later(REFRESH_SECONDS, self._flush_buffered)

    def _flush_buffered(self) -> None:
        self._is_flush_due = False
        self._flush_events()

    def on_poison(self, message: Any) -> None:
        """Answer a task that reached the maximum number of deliveries as its row says, else dead-letter it.

        It may have ended, and each time its worker or Redis failed before the acknowledgement.
        """
        if isinstance(message.channel, ClaimChannel):
            self._on_thread(self._end_poison, message)
        else:  # the channel belongs to this thread
            self._end_poison(message)

    def _end_poison(self, message: Any) -> None:
        end = self._recorded_end(message)
        if end is None:
            self._dead_letter(message)
        else:
            message.ack_log_error(logger, self.connection_errors)
            self._answer(message, end)

    def _recorded_end(self, message: Any) -> dict[str, Any] | NekroError | None:
        """Return how a recorded task ended; None if it has not ended, or the database does not answer."""
        app: NekroApp = self.app
        if app.recorded_end is None:
            return None
        task_id, name = message.headers["id"], message.headers["task"]
        try:
            (argument,) = message.payload[0]
            return app.recorded_end(name, task_id, argument)
        except (StorageError, ValueError) as exc:
            logger.bind(call_id=task_id, error=str(exc)).warning("call_in_doubt")
            return None

    def _dead_letter(self, message: Any) -> None:
        count = deliveries(message.headers)
        _log("poisonous", message, None)
        self._set_aside(message)
        message.reject_log_error(logger, self.connection_errors)
        self._answer(
            message,
            OutcomeUnknownError(
                f"{count} workers took the call and none finished it; it was dead-lettered (`nekro dead`)"
            ),
        )

    def _refuse_on_thread(self, message: Any, exc: Exception) -> None:
        self._on_thread(self.on_refused, message, exc)

    def _on_thread(self, end: Callable[..., None], message: Any, *args: Any) -> None:
        """End a message on a separate thread: the pool's loop must not wait for Redis or the database.

        The hub is not used: it may run only once a second, and many refused messages would delay others.
        """
        if self._ending is None:
            self._ending = ThreadPoolExecutor(1, thread_name_prefix="nekro-refuse")
        self._ending.submit(self._end, end, message, *args)

    def _end(self, end: Callable[..., None], message: Any, *args: Any) -> None:
        try:
            end(message, *args)
        except Exception as lost:  # not acknowledged, so it is redelivered
            logger.bind(error=str(lost)).warning("refused_message_not_dead_lettered")
        if self._intake is not None:
            self._intake.wake()

    def on_refused(self, message: Any, exc: Exception) -> None:
        """Dead-letter a message without executing it, and answer its caller.

        Nothing else is written for a message without a caller.
        """
        _log("refused", message, exc)
        reason = str(exc) if isinstance(exc, MessageRefusedError) else "message refused: it cannot be decoded"
        self._set_aside(message, refused=reason)
        message.reject_log_error(logger, self.connection_errors)
        signals.task_rejected.send(sender=self, message=message, exc=exc)
        if is_caller_id((message.properties or {}).get("reply_to")):
            self._answer(message, MessageRefusedError(reason))

    def _set_aside(self, message: Any, *, refused: str | None = None) -> None:
        """Dead-letter a message, for ``nekro dead``.

        Args:
            refused: why it was refused; None for a valid message that no worker finished.
        """
        channel = message.channel
        if isinstance(channel, ClaimChannel):
            raw = json.dumps(message._raw)
            with channel.conn_or_acquire() as client, client.pipeline() as pipe:
                if refused is None:
                    channel.bury(raw, pipe)
                else:
                    channel.bury_refused(raw, refused, pipe)
                pipe.execute()
            return
        publish_dead(channel, message, refused=refused)

    def on_decode_error(self, message: Any, exc: Exception) -> None:
        """Refuse a message that kombu cannot decode; drop a broadcast."""
        if self._is_connected(message):
            if threading.get_ident() == self._hub_thread:
                self.on_refused(message, exc)
            else:
                self._refuse_on_thread(message, exc)
            return
        _log("undecodable", message, exc)
        message.ack()

    def on_invalid_task(self, body: Any, message: Any, exc: Exception) -> None:
        """Refuse an admitted message that Celery cannot handle."""
        _log("invalid", message, exc)
        message.reject_log_error(logger, self.connection_errors)
        signals.task_rejected.send(sender=self, message=message, exc=exc)
        self._answer(message, MessageRefusedError(f"message refused: {type(exc).__name__}"))

    def on_unknown_task(self, body: Any, message: Any, exc: Exception) -> None:
        """Answer a task that this worker does not have, or hand it back if the worker may have it soon.

        A task may be registered already: the hub takes it up later (``serve_new_tasks``).
        """
        if self.app.awaits_plugins() or message.headers["task"] in self.app.tasks:
            self.hub.call_soon(self.hub.call_later, REFRESH_SECONDS, self._hand_back, message)
            return
        name = message.headers["task"]
        _log("unregistered", message, None)
        message.reject_log_error(logger, self.connection_errors)
        self._answer(message, NotRegistered(name))
        task_id = message.headers.get("id")
        if self.event_dispatcher and task_id:
            self.event_dispatcher.send("task-failed", uuid=task_id, exception=f"NotRegistered({name!r})")
        signals.task_unknown.send(sender=self, message=message, exc=exc, name=name, id=task_id)

    def _hand_back(self, message: Any) -> None:
        message.reject_log_error(logger, self.connection_errors, requeue=True)

    def _answer(self, message: Any, end: Exception | dict[str, Any]) -> None:
        """Store how a message ended, for its caller: the error, or what the call returned."""
        server = server_of(message)
        if server and asyncio._get_running_loop() is not None:  # the hub may wait for the first server
            self._on_thread(self._answer, message, end)
            return
        if self._intake is not None and self._intake.is_here():  # storing would block the tasks' event loop
            self.hub.call_soon(self._answer, message, end)
            return
        headers = message.headers if isinstance(message.headers, dict) else {}
        task_id, name = headers.get("id"), headers.get("task")
        reply_to = (message.properties or {}).get("reply_to")
        if not isinstance(task_id, str) or not 0 < len(task_id) <= MAX_ID_CHARS:
            return
        request = Context(id=task_id, task=name, reply_to=reply_to, errbacks=None, chord=None, group=None)
        backend = self.app.servers[server].backend
        try:
            if isinstance(end, Exception):
                backend.mark_as_failure(task_id, end, request=request)
            else:
                backend.mark_as_done(task_id, end, request=request)
        except Exception:  # the caller has a deadline, and the consumer must continue
            logger.bind(task_id=task_id).exception("caller_not_answered")


class _Ending:
    """Callback that acknowledges or rejects a message; each held message has one of either kind."""

    __slots__ = ("_consumer", "_is_rejection", "_message")

    def __init__(self, consumer: AnsweringConsumer, message: Any, *, is_rejection: bool) -> None:
        self._consumer, self._message, self._is_rejection = consumer, message, is_rejection

    def __call__(self, *args: Any) -> None:
        message = self._message
        end = message.reject_log_error if self._is_rejection else message.ack_log_error
        self._consumer.call_soon_ack(end, *args)


def _wake_up() -> None:
    """Do nothing on the hub, which makes its loop iterate once more."""


def _log(kind: str, message: Any, exc: Exception | None) -> None:
    metrics().messages_refused.labels(kind).inc()
    headers = message.headers if isinstance(message.headers, dict) else {}
    logger.bind(
        kind=kind,
        task=str(headers.get("task"))[:200],
        task_id=str(headers.get("id"))[:64],
        content_type=message.content_type,
        bytes=len(message.body or b""),
        reason=type(exc).__name__ if exc else kind,
    ).error("message_refused")
