"""kombu's Redis transport with an atomic claim, so that messages are neither lost nor executed twice.

Stock kombu pops a message and then records it as unacknowledged; a worker that dies in between loses it.
When a connection breaks, stock kombu requeues the messages of tasks that are still running, so they run
twice. Here:

- A consumer waits with ``BLMOVE q q``, which moves the last message to the position it already has, and
  then claims: one script pops messages and records them, up to the number of free slots.
- Each delivery has a unique tag, so a worker can detect that another worker has its message.
- A lost connection requeues nothing. ``nekro.broker.delivery.leases`` renews held deliveries and requeues
  those whose tasks were not started.
- A message that cannot be read goes to the dead list; no message stops a worker.
- If tasks run on an event loop, that loop takes the messages (``nekro.broker.delivery.intake``) and this
  connection only checks that Redis is reachable.

It is written for kombu 5.7, whose private names it overrides. It needs Redis 6.2.
"""

from __future__ import annotations

import json
import os
from functools import cache, partial
from itertools import count
from queue import Empty
from time import monotonic
from typing import TYPE_CHECKING, Any, Final, Protocol
from uuid import uuid4

from kombu.transport import redis as stock
from kombu.transport import virtual
from kombu.utils.encoding import bytes_to_str
from kombu.utils.json import dumps, loads
from loguru import logger

from broker_config.keys import DEAD_KEY, DEAD_LIMIT, MAX_REFUSED_BYTES, REFUSED_KEY, REFUSED_LIMIT
from broker_config.redis_library import redis
from nekro.broker.delivery.fair_queue import FAIR_TAKE
from nekro.wire import plain_json
from nekro_agent.durations import POLL_SECONDS, RETRY_SECONDS

if TYPE_CHECKING:
    from broker_config.redis_endpoint import RedisEndpoint
    from nekro.broker.delivery.offers import Ending

__all__ = [
    "COMPRESSED_TYPE",
    "DELIVERIES_HEADER",
    "SERVER_HEADER",
    "ClaimChannel",
    "ClaimTransport",
    "Slots",
    "held_keys",
    "holder",
    "seen_key",
    "server_of",
    "uncompressed",
]

#: Header that counts how often a message was delivered without being acknowledged.
DELIVERIES_HEADER: Final = "x-nekro-deliveries"
#: Header that a worker sets on messages of further servers: place of the server that has the result.
SERVER_HEADER: Final = "x_nekro_server"
#: Maximum number of messages per claim, so that a worker does not take all while another is idle.
MAX_CLAIM: Final = 16
#: How often a channel pings Redis if an event loop takes its messages.
PING_SECONDS: Final = 5.0
#: Maximum number of deliveries requeued in one pass.
MAX_RESTORE: Final = 100

#: Pops messages and records them as held, atomically; the next ones (``FAIR_TAKE``) follow into the queue.
#: KEYS: index (sorted set: tag → expiry of its lease), held (hash: tag → message), then the queues
#: (lists). ARGV: lease duration in seconds, the queues' names as JSON strings (one per queue), then one tag
#: per message that may be taken. The expiry is stored, so workers may use different lease durations.
#: Returns {queue number, tag, message, …}. A held message has kombu's format,
#: ``[message, exchange, routing key]``, with the default exchange and its queue.
CLAIM: Final = f"""{FAIR_TAKE}
local now = redis.call('TIME')
local score = now[1] + now[2] / 1000000 + ARGV[1]
local queues = #KEYS - 2
local taken, tag = {{}}, queues + 2
for q = 1, queues do
    local has_more = redis.call('EXISTS', KEYS[q + 2] .. ':fair') == 1
    while tag <= #ARGV do
        local message = redis.call('RPOP', KEYS[q + 2])
        if has_more then
            message = message or fair_take(KEYS[q + 2])
            fair_move(KEYS[q + 2])
        end
        if not message then break end
        redis.call('ZADD', KEYS[1], score, ARGV[tag])
        redis.call('HSET', KEYS[2], ARGV[tag], '[' .. message .. ', "", ' .. ARGV[q + 1] .. ']')
        taken[#taken + 1] = q
        taken[#taken + 1] = ARGV[tag]
        taken[#taken + 1] = message
        tag = tag + 1
    end
end
return taken
"""

