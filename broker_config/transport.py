"""kombu's Redis transport, with a pop that cannot lose a message and a close that doubles none.

Stock kombu pops a message and records it as unacknowledged afterwards; a worker that dies in
between loses it. When a connection breaks it puts the messages of tasks that still run back
on their queue, and they run twice. Here:

- A consumer waits with ``BLMOVE q q``, which moves the last message onto its own place, and
  then claims: one script pops messages and records them, up to as many as there is room for.
- Each delivery has a tag of its own, so a worker that lost a message to another can tell.
- A lost connection restores nothing. ``broker_config.leases`` keeps what is held and gives
  back what was never started.
- What cannot be read is put on the dead list; no message stops a worker.
- Where tasks run on an event loop, that loop takes the messages (``broker_config.loop_intake``)
  and this connection only tells whether Redis is there.

Written against kombu 5.7, whose private names it overrides; ``broker.atomic_claim`` turns it
off. Needs Redis 6.2.
"""

from __future__ import annotations

import json
import logging
from itertools import count
from queue import Empty
from time import monotonic
from typing import TYPE_CHECKING, Any, Final, Protocol
from uuid import uuid4

import redis
from kombu.transport import redis as stock
from kombu.transport import virtual
from kombu.utils.encoding import bytes_to_str
from kombu.utils.json import dumps, loads

from broker_config import plain_json
from broker_config.keys import DEAD_KEY, DEAD_LIMIT, MAX_REFUSED_BYTES, REFUSED_KEY, REFUSED_LIMIT

if TYPE_CHECKING:
    from broker_config.handoff import Ending
    from broker_config.redis_endpoint import RedisEndpoint

__all__ = [
    "COMPRESSED_TYPE",
    "DELIVERIES_HEADER",
    "ClaimChannel",
    "ClaimTransport",
    "held_keys",
    "seen_key",
    "uncompressed",
]

#: Header that counts how often a message was delivered and not acknowledged.
DELIVERIES_HEADER: Final = "x-nekro-deliveries"
#: Most messages that one claim takes; a worker must not take all while another is idle.
MAX_CLAIM: Final = 16
#: A consumer of several queues looks at all of them this often; BLMOVE waits for one alone.
SEVERAL_QUEUES_SECONDS: Final = 0.05
#: How often a channel whose messages are taken elsewhere asks whether Redis is there.
PING_SECONDS: Final = 5.0
#: Pause after Redis refused to hand out messages.
REFUSED_SECONDS: Final = 0.5
#: Deliveries restored in one pass.
MAX_RESTORE: Final = 100

#: Pops messages and records them as held, in one step.
#: KEYS: index (sorted set: tag → when its lease ends), held (hash: tag → message), then the queues
#: (lists). ARGV: seconds of a lease, the queues' names as JSON strings (one per queue), then tags, as
#: many as may be taken. Each worker writes when *its* lease ends, so workers may differ in that.
#: Returns {queue number, tag, message, …}. A held message is written as kombu does,
#: ``[message, exchange, routing key]``, with the default exchange and its queue.
CLAIM: Final = """
local now = redis.call('TIME')
local score = now[1] + now[2] / 1000000 + ARGV[1]
local queues = #KEYS - 2
local taken, tag = {}, queues + 2
for q = 1, queues do
    while tag <= #ARGV do
        local message = redis.call('RPOP', KEYS[q + 2])
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
#: whether a lease that has ended proves that its holder is gone. It does not while Redis, or the way to it,
#: was away for long enough that holders could not renew: workers look three times per lease, so a gap of
#: 0.4 leases shows that, and holders get half a lease to renew. ``seen`` is a hash: ``at``, when a worker
#: looked last; ``trust_from``, when ends of leases count again.
LOOK: Final = """
local function look(seen, lease)
    local time = redis.call('TIME')
    local now = time[1] + time[2] / 1000000
    local at = tonumber(redis.call('HGET', seen, 'at') or now)
    if now - at > 0.4 * lease then redis.call('HSET', seen, 'trust_from', now + 0.5 * lease) end
    redis.call('HSET', seen, 'at', now)
    return now, now >= tonumber(redis.call('HGET', seen, 'trust_from') or 0)
