"""A connection to Redis that pipelines the commands of one event loop.

redis-py connects (addresses, TLS, passwords, databases); then the connection is an asyncio protocol:
commands are written as they come, and replies are assigned in order. That takes a fifth of the CPU time
of redis-py's asyncio client, which waits for each reply on a stream of its own (``docs/performance.md``).

Every command has a time limit and is sent once; the caller decides whether to repeat it. A connection that
is idle or may lead to a server that was replaced is not asked whether it works: an answer would not tell
whose it is. The next command goes over a new connection, to the present primary.
"""

from __future__ import annotations

import asyncio
import hashlib
import select
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

import hiredis
from loguru import logger

from broker_config.primaries import NotPrimaryError, Primary, error_of_reply
from broker_config.redis_endpoint import RedisEndpoint, info_of_reply
from broker_config.redis_library import redis
from broker_config.settings import BrokerSettings

__all__ = ["RedisLink", "Script"]

#: Time limit of one blocking command: a broken connection is noticed when its answer is late.
BLOCK_SECONDS: Final = 1.0
#: A connection that was idle this long is replaced before a command is sent: firewalls drop idle connections
#: after minutes, and its server may have been replaced meanwhile.
TRUSTED_SECONDS: Final = 10.0
#: A connection that received data this recently is not checked before a command is sent, for speed.
RESTING_SECONDS: Final = 0.001
#: Error replies of a server that is not the primary, or is not ready yet.
_ELSEWHERE: Final = (NotPrimaryError, redis.BusyLoadingError)