#: Lua function ``look(seen, lease)``: records that a worker reached Redis. Returns the time of Redis, and
#: whether an expired lease proves that its holder is gone. It does not prove that after Redis or the network
#: was down for so long that holders could not renew: workers call this three times per lease duration, so a
#: gap of 0.4 durations indicates an outage, and holders then get half a duration to renew. ``seen`` is a
#: hash: ``at``, time of the last call; ``trust_from``, expired leases count again after this time; ``fair``,
#: as ``at``, of workers with claims by ``FAIR_TAKE`` (those of 0.2.0 do not).
LOOK: Final = """
local function look(seen, lease)
    local time = redis.call('TIME')
    local now = time[1] + time[2] / 1000000
    local at = tonumber(redis.call('HGET', seen, 'at') or now)
    if now - at > 0.4 * lease then redis.call('HSET', seen, 'trust_from', now + 0.5 * lease) end
    redis.call('HSET', seen, 'at', now, 'fair', now)
    return now, now >= tonumber(redis.call('HGET', seen, 'trust_from') or 0)
end
"""
#: Returns the tags of expired leases. KEYS: index, seen. ARGV: lease duration in seconds, maximum count.
ENDED: Final = f"""{LOOK}
local now, is_trusted = look(KEYS[2], tonumber(ARGV[1]))
if not is_trusted then return {{}} end
return redis.call('ZRANGEBYSCORE', KEYS[1], 0, now, 'LIMIT', 0, ARGV[2])
"""

#: Content type given to compressed messages; no consumer accepts it.
COMPRESSED_TYPE: Final = "application/x-compressed"

#: Errors of a lost connection; kombu's own list also contains KeyError.
LOST: Final = (redis.ConnectionError, redis.TimeoutError, OSError)

#: Key of the decoded body in a message that was parsed ahead; no field of a message has this name.
_DECODED: Final = "nekro decoded"


class Keeper(Protocol):
    """Sends acknowledgements for the channel; see ``nekro.broker.delivery.leases``."""

    def acknowledge(self, channel: ClaimChannel, tag: str) -> None:
        """Acknowledge a delivery in Redis soon, with retries."""
        ...


class ChannelIntake(Protocol):
    """Takes messages instead of the channel; see ``nekro.broker.delivery.intake``."""

    def stop(self) -> None:
        """Stop taking messages; when this returns, every claimed message is delivered or requeued."""
        ...

    def ending(self, tag: str) -> Ending | None:
        """Return how storing a delivery's result also ends the delivery; None if Celery acknowledges it."""
        ...


