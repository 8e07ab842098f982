"""Publishes task messages to the broker from an event loop, without blocking it and in bounded time."""

from __future__ import annotations

import asyncio
import base64
import os
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, Final, Protocol
from uuid import uuid4

from loguru import logger

from broker_config.keys import Keys
from broker_config.redis_library import redis
from broker_config.settings import BrokerSettings
from broker_config.urls import is_redis, without_password
from nekro.base.deadlines import TimeLimits
from nekro.broker.delivery.fair_queue import FAIR_PUT
from nekro.broker.delivery.offers import HAND
from nekro.broker.program_calls import MARKED, MARKS_SECONDS, ProgramCall, Sent
from nekro.broker.redis.link import RedisLink, Script
from nekro.broker.redis.losses import EPOCH, LOOK, Epoch, Place
from nekro.broker.redis.subscription import MAX_PUBLISHED_BYTES
from nekro.wire import plain_json
from nekro_agent.durations import FRESH_SECONDS, POLL_SECONDS, PUBLISH_SECONDS
from nekro_agent.errors import BrokerUnavailableError, OverloadedError

if TYPE_CHECKING:
    from celery import Celery
    from kombu import Connection
    from kombu.entity import Queue

__all__ = [
    "IS_SERVED",
    "KombuPublisher",
    "NotServedError",
    "PipelinePublisher",
    "PublishUnknownError",
    "Publisher",
    "make_publisher",
    "stored_body",
    "unavailable",
]

#: Adds a message to a queue that is not full, or delivers it directly to an idle worker, and numbers it.
#: Behind another message it waits for the turn of its plugin and chat (``FAIR_PUT``), if workers take those.
#: A call of a program that has a mark (``nekro.broker.program_calls``) is not added again.
#: KEYS: queue (list), epoch (hash, see ``nekro.broker.redis.losses``), offers (sorted set), seen (hash, see
#: ``nekro.broker.delivery.transport``), marks of the program (hash). ARGV: message, maximum queue
#: length (0: no limit), unique id, maximum length of a direct delivery (0: none), plugin, chat, lease of a
#: delivery in seconds, call id or "", note, lifetime of marks in seconds, run id of the server.
#: Returns {name of the epoch, number of the message}, with a third element if the call had a mark, or nil
#: when the queue is full.
PUSH: Final = Script(f"""{HAND}{EPOCH}{FAIR_PUT}{MARKED}
local function are_fair(seen, lease)
    local at = redis.call('HGET', seen, 'fair')
    return at and redis.call('TIME')[1] - at < lease
end
local earlier = marked(KEYS[5], ARGV[8])
if earlier then return earlier end
local most, waiting = tonumber(ARGV[2]), redis.call('LLEN', KEYS[1])
local behind = waiting > 0 and tonumber(redis.call('GET', KEYS[1] .. ':fair_length') or 0) or 0
if most > 0 and waiting + behind >= most then return nil end
local word = epoch(KEYS[2], ARGV[11], ARGV[3])[1]
local number = redis.call('HINCRBY', KEYS[2], 'last', 1)
if waiting > 0 and are_fair(KEYS[4], tonumber(ARGV[7])) then
    fair_put(KEYS[1], ARGV[5], ARGV[6], ARGV[1])
elseif waiting > 0 or #ARGV[1] > tonumber(ARGV[4]) or not hand(KEYS[3], ARGV[3], ARGV[1]) then
    redis.call('LPUSH', KEYS[1], ARGV[1])
end
mark(KEYS[5], ARGV[8], word, number, ARGV[9], ARGV[10])
return {{word, number}}
""")

#: Lua function ``is_served(seen, lease)``: whether a worker has reached Redis recently for a lane
#: (see ``LOOK`` in ``nekro.broker.delivery.transport``).
_SERVED: Final = """
local function is_served(seen, lease)
    local at = redis.call('HGET', seen, 'at')
    return at and redis.call('TIME')[1] - at < lease
end
"""
#: Returns 1 if workers serve a lane here, else 0. KEYS: seen. ARGV: lease of a delivery in seconds.
IS_SERVED: Final = Script(f"{_SERVED}return is_served(KEYS[1], tonumber(ARGV[1])) and 1 or 0\n")
#: ``PUSH`` on a server that workers may not know yet, or any more: returns 0 if none serves the lane here.
PUSH_SERVED: Final = Script(
    f"{_SERVED}if not is_served(KEYS[4], tonumber(ARGV[7])) then return 0 end\n{PUSH.text}"
)

#: The owners of messages of no call.
_NOBODY: Final = ("", "")

#: Unique ids; generating each randomly would cost a system call.
_unique = map(f"{uuid4()}.{{}}".format, count())


