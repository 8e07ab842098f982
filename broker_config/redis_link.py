"""A connection to Redis on which any number of commands of one event loop are under way at once.

redis-py connects (addresses, TLS, passwords, databases); from then on the connection is a protocol
of the loop: commands are written as they come, replies are handed out in their order. That takes a
fifth of the CPU time of redis-py's asyncio client, which waits for each reply on a stream of its own
(``docs/performance.md``).

Every exchange is bounded and tried once: whoever sends a command decides whether to repeat it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import select
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

import hiredis
import redis

from broker_config.redis_endpoint import RedisEndpoint
from broker_config.redis_errors import NotPrimaryError, error_of_reply
from broker_config.settings import BrokerSettings

__all__ = ["RedisLink", "Script"]

#: A connection that was idle this long is asked whether it still lives before a command is trusted to it.
TRUSTED_SECONDS: Final = 10.0
#: A connection that was heard of this lately is not looked at before a command is sent.
RESTING_SECONDS: Final = 0.001
#: Replies of a server that is not, or not yet, the one to talk to.
_ELSEWHERE: Final = (NotPrimaryError, redis.BusyLoadingError)


class Script:
    """A Lua script, which Redis keeps under its SHA-1 once it has executed it."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.sha = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()


class RedisLink:
    """Executes commands on one connection, made when it is needed and again when it broke."""

    def __init__(
        self,
        broker: BrokerSettings,
        url: str | None,
        *,
        on_message: Callable[[bytes], None] | None = None,
        asks_run_id: bool = False,
    ) -> None:
        """Connects when the first command is sent.

        Args:
            broker: says how to reach the Redis, and the longest silence of it while replies are due.
            url: of the broker or the results.
            on_message: takes what is published on channels that the connection subscribed to; it
                must not raise.
            asks_run_id: ask each new connection which run of a server it leads to; needed for
                ``ends_with_run_id``.
        """
        self._pool = RedisEndpoint(broker, url).loop_pool()
        self._reply_seconds = broker.socket_timeout_seconds
        self._on_message = on_message
        self._asks_run_id = asks_run_id
        self._exchange: _Exchange | None = None
        self._connecting = asyncio.Lock()

    async def execute(self, *command: str | bytes | float, blocks_seconds: float = 0) -> Any:
        """Send one command and return its reply, texts as bytes.

        Args:
            blocks_seconds: how long Redis may take because the command says so (``BLPOP``).

        Raises:
            redis.ConnectionError, redis.TimeoutError: the connection failed, or leads to a replica
                (``NotPrimaryError``); Redis may have executed the command.
            redis.ResponseError: Redis refused it.
        """
        return await self.begin(*command, blocks_seconds=blocks_seconds)

    async def run(
        self,
        script: Script,
        keys: Sequence[str | bytes],
        *values: str | bytes | float,
        ends_with_run_id: bool = False,
    ) -> Any:
        """Execute a script and return its reply; its text is sent to a Redis that does not know it.

        Args:
            ends_with_run_id: append the ``run_id`` of the server that this very connection leads to;
                "" where the server does not say it.

        Raises:
            As ``execute``.
        """
        arguments = (len(keys), *keys, *values)
        try:
            return await self.begin("EVALSHA", script.sha, *arguments, ends_with_run_id=ends_with_run_id)
        except redis.exceptions.NoScriptError:  # it was not executed
            return await self.begin("EVAL", script.text, *arguments, ends_with_run_id=ends_with_run_id)

    def begin(
        self, *command: str | bytes | float, blocks_seconds: float = 0, ends_with_run_id: bool = False
    ) -> Awaitable[Any]:
        """Send one command, at once where the connection stands; await what is returned for its reply.

        Raises:
            As ``execute``, when it is awaited.
        """
        exchange = self._exchange
        if exchange is not None and exchange.is_trusted():
            if ends_with_run_id:
                command = (*command, exchange.run_id)
            return exchange.send(command, blocks_seconds=blocks_seconds)
        return self._connect_and_send(command, blocks_seconds, ends_with_run_id)

    async def connect(self) -> None:
        """Connect where the connection does not stand; when this fails nothing was sent.

        Raises:
            redis.ConnectionError, redis.TimeoutError, OSError: Redis refuses, or does not answer.
        """
        exchange = self._exchange
        if exchange is not None and exchange.has_ended():
            exchange.abort()
        if exchange is None or not exchange.is_trusted():
            await self._connected()

    async def close(self) -> None:
        """Wait for the replies that are due and close the connection."""
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            await exchange.finish()

    def abort(self) -> None:
        """Close the connection; what waits for a reply gets ``redis.ConnectionError``."""
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
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
            if exchange is not None and not exchange.is_trusted():
                with contextlib.suppress(redis.RedisError):
                    await exchange.prove()
            if exchange is None or not exchange.is_open:
                exchange = self._exchange = await self._connect()
            return exchange

    async def _connect(self) -> _Exchange:
        connection: Any = self._pool.make_connection()  # type: ignore[no-untyped-call]
        try:
            await connection.connect()
        except BaseException:  # redis-py leaves it open when it is cancelled
            connection._close()
            raise
        exchange = _Exchange(connection, reply_seconds=self._reply_seconds, on_message=self._on_message)
        transport = connection._writer.transport
        transport.set_protocol(exchange)
        exchange.connection_made(transport)
        if self._asks_run_id:
            try:
                exchange.run_id = _run_id(await exchange.send(("INFO", "server")))
            except redis.ResponseError:  # an ACL may deny it
                pass
            except BaseException:
                exchange.abort()
                raise
        return exchange