class Slots:
    """The slots of a worker that takes messages of several servers, each on a channel of its own."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._channels: list[ClaimChannel] = []

    def share(self, channel: ClaimChannel) -> None:
        """Let a channel take messages only for slots that the others leave."""
        channel.slots = self
        # Of a lost connection, tasks may still run.
        self._channels = [one for one in self._channels if not one.closed or one.qos.held()] + [channel]

    def left(self) -> int:
        """Return how many slots are free."""
        return self.count - sum(len(one.qos._delivered) - len(one.qos._dirty) for one in self._channels)


class ClaimQoS(stock.QoS):  # type: ignore[misc]
    """Tracks the held messages of a channel."""

    def can_consume(self) -> bool:
        """Whether there is a free slot."""
        slots = self.channel.slots
        return bool(super().can_consume() and (slots is None or slots.left() > 0))

    def can_consume_max_estimate(self) -> int | None:
        """Return the number of free slots; None: there is no limit."""
        slots: Slots | None = self.channel.slots
        room: int | None = super().can_consume_max_estimate()
        return room if slots is None or room is None else max(0, min(room, slots.left()))

    def append(self, message: Any, delivery_tag: str) -> None:
        """Hold a message; a claimed one is already recorded in Redis."""
        if delivery_tag in self.channel.claimed:
            self.channel.claimed.discard(delivery_tag)
            virtual.QoS.append(self, message, delivery_tag)
        else:
            super().append(message, delivery_tag)

    def ack(self, delivery_tag: str) -> None:
        """Acknowledge a delivery; on a worker through the keeper, so that the hub never waits for Redis."""
        if self.channel.keeper is None:
            super().ack(delivery_tag)
            return
        virtual.QoS.ack(self, delivery_tag)
        self.channel.keeper.acknowledge(self.channel, delivery_tag)

    def reject(self, delivery_tag: str, requeue: bool = False) -> None:
        """Requeue a message, or drop it."""
        if not requeue:
            self.ack(delivery_tag)
            return
        try:
            self.restore_by_tag(delivery_tag, leftmost=True)
        except LOST as exc:
            # It is no longer renewed, so it is redelivered when its lease expires.
            logger.bind(tag=delivery_tag, error=str(exc)).warning("delivery_not_requeued")
        virtual.QoS.ack(self, delivery_tag)

    def held(self) -> dict[str, Any]:
        """Return the messages by tag that were delivered and neither acknowledged nor requeued."""
        while True:
            try:
                return {
                    tag: message for tag, message in list(self._delivered.items()) if tag not in self._dirty
                }
            except RuntimeError:  # another thread changed the dict meanwhile
                continue

    def restore_unacked_once(self, stderr: Any = None) -> None:
        """Requeue nothing: a channel closes when its connection is lost, while its tasks still run."""
        self._on_collect.cancel()

    def restore_visible(self, start: int = 0, num: int | None = None, interval: int = 1) -> None:
        """Requeue deliveries whose leases expired although their holders could have renewed them."""
        index, _ = held_keys(self.channel)
        with self.channel.conn_or_acquire() as client:
            try:
                with stock.Mutex(client, self.unacked_mutex_key, self.unacked_mutex_expire):
                    for tag in self._ended(client, index, most=num or MAX_RESTORE):
                        self.restore_by_tag(bytes_to_str(tag), client, is_lost=True)
            except stock.MutexHeld:
                pass

    def _ended(self, client: Any, index: str, *, most: int) -> list[bytes]:
        # execute_command bypasses kombu's key prefix, so the keys include it.
        keys = (index, seen_key(index))
        tags: list[bytes] = client.execute_command("EVAL", ENDED, 2, *keys, self.visibility_timeout, most)
        return tags

    def restore_by_tag(
        self, tag: str, client: Any = None, leftmost: bool = False, *, is_lost: bool = False
    ) -> None:
        """Put one delivery back at the front of its queue (``leftmost``: at the end).

        Args:
            is_lost: whether its worker was lost; then its delivery count is incremented.
        """

        def restore(pipe: Any) -> None:
            record = pipe.hget(self.unacked_key, tag)
            pipe.multi()
            self._remove_from_indices(tag, pipe)
            if record:
                self._put_back(record, pipe, leftmost=leftmost, is_lost=is_lost)

        with self.channel.conn_or_acquire(client) as connected:
            connected.transaction(restore, self.unacked_key)

    def forget(self, tag: str, client: Any) -> None:
        """Acknowledge a delivery of another process, which has ended."""
        with client.pipeline() as pipe:
            self._remove_from_indices(tag, pipe).execute()

    def _put_back(self, record: bytes, pipe: Any, *, leftmost: bool, is_lost: bool) -> None:
        try:
            message, exchange, routing_key = loads(bytes_to_str(record))
            headers = message["headers"]
            if is_lost:
                headers[DELIVERIES_HEADER] = deliveries(headers) + 1
            self.channel._do_restore_message(message, exchange, routing_key, pipe, leftmost)
        except LOST:
            raise
        except Exception:  # including RecursionError: one record must not stop every worker at its start
            self.channel.bury(record, pipe)


def holder() -> str:
    """Return the beginning of the tags of this process's deliveries; with it others can find them."""
    return _holder(os.getpid())


@cache
def _holder(_pid: int) -> str:
    # By process id, because a forked process must not have its parent's.
    return f"{uuid4().hex}."


def held_keys(channel: Any) -> tuple[str, str]:
    """Return the keys of a channel's held messages: index and held, see ``CLAIM``."""
    prefix = channel.global_keyprefix
    return f"{prefix}{channel.unacked_index_key}", f"{prefix}{channel.unacked_key}"


def seen_key(index: str) -> str:
    """Return the key of the hash that ``LOOK`` keeps for an index."""
    return f"{index}_seen"