end
"""
#: Returns the tags whose leases have ended. KEYS: index, seen. ARGV: seconds of a lease, longest list.
ENDED: Final = f"""{LOOK}
local now, is_trusted = look(KEYS[2], tonumber(ARGV[1]))
if not is_trusted then return {{}} end
return redis.call('ZRANGEBYSCORE', KEYS[1], 0, now, 'LIMIT', 0, ARGV[2])
"""

#: Content type given to what was compressed; nothing accepts it.
COMPRESSED_TYPE: Final = "application/x-compressed"

#: What means that the connection is gone, as opposed to kombu's list, which has KeyError in it.
LOST: Final = (redis.ConnectionError, redis.TimeoutError, OSError)

#: Where a message that was read ahead keeps its decoded body; no field of a message is called so.
_DECODED: Final = "nekro decoded"

logger = logging.getLogger(__name__)


class Keeper(Protocol):
    """Takes acknowledgements off the channel's hands; see ``broker_config.leases``."""

    def acknowledge(self, channel: ClaimChannel, tag: str) -> None:
        """Forget a delivery in Redis, soon and for certain."""
        ...


class Intake(Protocol):
    """Takes messages in the channel's place; see ``broker_config.loop_intake``."""

    def stop(self) -> None:
        """Take nothing any more; when it returns every message is delivered or given back."""
        ...

    def ending(self, tag: str) -> Ending | None:
        """What storing the result of a delivery may do besides; None where that is not for it to do."""
        ...


class ClaimQoS(stock.QoS):  # type: ignore[misc]
    """Knows what a channel holds."""

    def append(self, message: Any, delivery_tag: str) -> None:
        """Hold a message; one that was claimed is recorded already."""
        if delivery_tag in self.channel.claimed:
            self.channel.claimed.discard(delivery_tag)
            virtual.QoS.append(self, message, delivery_tag)
        else:
            super().append(message, delivery_tag)

    def ack(self, delivery_tag: str) -> None:
        """Acknowledge; on a worker the keeper does it, so that the hub never waits for Redis."""
        if self.channel.keeper is None:
            super().ack(delivery_tag)
            return
        virtual.QoS.ack(self, delivery_tag)
        self.channel.keeper.acknowledge(self.channel, delivery_tag)

    def reject(self, delivery_tag: str, requeue: bool = False) -> None:
        """Put a message back, or drop it."""
        if not requeue:
            self.ack(delivery_tag)
            return
        try:
            self.restore_by_tag(delivery_tag, leftmost=True)
        except LOST as exc:
            # It is not renewed any more, so it comes back by itself.
            logger.warning("delivery %s could not be given back: %s", delivery_tag, exc)
        virtual.QoS.ack(self, delivery_tag)

    def held(self) -> dict[str, Any]:
        """Messages by tag that were delivered and neither acknowledged nor given back."""
        while True:
            try:
                return {
                    tag: message for tag, message in list(self._delivered.items()) if tag not in self._dirty
                }
            except RuntimeError:  # the hub changed it meanwhile
                continue

    def restore_unacked_once(self, stderr: Any = None) -> None:
        """Restore nothing: a channel closes when its connection is lost, and its tasks still run."""
        self._on_collect.cancel()

    def restore_visible(self, start: int = 0, num: int | None = None, interval: int = 1) -> None:
        """Put back deliveries whose leases ended although their holders could renew them."""
        index, _ = held_keys(self.channel)
        with self.channel.conn_or_acquire() as client:
            try:
                with stock.Mutex(client, self.unacked_mutex_key, self.unacked_mutex_expire):
                    for tag in self._ended(client, index, most=num or MAX_RESTORE):
                        self.restore_by_tag(bytes_to_str(tag), client, is_lost=True)
            except stock.MutexHeld:
                pass

    def _ended(self, client: Any, index: str, *, most: int) -> list[bytes]:
        # By a client that adds no prefix to keys.
        keys = (index, seen_key(index))
        tags: list[bytes] = client.execute_command("EVAL", ENDED, 2, *keys, self.visibility_timeout, most)
        return tags

    def restore_by_tag(
        self, tag: str, client: Any = None, leftmost: bool = False, *, is_lost: bool = False
    ) -> None:
        """Put one delivery back on its queue, in front (``leftmost``: behind all others).

        Args:
            is_lost: its worker went away; counts against the message.
        """

        def restore(pipe: Any) -> None:
            record = pipe.hget(self.unacked_key, tag)
            pipe.multi()
            self._remove_from_indices(tag, pipe)
            if record:
                self._put_back(record, pipe, leftmost=leftmost, is_lost=is_lost)

        with self.channel.conn_or_acquire(client) as connected:
            connected.transaction(restore, self.unacked_key)

    def _put_back(self, record: bytes, pipe: Any, *, leftmost: bool, is_lost: bool) -> None:
        try:
            message, exchange, routing_key = loads(bytes_to_str(record))
            headers = message["headers"]
            if is_lost:
                headers[DELIVERIES_HEADER] = deliveries(headers) + 1
            self.channel._do_restore_message(message, exchange, routing_key, pipe, leftmost)
        except LOST:
            raise
        except Exception:  # RecursionError, too: one record must not end every worker that starts
            self.channel.bury(record, pipe)