def _begin_ids() -> None:
    global _unique
    _unique = map(f"{uuid4()}.{{}}".format, count())


os.register_at_fork(after_in_child=_begin_ids)


class PublishUnknownError(BrokerUnavailableError):
    """A message was sent and the reply did not arrive, so the broker may have it."""


class NotServedError(BrokerUnavailableError):
    """No worker serves the lane on this server of a partition; the message is not in its queue."""


class Publisher(Protocol):
    """Publishes messages of Celery's protocol 2, as ``nekro.broker.delivery.messages`` builds them."""

    #: The connection to the Redis that keeps the marks of programs with the messages; None: the broker keeps
    #: none.
    marks: RedisLink | None

    async def send(
        self,
        message: Any,
        *,
        queue: str,
        may_repeat: bool,
        owners: tuple[str, str] = _NOBODY,
        program: ProgramCall | None = None,
    ) -> Sent:
        """Add a message to a queue; durable brokers do not tell its place.

        Args:
            program: the call is marked, unless the broker keeps no marks; None: it is of no program.
            owners: plugin and chat between which turns change (``fair_queue.owners_of``).
            may_repeat: whether a duplicate is harmless. If it is not, the message is not sent again
                after the connection broke before the broker's reply.

        Raises:
            BrokerUnavailableError: the broker does not answer; the message is not in the queue.
            PublishUnknownError: the broker does not answer; the message may be in the queue.
            OverloadedError: the queue is full; the message is not in it.
            NotServedError: the server is a further one, and no worker serves the lane there.
        """
        ...

    async def epoch(self) -> Epoch | None:
        """Return the broker's epoch, which shows the messages it still has; None for durable brokers.

        Raises:
            BrokerUnavailableError: the broker does not answer.
        """
        ...

    async def close(self) -> None:
        """Send pending messages and close the connection."""
        ...


def make_publisher(
    app: Callable[[], Celery], settings: BrokerSettings, *, is_further: bool = False
) -> Publisher:
    """Return the fastest publisher for the broker: pipelines for Redis, otherwise kombu on a thread.

    Args:
        app: returns the application, which Redis does not need.
        is_further: whether it is a further server of a partition, which workers may not serve.
    """
    assert settings.url is not None  # noqa: S101 - checked when the app was built
    if is_redis(settings.url):
        return PipelinePublisher(settings, is_further=is_further)
    return KombuPublisher(app(), settings)


def unavailable(url: str | None, exc: BaseException, *, is_sent: bool = False) -> BrokerUnavailableError:
    """Return the error for a broker that does not answer.

    Args:
        is_sent: whether the broker may have executed the request.
    """
    reason = str(exc) or type(exc).__name__
    kind = PublishUnknownError if is_sent else BrokerUnavailableError
    return kind(
        f"broker {without_password(url or '')} is unavailable: {reason}; "
        "check that it runs (`nekro doctor`), or NEKRO_BROKER__URL"
    )


@dataclass(slots=True)
class _Attempt:
    """Progress of a request to Redis."""

    #: Whether Redis may have executed it.
    is_sent: bool = False
    #: Why there is no connection; None when there is one, or the first one is being made.
    refusal: redis.TimeoutError | None = None