def deliveries(headers: Any) -> int:
    """Return how often a message was delivered before without being finished."""
    if not isinstance(headers, dict):
        return 0
    # RabbitMQ counts the deliveries of a quorum queue itself.
    count = headers.get(DELIVERIES_HEADER, headers.get("x-delivery-count", 0))
    return count if isinstance(count, int) else 0


def server_of(message: Any) -> int:
    """Return the place of the server that delivered a message among those that chats are partitioned over."""
    channel = getattr(message, "channel", None)
    return channel.server if isinstance(channel, ClaimChannel) else 0


def uncompressed(headers: Any) -> bool:
    """Remove the compression header of a message; returns whether there was one.

    We compress nothing, and kombu would decompress the message without a size limit before it is verified.
    """
    return isinstance(headers, dict) and headers.pop("compression", None) is not None


class ClaimMessage(virtual.Message):  # type: ignore[misc]
    """A message whose body may have been decoded already."""

    def __init__(self, payload: dict[str, Any], channel: Any = None, **options: Any) -> None:
        decoded = payload.pop(_DECODED, None)
        if uncompressed(payload.get("headers")):
            payload["content-type"] = COMPRESSED_TYPE
        super().__init__(payload, channel=channel, **options)
        if decoded is not None and self.content_type == "application/json":
            self._decoded_cache = decoded