def held_keys(channel: Any) -> tuple[str, str]:
    """Keys of a channel's held messages: index and held, see ``CLAIM``."""
    prefix = channel.global_keyprefix
    return f"{prefix}{channel.unacked_index_key}", f"{prefix}{channel.unacked_key}"


def seen_key(index: str) -> str:
    """Key of what ``LOOK`` records beside an index."""
    return f"{index}_seen"


def deliveries(headers: Any) -> int:
    """How often a message was delivered without an end before this time."""
    if not isinstance(headers, dict):
        return 0
    # A quorum queue of RabbitMQ counts by itself.
    count = headers.get(DELIVERIES_HEADER, headers.get("x-delivery-count", 0))
    return count if isinstance(count, int) else 0


def uncompressed(headers: Any) -> bool:
    """Take from a message's headers that it is compressed; returns whether they said so.

    We compress nothing, and kombu would unpack it to whatever size before anyone sees the message.
    """
    return isinstance(headers, dict) and headers.pop("compression", None) is not None


class ClaimMessage(virtual.Message):  # type: ignore[misc]
    """A message whose body may have been read already."""

    def __init__(self, payload: dict[str, Any], channel: Any = None, **options: Any) -> None:
        decoded = payload.pop(_DECODED, None)
        if uncompressed(payload.get("headers")):
            payload["content-type"] = COMPRESSED_TYPE
        super().__init__(payload, channel=channel, **options)
        if decoded is not None and self.content_type == "application/json":
            self._decoded_cache = decoded