class PipelinePublisher:
    """Publishes to Redis in kombu's message format; no message waits for the reply to another.

    For a direct queue, kombu's own producer sends one LPUSH of one JSON object; this class
    sends the same object (a test compares the two) on the event loop itself.
    """

    def __init__(self, settings: BrokerSettings, *, is_further: bool = False) -> None:
        assert settings.url is not None  # noqa: S101 - checked when the app was built
        self._push = PUSH_SERVED if is_further else PUSH
        self._url, self._prefix, self._longest = settings.url, settings.key_prefix, settings.max_queued
        self._lease_seconds = settings.visibility_timeout_seconds
        self._keys = Keys(prefix=settings.key_prefix)
        self._link = RedisLink(settings, settings.url)
        self.marks: RedisLink | None = self._link
        self._limits = TimeLimits()

    async def send(
        self,
        message: Any,
        *,
        queue: str,
        may_repeat: bool,
        owners: tuple[str, str] = _NOBODY,
        program: ProgramCall | None = None,
    ) -> Sent:
        """Add a message to a queue; see ``Publisher``."""
        key, payload = f"{self._prefix}{queue}", encode_message(message, queue=queue)
        # Redis checks the permission for each key, also one that the script does not use.
        marks = self._keys.program("" if program is None else program.program_id)
        keys = (key, self._keys.epoch, self._keys.offers(queue), self._keys.seen(queue), marks)
        mark = ("", "") if program is None else (program.call_id, program.note)
        values = (
            payload,
            self._longest,
            next(_unique),
            MAX_PUBLISHED_BYTES,
            *owners,
            self._lease_seconds,
            *mark,
            MARKS_SECONDS,
        )
        reply = await self._bounded(
            lambda: self._link.run(self._push, keys, *values, ends_with_run_id=True), may_repeat=may_repeat
        )
        if reply is None:
            raise _full(queue, self._longest)
        if reply == 0:
            raise NotServedError(f"no worker serves {queue} on broker {without_password(self._url)}")
        word, number, *repeated = reply
        return Sent(Place(word.decode(), number), bool(repeated))

    async def epoch(self) -> Epoch | None:
        """Return the epoch of Redis; see ``Publisher``."""
        keys, word = (self._keys.epoch,), next(_unique)
        reply = await self._bounded(
            lambda: self._link.run(LOOK, keys, word, ends_with_run_id=True), may_repeat=True
        )
        return Epoch.of_reply(reply)

    async def _bounded(self, ask: Callable[[], Awaitable[Any]], *, may_repeat: bool) -> Any:
        attempt = _Attempt()
        try:
            with self._limits.of(PUBLISH_SECONDS):
                return await self._send_with_retries(ask, attempt, may_repeat=may_repeat)
        except (redis.RedisError, OSError) as exc:
            raise unavailable(self._url, attempt.refusal or exc, is_sent=attempt.is_sent) from exc

    async def _send_with_retries(
        self, ask: Callable[[], Awaitable[Any]], attempt: _Attempt, *, may_repeat: bool
    ) -> Any:
        """Send a request; retry while a restarting Redis breaks or refuses the connection."""
        # A quarter covers the restart of a broker; the rest is for the last attempt.
        give_up_at = time.monotonic() + PUBLISH_SECONDS / 4
        while True:
            try:
                await self._connect(attempt)
                attempt.is_sent = True
                return await ask()
            except (ConnectionError, redis.RedisError) as exc:
                if isinstance(exc, redis.ResponseError | redis.exceptions.BusyLoadingError):
                    attempt.is_sent = False  # Redis refused to execute it
                is_final = attempt.is_sent and not may_repeat
                if is_final or not _is_stale(exc) or time.monotonic() > give_up_at:
                    raise
            await asyncio.sleep(POLL_SECONDS)

    async def _connect(self, attempt: _Attempt) -> None:
        """Connect, and again when that took too long: nothing was sent, and the request has its own limit.

        The limit of one connection runs on while this process has no processor or its loop is busy, so it
        may pass although Redis answered at once.
        """
        while True:
            try:
                await self._link.connect()
            except redis.TimeoutError as exc:
                attempt.refusal = exc
                await asyncio.sleep(POLL_SECONDS)
            else:
                attempt.refusal = None
                return

    async def close(self) -> None:
        """Send pending messages and close the connection."""
        await self._link.close()
        self._limits.close()


def stored_body(entry: Any) -> Any:
    """Read the body of a message as it lies in a queue of Redis, written by ``encode_message`` or by kombu.

    Raises:
        KeyError, TypeError, ValueError: it is not such a message.
    """
    body = entry["body"]
    if entry["properties"].get("body_encoding") == "base64":
        body = base64.b64decode(body)
    return plain_json.load(body)


def encode_message(message: Any, *, queue: str) -> bytes:
    """Encode a task message as kombu's virtual transports do, for a queue of the default exchange."""
    properties = {
        **message.properties,
        "delivery_mode": 2,
        "delivery_info": {"exchange": "", "routing_key": queue},
        "priority": 0,
        "body_encoding": "utf-8",
        "delivery_tag": next(_unique),
    }
    return plain_json.dump(
        {
            "body": plain_json.dump(message.body).decode(),
            "content-encoding": "utf-8",
            "content-type": "application/json",
            "headers": message.headers,
            "properties": properties,
        }
    )


def _full(queue: str, longest: int) -> OverloadedError:
    return OverloadedError(
        f"{longest} calls already wait in queue {queue}, the limit of a queue; try again later, or start "
        "more workers"
    )


def _is_stale(exc: BaseException) -> bool:
    """Whether a connection broke, as opposed to a server that does not respond or refuses a command."""
    return isinstance(exc, redis.ConnectionError | ConnectionError) and not isinstance(exc, TimeoutError)