class Script:
    """A Lua script, which Redis caches under its SHA-1 after the first execution."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.sha = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()


class RedisLink:
    """Executes commands on one connection, opened on demand and reopened after a failure."""

    def __init__(
        self,
        broker: BrokerSettings,
        url: str | None,
        *,
        on_message: Callable[[bytes], None] | None = None,
    ) -> None:
        """Store the parameters; the first command connects.

        Args:
            broker: connection settings, and the time limit for replies (``socket_timeout_seconds``).
            url: URL of the broker or the results.
            on_message: called with each message on channels that the connection subscribed to; its errors
                are logged.
        """
        endpoint = RedisEndpoint(broker, url)
        self._pool = endpoint.loop_pool()
        #: What this process knows about the server that the connection should reach.
        self.primary = endpoint.primary
        self._reply_seconds = broker.socket_timeout_seconds
        self._on_message = on_message
        self._exchange: _Exchange | None = None
        #: All that are open: the current one, and retired ones with pending replies.
        self._open: set[_Exchange] = set()
        #: How often the link was closed.
        self._closings = 0
        self._connecting = asyncio.Lock()

    async def execute(self, *command: str | bytes | float, blocks_seconds: float = 0) -> Any:
        """Send one command and return its reply, with strings as bytes.

        Args:
            blocks_seconds: how long the command itself may block (``BLPOP``).

        Raises:
            redis.ConnectionError, redis.TimeoutError: the connection failed, or the server is a replica
                (``NotPrimaryError``); Redis may have executed the command.
            redis.ResponseError: Redis refused the command.
        """
        return await self.begin(*command, blocks_seconds=blocks_seconds)

    async def run(
        self,
        script: Script,
        keys: Sequence[str | bytes],
        *values: str | bytes | float,
        ends_with_run_id: bool = False,
    ) -> Any:
        """Execute a script and return its reply; its text is sent only if Redis has not cached it.

        Args:
            ends_with_run_id: append the ``run_id`` of the connection's server as the last argument;
                "" if the server does not report it.

        Raises:
            The errors of ``execute``.
        """
        arguments = (len(keys), *keys, *values)
        try:
            return await self.begin("EVALSHA", script.sha, *arguments, ends_with_run_id=ends_with_run_id)
        except redis.exceptions.NoScriptError:  # it was not executed
            return await self.begin("EVAL", script.text, *arguments, ends_with_run_id=ends_with_run_id)

    def begin(
        self, *command: str | bytes | float, blocks_seconds: float = 0, ends_with_run_id: bool = False
    ) -> Awaitable[Any]:
        """Send one command, immediately if the connection is open; await the returned object for its reply.

        Raises:
            The errors of ``execute``, when the object is awaited.
        """
        exchange = self._exchange
        if exchange is not None and exchange.is_trusted():
            if ends_with_run_id:
                command = (*command, exchange.run_id)
            return exchange.send(command, blocks_seconds=blocks_seconds)
        return self._connect_and_send(command, blocks_seconds, ends_with_run_id)

    async def connect(self) -> None:
        """Connect if the connection is not open; if this fails, nothing was sent.

        Raises:
            redis.ConnectionError, redis.TimeoutError, OSError: Redis refuses, or does not answer.
        """
        exchange = self._exchange
        if exchange is not None and exchange.has_ended():
            exchange.abort()
        if exchange is None or not exchange.is_trusted():
            await self._connected()

    def doubt(self) -> None:
        """Send later commands over a new connection: a reply shows that this server may be a replaced one."""
        if self._exchange is not None:
            self._exchange.doubt()

    async def close(self) -> None:
        """Wait for pending replies and close the connection, also if the wait is cancelled."""
        self._exchange = None
        self._closings += 1
        closing = tuple(self._open)
        try:
            for exchange in closing:
                await exchange.finish()
        finally:
            for exchange in closing:
                exchange.abort()

    def abort(self) -> None:
        """Close the connection; pending commands fail with ``redis.ConnectionError``."""
        self._exchange = None
        self._closings += 1
        for exchange in tuple(self._open):
            exchange.abort()

    async def _connect_and_send(
        self, command: tuple[Any, ...], blocks_seconds: float, ends_with_run_id: bool
    ) -> Any:
        exchange = await self._connected()
        if ends_with_run_id:
            command = (*command, exchange.run_id)
        return await exchange.send(command, blocks_seconds=blocks_seconds)

    async def _connected(self) -> _Exchange:
        async with self._connecting:
            exchange = self._exchange
            if exchange is None or not exchange.is_trusted():
                if exchange is not None:
                    exchange.retire()
                exchange = self._exchange = await self._connect()
            return exchange

    async def _connect(self) -> _Exchange:
        term, closings = self.primary.term, self._closings
        connection: Any = self._pool.make_connection()  # type: ignore[no-untyped-call]
        try:
            await connection.connect()
        except BaseException:  # redis-py leaves the connection open when it is cancelled
            if connection._writer is not None:
                connection._writer.transport.abort()
            connection._close()
            raise
        exchange = _Exchange(
            connection,
            self.primary,
            term,
            reply_seconds=self._reply_seconds,
            on_message=self._on_message,
            on_end=self._open.discard,
        )
        self._open.add(exchange)
        transport = connection._writer.transport
        transport.set_protocol(exchange)
        exchange.connection_made(transport)
        try:
            await exchange.identify()
            if self._closings != closings:
                raise redis.ConnectionError("the link to Redis was closed while it connected")
        except BaseException:
            exchange.abort()
            raise
        return exchange


class _Exchange(asyncio.Protocol):
    """One open connection, with the futures of pending replies in order."""

    def __init__(
        self,
        connection: Any,
        primary: Primary,
        term: int,
        *,
        reply_seconds: float,
        on_message: Callable[[bytes], None] | None,
        on_end: Callable[[_Exchange], None],
    ) -> None:
        self._primary, self._term = primary, term
        self._reply_seconds, self._on_message, self._on_end = reply_seconds, on_message, on_end
        self._connection = connection  # referenced, because its writer closes the socket when collected
        self._loop = asyncio.get_running_loop()
        self._reader = hiredis.Reader(replyError=error_of_reply, protocolError=redis.InvalidResponse)
        self._due: deque[tuple[asyncio.Future[Any], float, float]] = deque()
        #: Commands that are written together at the end of the loop's iteration.
        self._unsent: list[bytes] = []
        self._heard_at = self._loop.time()
        self._alarm: asyncio.TimerHandle | None = None
        self._transport: Any = None
        self._is_doubted = self._is_retired = False
        #: Run id of the server; empty if it is not reported.
        self.run_id = ""

    @property
    def is_open(self) -> bool:
        """Whether commands can be sent."""
        return self._transport is not None

    def is_trusted(self) -> bool:
        """Whether it leads to the primary, is open and has received data recently, or has replies pending."""
        if self._term != self._primary.term or self._is_doubted or not self.is_open:
            return False
        return bool(self._due) or self._loop.time() - self._heard_at < TRUSTED_SECONDS

    def has_ended(self) -> bool:
        """Whether Redis closed the idle connection and the loop has not noticed it yet.

        A command sent in this state is lost, and whether it was executed cannot be determined.
        """
        if self._due or self._transport is None or self._loop.time() - self._heard_at < RESTING_SECONDS:
            return False
        poll = select.poll()
        poll.register(self._transport.get_extra_info("socket").fileno(), select.POLLRDHUP)
        return bool(poll.poll(0))

    async def identify(self) -> None:
        """Ask the server who it is.

        Raises:
            redis.ConnectionError, redis.TimeoutError: it does not answer, or is a replica.
        """
        try:
            info = info_of_reply(await self.send(("INFO",)))
        except redis.ResponseError:  # an ACL may deny it
            info = {}
        self._term = self._primary.met(info, self._term)
        self.run_id = info.get("run_id", "")

    def doubt(self) -> None:
        """Trust the connection no more."""
        self._is_doubted = True

    def retire(self) -> None:
        """Close as soon as no reply is pending."""
        self._is_retired = True
        if not self._due:
            self.abort()

    def send(self, command: tuple[Any, ...], *, blocks_seconds: float = 0) -> asyncio.Future[Any]:
        """Write a command; its reply arrives in the future."""
        reply: asyncio.Future[Any] = self._loop.create_future()
        if self._transport is None:
            reply.set_exception(redis.ConnectionError("the connection to Redis is closed"))
            return reply
        packed = hiredis.pack_command(command)  # if this raises, no reply is pending
        now = self._loop.time()
        is_alone = not self._due
        self._due.append((reply, now, self._reply_seconds + blocks_seconds))
        if self._alarm is None:
            self._alarm = self._loop.call_at(now + self._reply_seconds, self._look_at_clock)
        if is_alone:  # send without waiting for the end of the loop's iteration
            self._transport.write(packed)
            return reply
        if not self._unsent:
            self._loop.call_soon(self._flush)
        self._unsent.append(packed)
        return reply

    def _flush(self) -> None:
        unsent, self._unsent = self._unsent, []
        if unsent and self._transport is not None:
            self._transport.write(b"".join(unsent))

    async def finish(self) -> None:
        """Wait for pending replies, then close.

        Without the exchange that ends a TLS connection: it would take longer than most loops last.
        """
        self._flush()
        replies = [reply for reply, _, _ in self._due if not reply.done()]
        if replies:
            await asyncio.wait(replies)
        self.abort()

    def abort(self) -> None:
        """Close immediately."""
        self._break(redis.ConnectionError("the connection to Redis is closed"))

    # Methods of asyncio.Protocol, called by the loop.

    def connection_made(self, transport: Any) -> None:
        """Keep the transport of the new connection."""
        self._transport = transport
        # Written data is sent immediately; commands that can wait are collected in ``_unsent``.
        transport.set_write_buffer_limits(high=0)
        if transport.is_closing():
            self._end(redis.ConnectionError("Redis closed the connection"))

    def data_received(self, data: bytes) -> None:
        """Assign complete replies to their futures."""
        self._heard_at = self._loop.time()
        try:
            self._reader.feed(data)
            while self.is_open and (reply := self._reader.gets()) is not False:
                if self._on_message is not None and type(reply) is list and reply[0] == b"message":
                    self._deliver(self._on_message, reply)
                else:
                    self._hand_out(reply)
            if self._is_retired and not self._due and self.is_open:
                self.abort()
        except Exception as exc:  # a protocol error: the rest of the stream cannot be interpreted
            self._break(redis.ConnectionError(f"the reply of Redis cannot be parsed: {exc}"))

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail pending commands."""
        reason = "Redis closed the connection" if exc is None else f"the connection to Redis broke: {exc}"
        self._end(redis.ConnectionError(reason))

    def _deliver(self, on_message: Callable[[bytes], None], published: list[bytes]) -> None:
        _, channel, message = published
        try:
            on_message(message)
        except Exception:  # later messages must still be handled
            logger.bind(channel=channel.decode()).exception("message_not_handled")

    def _hand_out(self, reply: Any) -> None:
        waiter, _, _ = self._due.popleft()
        if isinstance(reply, _ELSEWHERE):
            # This server would refuse later commands too; the next connection looks up the primary.
            self._break(reply)
            if isinstance(reply, NotPrimaryError):
                self._primary.left(self._term)
        if waiter.done():
            return  # cancelled
        if not isinstance(reply, Exception):
            waiter.set_result(reply)
            return
        waiter.set_exception(reply)

    def _look_at_clock(self) -> None:
        self._alarm = None
        if not self._due:
            return
        _, sent_at, silence_seconds = self._due[0]
        ends_at = max(sent_at, self._heard_at) + silence_seconds
        if self._loop.time() >= ends_at:
            self._break(redis.TimeoutError(f"Redis did not answer within {silence_seconds:g} s"))
        else:
            # The next pending command may have a shorter time limit.
            soon = self._loop.time() + self._reply_seconds
            self._alarm = self._loop.call_at(min(ends_at, soon), self._look_at_clock)

    def _break(self, error: redis.RedisError) -> None:
        if self._transport is not None:
            self._transport.abort()
        self._end(error)

    def _end(self, error: redis.RedisError) -> None:
        self._transport = None
        self._on_end(self)
        self._connection._close()
        if self._alarm is not None:
            self._alarm.cancel()
        while self._due:
            waiter, _, _ = self._due.popleft()
            if not waiter.done():
                waiter.set_exception(type(error)(*error.args))