def _run_id(info: bytes) -> bytes:
    for line in info.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name == b"run_id":
            return value
    return b""


class _Exchange(asyncio.Protocol):
    """One open connection: what was sent, in order, and who waits for it."""

    def __init__(
        self, connection: Any, *, reply_seconds: float, on_message: Callable[[bytes], None] | None
    ) -> None:
        self._reply_seconds, self._on_message = reply_seconds, on_message
        self._connection = connection  # its writer would close the socket if it was collected
        self._loop = asyncio.get_running_loop()
        self._reader = hiredis.Reader(replyError=error_of_reply, protocolError=redis.InvalidResponse)
        self._due: deque[tuple[asyncio.Future[Any], float, float]] = deque()
        #: Commands that leave together, at the end of the loop's turn.
        self._unsent: list[bytes] = []
        self._heard_at = self._loop.time()
        self._alarm: asyncio.TimerHandle | None = None
        self._transport: Any = None
        self._is_doubted = False
        #: Of the server at the other end; empty when it was not asked or did not say.
        self.run_id = b""

    @property
    def is_open(self) -> bool:
        """Whether commands can be sent."""
        return self._transport is not None

    def is_trusted(self) -> bool:
        """Whether it is open and was heard of lately, or will be soon."""
        if self._is_doubted or not self.is_open:
            return False
        return bool(self._due) or self._loop.time() - self._heard_at < TRUSTED_SECONDS

    def has_ended(self) -> bool:
        """Whether Redis closed a connection that rests and the loop has not seen it yet.

        What is sent then is lost, and whether it was executed cannot be known.
        """
        if self._due or self._transport is None or self._loop.time() - self._heard_at < RESTING_SECONDS:
            return False
        poll = select.poll()
        poll.register(self._transport.get_extra_info("socket").fileno(), select.POLLRDHUP)
        return bool(poll.poll(0))

    async def prove(self) -> None:
        """Ask whether Redis is still there; until it answers nobody trusts the connection."""
        self._is_doubted = True
        try:
            await self.send(("PING",))
        finally:
            self._is_doubted = False

    def send(self, command: tuple[Any, ...], *, blocks_seconds: float = 0) -> asyncio.Future[Any]:
        """Write a command; its reply arrives in the future."""
        reply: asyncio.Future[Any] = self._loop.create_future()
        if self._transport is None:
            reply.set_exception(redis.ConnectionError("the connection to Redis is closed"))
            return reply
        packed = hiredis.pack_command(command)  # may raise, and then no reply is due
        now = self._loop.time()
        is_alone = not self._due
        self._due.append((reply, now, self._reply_seconds + blocks_seconds))
        if self._alarm is None:
            self._alarm = self._loop.call_at(now + self._reply_seconds, self._look_at_clock)
        if is_alone:  # somebody waits for this one, and what else this turn does takes time
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
        """Wait for what is due, then close."""
        self._flush()
        replies = [reply for reply, _, _ in self._due if not reply.done()]
        if replies:
            await asyncio.wait(replies)
        if self._transport is not None:
            self._transport.close()
            self._end(redis.ConnectionError("the connection to Redis is closed"))

    def abort(self) -> None:
        """Close at once."""
        self._break(redis.ConnectionError("the connection to Redis is closed"))

    # What the loop calls.

    def connection_made(self, transport: Any) -> None:
        """Take the transport over."""
        self._transport = transport
        # Whatever is written leaves at once; what can wait is gathered here.
        transport.set_write_buffer_limits(high=0)
        if transport.is_closing():
            self._end(redis.ConnectionError("Redis closed the connection"))

    def data_received(self, data: bytes) -> None:
        """Hand out the replies that are complete."""
        self._heard_at = self._loop.time()
        try:
            self._reader.feed(data)
            while self.is_open and (reply := self._reader.gets()) is not False:
                if self._on_message is not None and type(reply) is list and reply[0] == b"message":
                    self._on_message(reply[2])
                else:
                    self._hand_out(reply)
        except Exception as exc:  # not the protocol of Redis: nothing that follows can be trusted
            self._break(redis.ConnectionError(f"what Redis answered cannot be read: {exc}"))

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell those who wait."""
        reason = "Redis closed the connection" if exc is None else f"the connection to Redis broke: {exc}"
        self._end(redis.ConnectionError(reason))

    def _hand_out(self, reply: Any) -> None:
        waiter, _, _ = self._due.popleft()
        if isinstance(reply, _ELSEWHERE):
            # Later commands on this connection are refused as well; the next one asks for the primary.
            self._break(reply)
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
            # The next in line may have less time than this one.
            soon = self._loop.time() + self._reply_seconds
            self._alarm = self._loop.call_at(min(ends_at, soon), self._look_at_clock)

    def _break(self, error: redis.RedisError) -> None:
        if self._transport is not None:
            self._transport.abort()
        self._end(error)

    def _end(self, error: redis.RedisError) -> None:
        self._transport = None
        self._connection._close()
        if self._alarm is not None:
            self._alarm.cancel()
        while self._due:
            waiter, _, _ = self._due.popleft()
            if not waiter.done():
                waiter.set_exception(type(error)(*error.args))