class _Ticket:
    """One message for the publishing thread: the thread begins to send it, or its caller gives up before."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_given_up = self._is_begun = False

    @property
    def is_given_up(self) -> bool:
        """Whether the caller has stopped waiting."""
        return self._is_given_up

    def begin(self) -> bool:
        """Begin to send, on the publishing thread; False if the caller has given up."""
        with self._lock:
            self._is_begun = not self._is_given_up
            return self._is_begun

    def give_up(self) -> bool:
        """Stop waiting; returns whether the broker may have the message, or get it."""
        with self._lock:
            self._is_given_up = True
            return self._is_begun


@dataclass
class _Room:
    """Estimate of how many more messages a queue accepts."""

    left: int = 0
    asked_at: float = float("-inf")


class KombuPublisher:
    """Publishes through kombu, on one thread with its own connection; for brokers other than Redis."""

    def __init__(self, app: Celery, settings: BrokerSettings) -> None:
        self._app, self._url, self._longest = app, settings.url, settings.max_queued
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="nekro-publish")
        self._connection: Any = None
        self._producer: Any = None
        self._rooms: dict[str, _Room] = {}
        self.marks: RedisLink | None = None

    async def send(
        self,
        message: Any,
        *,
        queue: str,
        may_repeat: bool,
        owners: tuple[str, str] = _NOBODY,
        program: ProgramCall | None = None,
    ) -> Sent:
        """Add a message to a queue; see ``Publisher``. kombu repeats by its policy what may be repeated."""
        from kombu.exceptions import OperationalError

        ticket = _Ticket()
        work = partial(self._publish, message, queue, ticket, may_repeat=may_repeat)
        sending = asyncio.get_running_loop().run_in_executor(self._executor, work)
        try:
            async with asyncio.timeout(PUBLISH_SECONDS):
                await asyncio.shield(sending)
        except (OperationalError, OSError) as exc:  # TimeoutError is an OSError
            raise unavailable(self._url, exc, is_sent=ticket.give_up()) from exc
        finally:  # also if the caller is cancelled
            ticket.give_up()
            sending.add_done_callback(_consume_exception)
        return Sent(None)

    async def epoch(self) -> Epoch | None:
        """Return None: losses of the broker are not detected."""
        return None

    async def close(self) -> None:
        """Send pending messages and close the connection; waits for the broker are limited."""
        loop = asyncio.get_running_loop()
        try:
            await loop.run_in_executor(self._executor, self._disconnect)
        finally:
            self._executor.shutdown(wait=False)

    def _publish(self, message: Any, name: str, ticket: _Ticket, *, may_repeat: bool) -> None:
        from broker_config.topology import sending_queue

        if ticket.is_given_up:
            return
        queue = sending_queue(self._app, name)
        with self._translated_errors():
            self._prepare(queue)
            # The broker may have answered after the caller got the error that nothing is sent.
            if ticket.begin():
                self._app.amqp.send_task_message(
                    self._producer, message.headers["task"], message, queue=queue, retry=may_repeat
                )

    def _prepare(self, queue: Queue) -> None:
        """Connect if necessary, and check the room; nothing is sent, so a broken connection is replaced."""
        if self._connection is not None:
            try:
                self._make_room(queue)
            except self._connection.recoverable_connection_errors as exc:
                if isinstance(exc, TimeoutError):  # it is not broken; the broker does not answer
                    raise
                self._disconnect()
            else:
                return
        self._connection = self._app.connection_for_write()
        self._producer = self._app.amqp.Producer(self._connection, auto_declare=False)
        self._make_room(queue)

    @contextmanager
    def _translated_errors(self) -> Iterator[None]:
        """Close the connection after an error, and raise one of the broker as OperationalError."""
        from kombu.exceptions import OperationalError

        try:
            yield
        except OverloadedError:
            raise
        except Exception as exc:
            kinds = () if self._connection is None else _errors_of(self._connection)
            self._disconnect()
            if isinstance(exc, kinds):
                raise OperationalError(str(exc) or type(exc).__name__) from exc
            raise

    def _make_room(self, queue: Queue) -> None:
        """Connect, and check the length of a queue: once a second, and when the queue may be full."""
        from broker_config.topology import count_waiting

        room, now = self._rooms.setdefault(queue.name, _Room()), time.monotonic()
        if self._longest and (room.left <= 0 or now - room.asked_at > FRESH_SECONDS):
            room.left, room.asked_at = self._longest - count_waiting(queue, self._producer.channel), now
            if room.left <= 0:
                raise _full(queue.name, self._longest)
        _ = self._producer.channel  # connects if necessary
        room.left -= 1

    def _disconnect(self) -> None:
        connection, self._connection, self._producer = self._connection, None, None
        if connection is not None:
            try:
                connection.release()
            except Exception:  # the connection is broken anyway
                logger.opt(exception=True).debug("broken_connection_not_closed")


def _errors_of(connection: Connection) -> tuple[type[Exception], ...]:
    """Return the errors of a driver whose broker does not answer or refuses."""
    return (
        *connection.connection_errors,
        *connection.recoverable_connection_errors,
        *connection.channel_errors,
    )


def _consume_exception(future: asyncio.Future[Any]) -> None:
    if not future.cancelled():
        future.exception()