class ClaimChannel(stock.Channel):  # type: ignore[misc]
    """Waits for messages with a peek and takes them with a claim."""

    QoS = ClaimQoS
    Message = ClaimMessage
    from_transport_options = (*stock.Channel.from_transport_options, "endpoint")
    #: Says how to reach the Redis.
    endpoint: RedisEndpoint
    #: Set by the worker's bootstep; None where messages are fetched one by one.
    keeper: Keeper | None = None
    #: Set where tasks run on an event loop; None: the hub takes messages.
    intake: Intake | None = None
    _in_poll: Any = False
    _gives_back = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        #: Tags that a claim recorded and that are on their way to ``QoS.append``.
        self.claimed: set[str] = set()
        # An id of its own for each would cost a system call for each.
        self._tags = map(f"{uuid4()}.{{}}".format, count())
        self._claims_next = True
        self._foreseen: tuple[bytes, dict[str, Any]] | None = None
        self._asked: list[str] = []  # queues of the claim under way; empty otherwise
        self._command = "BLMOVE"  # the one under way
        self._parameters: dict[str, Any] | None = None
        self._resume_at = 0.0
        super().__init__(*args, **kwargs)

    def bury(self, raw: bytes | str, pipe: Any) -> None:
        """Put something unreadable on the dead list, in a pipeline of the caller's."""
        pipe.lpush(DEAD_KEY, raw)
        pipe.ltrim(f"{self.global_keyprefix}{DEAD_KEY}", 0, DEAD_LIMIT - 1)  # kombu prefixes no LTRIM

    def bury_refused(self, raw: str, reason: str, pipe: Any) -> None:
        """Put a message that may not run on the list of refused ones, in a pipeline of the caller's."""
        kept = {"reason": reason, "bytes": len(raw), "message": raw[:MAX_REFUSED_BYTES]}
        pipe.lpush(REFUSED_KEY, json.dumps(kept))
        pipe.ltrim(f"{self.global_keyprefix}{REFUSED_KEY}", 0, REFUSED_LIMIT - 1)  # as above

    def close(self) -> None:
        """Close; a claim whose answer is under way is given back, a peek is dropped."""
        if self.intake is not None:
            self.intake.stop()
        self._closing = True
        if self._in_poll and self._asked:
            try:
                self._brpop_read()
            except (Empty, *LOST):
                pass  # not renewed: what was claimed comes back by itself
        self._in_poll = None
        super().close()

    def give_back_unread(self) -> None:
        """Give back what a claim took while its answer is under way: the hub will not turn to read it.

        Nobody renews these: without this they would wait until their leases end.
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
        # A message is rejected on the channel it came by, which may be closed by then and
        # have lost the connection that knows where Redis is.
        if self.connection is None and self._parameters is not None:
            return redis.ConnectionPool(**self._parameters)
        if not asynchronous:
            self._parameters = self._connparams()
        return super()._get_pool(asynchronous)

    def _connparams(self, asynchronous: bool = False) -> dict[str, Any]:
        # kombu derives the hub's connections from these.
        self.connection_class = self.connection_class_ssl = self.endpoint.connection_class
        return {**super()._connparams(asynchronous), **self.endpoint.parameters()}

    def room(self) -> int:
        """How many messages may be claimed at once now."""
        room = self.qos.can_consume_max_estimate()
        return MAX_CLAIM if room is None else min(MAX_CLAIM, room)

    def claim_command(self, queues: list[str], room: int) -> tuple[str | float, ...]:
        """The command that claims up to ``room`` messages of these queues; see ``CLAIM``."""
        tags = [next(self._tags) for _ in range(max(1, room))]
        keys = [*held_keys(self), *(f"{self.global_keyprefix}{queue}" for queue in queues)]
        names = [dumps(queue) for queue in queues]
        return ("EVAL", CLAIM, len(keys), *keys, float(self.visibility_timeout), *names, *tags)

    def peek_command(self, queues: list[str], seconds: float) -> tuple[str | float, ...]:
        """The command that waits for a message of the queue whose turn it is, and takes none."""
        if len(queues) > 1:
            seconds = SEVERAL_QUEUES_SECONDS
        self._queue_cycle.rotate(queues[0])
        key = f"{self.global_keyprefix}{queues[0]}"
        return ("BLMOVE", key, key, "RIGHT", "RIGHT", seconds)

    def foresee(self, raw: bytes) -> None:
        """Read a message that is about to be taken, mostly while Redis answers; ``foresee_body`` goes on."""
        try:
            self._foreseen = (raw, _readable(raw))
        except (ValueError, TypeError, KeyError, RecursionError):
            self._foreseen = None  # if it comes, it is refused in the ordinary way

    def foresee_body(self) -> None:
        """Read the body of the message that was read last, if it was not taken meanwhile."""
        if self._foreseen is None:
            return
        message = self._foreseen[1]
        try:
            if message["properties"]["body_encoding"] == "utf-8":
                message[_DECODED] = plain_json.load(message["body"])
        except (ValueError, TypeError, KeyError, RecursionError):
            return  # as above

    def has_foreseen(self, raw: bytes) -> bool:
        """Whether this is the message that was read last."""
        return self._foreseen is not None and self._foreseen[0] == raw

    def _read(self, raw: bytes) -> dict[str, Any]:
        foreseen, self._foreseen = self._foreseen, None
        return foreseen[1] if foreseen is not None and foreseen[0] == raw else _readable(raw)

    def _receive_one(self, c: Any) -> Any:
        try:
            return super()._receive_one(c)
        except LOST:
            raise
        except Exception as exc:  # nested too deeply, no object, …: one broadcast must not end the worker
            logger.error("a broadcast cannot be read (%s); dropped", type(exc).__name__)
            return False  # kombu's Empty would leave those behind it unread until the next arrives

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
            # Out of memory, mostly: both commands write. It passes, and so does a hot loop.
            logger.error("Redis refuses %s: %s", command, exc)
            self._resume_at = monotonic() + REFUSED_SECONDS
            raise Empty from exc
        finally:
            self._in_poll = None
            self._flush_brpop_reauth()
        if command == "PING":
            raise Empty()
        if not queues:
            # Several queues: the peek saw one of them; the claim looks at all.
            self._claims_next = answer is not None or len(self.active_queues) > 1
            raise Empty()
        taken = [answer[i : i + 3] for i in range(0, len(answer), 3)]
        # One alone: calls come one by one, and the next is waited for rather than asked for.
        self._claims_next = len(taken) > 1
        for number, tag, message in taken:
            self._take(queues[number - 1], bytes_to_str(tag), message)
        if not taken:
            raise Empty()
        return True

    def _take(self, queue: str, tag: str, raw: bytes) -> None:
        """Deliver one claimed message, give it back when the channel closes, or bury it."""
        if self._closing or self._gives_back:
            self.qos.restore_by_tag(tag)
            return
        try:
            message = self._read(raw)
            properties = message["properties"]
            properties["delivery_tag"] = tag
            # Where it came from is not for the message to say: its signature is for one queue.
            properties["delivery_info"] = {"exchange": "", "routing_key": queue}
            self.claimed.add(tag)
            self._queue_cycle.rotate(queue)
            self.connection._deliver(message, queue)
        except LOST:
            raise
        except Exception as exc:  # one message must not stop the worker
            logger.critical(
                "a message of %d bytes in queue %s cannot be read (%s); it is on the dead list",
                len(raw), queue, type(exc).__name__,
            )  # fmt: skip
            self.claimed.discard(tag)
            with self.conn_or_acquire() as client, client.pipeline() as pipe:
                self.bury(raw, pipe)
                self.qos._remove_from_indices(tag, pipe).execute()
            virtual.QoS.ack(self.qos, tag)


def _readable(raw: bytes) -> dict[str, Any]:
    """Parse a message as far as kombu and Celery take for granted.

    Raises:
        ValueError, TypeError, KeyError: it is not one.
    """
    # kombu's own reader asks of each object whether it stands for a time or the like; hardly any does.
    message = loads(bytes_to_str(raw)) if b'"__type__"' in raw else plain_json.load(raw)
    message.pop(_DECODED, None)
    properties = message["properties"]
    if not isinstance(message["headers"], dict) or not isinstance(properties["delivery_info"], dict):
        raise TypeError("headers or delivery_info is no object")
    found: dict[str, Any] = message
    return found


class ClaimTransport(stock.Transport):  # type: ignore[misc]
    """The transport; kombu finds it through ``broker_config.connection``."""

    Channel = ClaimChannel