class ClaimChannel(stock.Channel):  # type: ignore[misc]
    """A channel that waits for messages with a peek and takes them with a claim."""

    QoS = ClaimQoS
    Message = ClaimMessage
    from_transport_options = (*stock.Channel.from_transport_options, "endpoint")
    #: Creates connections to the Redis of the settings.
    endpoint: RedisEndpoint
    #: Set by the worker's bootstep; None for channels that fetch messages one by one.
    keeper: Keeper | None = None
    #: Set if tasks run on an event loop; None if the hub takes messages.
    intake: ChannelIntake | None = None
    #: Set if the worker takes messages on other channels too.
    slots: Slots | None = None
    #: Place of its server among those that chats are partitioned over.
    server: int = 0
    _in_poll: Any = False
    _gives_back = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        #: Tags that a claim recorded and that ``QoS.append`` has not received yet.
        self.claimed: set[str] = set()
        # A counter, because a random id per tag would cost a system call.
        self._tags = map(f"{holder()}{uuid4()}.{{}}".format, count())
        self._claims_next = True
        self._predecoded: tuple[bytes, dict[str, Any]] | None = None
        self._asked: list[str] = []  # queues of the claim in flight; empty otherwise
        self._command = "BLMOVE"  # the command in flight
        self._parameters: dict[str, Any] | None = None
        self._resume_at = 0.0
        super().__init__(*args, **kwargs)

    def bury(self, raw: bytes | str, pipe: Any) -> None:
        """Add a raw message to the dead list, in the caller's pipeline."""
        pipe.lpush(DEAD_KEY, raw)
        pipe.ltrim(f"{self.global_keyprefix}{DEAD_KEY}", 0, DEAD_LIMIT - 1)  # kombu does not prefix LTRIM

    def bury_refused(self, raw: str, reason: str, pipe: Any) -> None:
        """Add a message to the list of refused messages, in the caller's pipeline."""
        kept = {"reason": reason, "bytes": len(raw), "message": raw[:MAX_REFUSED_BYTES]}
        pipe.lpush(REFUSED_KEY, json.dumps(kept))
        pipe.ltrim(f"{self.global_keyprefix}{REFUSED_KEY}", 0, REFUSED_LIMIT - 1)  # as above

    def close(self) -> None:
        """Close; a claim in flight is requeued, a peek in flight is dropped."""
        if self.intake is not None:
            self.intake.stop()
        self._closing = True
        if self._in_poll and self._asked:
            try:
                self._brpop_read()
            except (Empty, *LOST):
                pass  # claimed messages are not renewed, so they are redelivered
        self._in_poll = None
        super().close()

    def give_back_unread(self) -> None:
        """Requeue the messages of a claim in flight, whose reply the hub will not read.

        Their leases are not renewed; without this they would wait until these expire.
        """
        if self.intake is not None:
            self.intake.stop()
        if not (self._in_poll and self._asked):
            return
        self._gives_back = True
        try:
            self._brpop_read()
        except (Empty, *LOST):
            pass  # as in ``close``
        finally:
            self._gives_back = False

    def _get_pool(self, asynchronous: bool = False) -> Any:
        # A message is rejected on the channel that delivered it, which may be closed by then and
        # have no connection object with the parameters any more.
        if self.connection is None and self._parameters is not None:
            return redis.ConnectionPool(**self._parameters)
        if not asynchronous:
            self._parameters = self._connparams()
        return super()._get_pool(asynchronous)

    def _connparams(self, asynchronous: bool = False) -> dict[str, Any]:
        # kombu derives the hub's connections from these.
        self.connection_class = self.connection_class_ssl = self.endpoint.connection_class
        parameters, ours = super()._connparams(asynchronous), self.endpoint.connection_class
        chosen = parameters.get("connection_class", ours)
        if not issubclass(chosen, ours):  # for a Unix socket kombu takes the class of redis-py
            is_base = issubclass(ours, chosen)
            parameters["connection_class"] = ours if is_base else type("Connection", (chosen, ours), {})
        return {**parameters, **self.endpoint.parameters()}

    def room(self) -> int:
        """Return how many messages the next claim may take."""
        room = self.qos.can_consume_max_estimate()
        return MAX_CLAIM if room is None else min(MAX_CLAIM, room)

    def claim_command(self, queues: list[str], room: int) -> tuple[str | float, ...]:
        """Return the command that claims up to ``room`` messages of these queues; see ``CLAIM``."""
        tags = [next(self._tags) for _ in range(max(1, room))]
        keys = [*held_keys(self), *(f"{self.global_keyprefix}{queue}" for queue in queues)]
        names = [dumps(queue) for queue in queues]
        return ("EVAL", CLAIM, len(keys), *keys, float(self.visibility_timeout), *names, *tags)

    def peek_command(self, queues: list[str], seconds: float) -> tuple[str | float, ...]:
        """Return the command that waits for a message of the next queue without taking it."""
        if len(queues) > 1:
            seconds = POLL_SECONDS
        self._queue_cycle.rotate(queues[0])
        key = f"{self.global_keyprefix}{queues[0]}"
        return ("BLMOVE", key, key, "RIGHT", "RIGHT", seconds)

    def may_hold_more(self, taken: int) -> bool:
        """Whether to claim again at once after a claim that took ``taken`` messages, rather than to wait.

        A lone message of one queue: calls come one by one, and the next is waited for. A wait sees
        one of several queues: a wait after each message would delay the messages of the others.
        """
        return taken > (0 if len(self.active_queues) > 1 else 1)

    def predecode(self, raw: bytes) -> None:
        """Parse a message ahead of its delivery, usually while Redis processes the claim."""
        try:
            self._predecoded = (raw, _readable(raw))
        except (ValueError, TypeError, KeyError, RecursionError):
            self._predecoded = None  # if it is delivered, the normal path refuses it

    def predecode_body(self) -> None:
        """Decode the body of the message that was parsed ahead, unless it was delivered meanwhile."""
        if self._predecoded is not None:
            _decode_body(self._predecoded[1])

    def is_predecoded(self, raw: bytes) -> bool:
        """Whether this is the message that was parsed ahead."""
        return self._predecoded is not None and self._predecoded[0] == raw

    def _read(self, raw: bytes) -> dict[str, Any]:
        predecoded, self._predecoded = self._predecoded, None
        return predecoded[1] if predecoded is not None and predecoded[0] == raw else _readable(raw)

    def _receive_one(self, c: Any) -> Any:
        if "parse_response" not in vars(c):
            # Otherwise redis-py waits without a limit, and the hub with it: for the rest of a message that a
            # frozen or cut off server began, or on a connection that it has made again meanwhile.
            seconds = self.endpoint.parameters()["socket_timeout"]
            c.parse_response = partial(c.parse_response, block=False, timeout=seconds)
        try:
            return super()._receive_one(c)
        except LOST:
            raise
        except Exception as exc:  # nested too deeply, not an object, …: a broadcast must not stop the worker
            logger.bind(error_type=type(exc).__name__).error("broadcast_unreadable")
            return False  # kombu's Empty would delay the broadcasts after it until another one arrives

    def _brpop_start(self, timeout: float | None = None) -> None:
        queues = self._queue_cycle.consume(len(self.active_queues))
        if not queues or monotonic() < self._resume_at:
            return
        connection = self.client.connection
        self._in_poll = connection
        self._brpop_sent_at = monotonic()
        if self.intake is not None:
            self._resume_at = monotonic() + PING_SECONDS
            self._command = "PING"
            connection.send_command("PING")
            return
        if self._claims_next:
            self._asked, self._command = queues, "EVAL"
            connection.send_command(*self.claim_command(queues, self.room()))
            return
        self._asked, self._command = [], "BLMOVE"
        connection.send_command(*self.peek_command(queues, timeout or self.brpop_timeout))

    def _brpop_read(self, **options: Any) -> bool:
        queues, self._asked, command = self._asked, [], self._command
        try:
            answer = self.client.parse_response(self.client.connection, command, **options)
        except self.connection_errors:
            self.client.connection.disconnect()
            raise
        except redis.ResponseError as exc:
            # Usually out of memory: both commands write. It is temporary; the pause prevents a busy loop.
            logger.bind(command=command, error=str(exc)).error("messages_refused_by_redis")
            self._resume_at = monotonic() + RETRY_SECONDS
            raise Empty from exc
        finally:
            self._in_poll = None
            self._flush_brpop_reauth()
        if command == "PING":
            raise Empty()
        if not queues:
            # With several queues the peek waited for one of them; the claim takes from all.
            self._claims_next = answer is not None or len(self.active_queues) > 1
            raise Empty()
        taken = [answer[i : i + 3] for i in range(0, len(answer), 3)]
        self._claims_next = self.may_hold_more(len(taken))
        for number, tag, message in taken:
            self._take(queues[number - 1], bytes_to_str(tag), message)
        if not taken:
            raise Empty()
        return True

    def _take(self, queue: str, tag: str, raw: bytes) -> None:
        """Deliver one claimed message, requeue it if the channel is closing, or dead-letter it."""
        if self._closing or self._gives_back:
            self.qos.restore_by_tag(tag)
            return
        try:
            message = self._read(raw)
            if _DECODED not in message:
                _decode_body(message)
            properties = message["properties"]
            properties["delivery_tag"] = tag
            # The queue is set here and not trusted from the message, whose signature is for one queue.
            properties["delivery_info"] = {"exchange": "", "routing_key": queue}
            self.claimed.add(tag)
            self._queue_cycle.rotate(queue)
            self.connection._deliver(message, queue)
        except LOST:
            raise
        except Exception as exc:  # one message must not stop the worker
            logger.bind(
                bytes=len(raw), queue=queue, error_type=type(exc).__name__
            ).critical("unreadable_message_dead_lettered")  # fmt: skip
            self.claimed.discard(tag)
            with self.conn_or_acquire() as client, client.pipeline() as pipe:
                self.bury(raw, pipe)
                self.qos._remove_from_indices(tag, pipe).execute()
            virtual.QoS.ack(self.qos, tag)


def _readable(raw: bytes) -> dict[str, Any]:
    """Parse a message and check the fields that kombu and Celery rely on.

    Raises:
        ValueError, TypeError, KeyError: it is not a message.
    """
    # kombu's own loader checks each object for an encoded type such as a time; messages rarely have one.
    message = loads(bytes_to_str(raw)) if b'"__type__"' in raw else plain_json.load(raw)
    message.pop(_DECODED, None)
    properties = message["properties"]
    if not isinstance(message["headers"], dict) or not isinstance(properties["delivery_info"], dict):
        raise TypeError("headers or delivery_info is not an object")
    found: dict[str, Any] = message
    return found


def _decode_body(message: dict[str, Any]) -> None:
    """Decode a message's body without kombu's loader, which checks each object for an encoded type."""
    try:
        if message["properties"]["body_encoding"] == "utf-8":
            message[_DECODED] = plain_json.load(message["body"])
    except (ValueError, TypeError, KeyError, RecursionError):
        return  # if it is delivered, the normal path refuses it


class ClaimTransport(stock.Transport):  # type: ignore[misc]
    """The transport with ``ClaimChannel``, selected by ``nekro.broker.delivery.connection``."""

    Channel = ClaimChannel
