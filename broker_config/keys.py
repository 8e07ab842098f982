"""All Redis keys that this project defines, with their types, contents and expiry.

``<prefix>dead``
    list, does not expire: raw messages that no worker finished or could read, newest first.
``<prefix>refused``
    list of JSON ``{"reason", "bytes", "message"}``, does not expire: refused messages, newest first;
    ``message`` is the text as received, truncated to ``MAX_REFUSED_BYTES`` characters.
``<prefix>dead_moving``
    string, expires within seconds, on a further server of a partition: a worker moves the dead letters of
    that server to the first one.
``<prefix>epochs``
    hash, does not expire: the server run that the data belongs to, and the number of published
    messages. It shows which messages Redis has lost; see ``nekro.broker.redis.losses``.
``<prefix>revoked``
    sorted set (task id → expiry), expires a day after the last revocation, on the results' Redis.
``<prefix>request:<digest>``
    string, expires after an hour, on the results' Redis: id of the call that a request of an MCP client
    causes. Any gateway finds it there when the client cancels the request by its number.
``<prefix>program:<run id>``
    hash (call id → mark), expires an hour after the last call of a program, with the queue of its calls: the
    calls that the program has sent; see ``nekro.broker.program_calls``.
``<prefix>rate:<key id>``
    string, expires within a minute, on the results' Redis: the time at which all requests of an API key have
    been paid for; see ``nekro.gateway.access.limits``.
``<prefix>login:<word>``
    string, expires with the log-in that was used, on the results' Redis: it cannot be used again.
``<prefix>watcher:<id>``
    string, expires a minute after its last renewal: the queue ``watch.<id>`` of a 0.2 process has a reader.
``<prefix>offers:<queue>``
    sorted set (offer → expiry), expires a minute after the last offer: places for one message in
    idle workers. Related channel: ``<prefix>handed:<id>`` of a worker.
``<prefix><queue>:fair``, ``…:fair:<plugin>``, ``…:fair:<plugin>:<chat>``, ``…:fair_length``
    lists of names, of names, of messages, and a number, do not expire: calls that wait behind the first ones
    of a queue, and how many there are; see ``nekro.broker.delivery.fair_queue``. The names are digests.
``<prefix>unacked.<lane>``, ``…_index``, ``…_mutex``, ``…_index_seen``
    hash, sorted set, string, hash, written by the transport: deliveries held by workers of a lane, and
    the last time that a worker of the lane reached Redis.

Channel ``<prefix>reply:<caller id>``: announces to one ``MethodCaller`` that results are stored.
Channel ``<prefix>events`` on the results' Redis: announces new events of chats, and carries live ones; see
``nekro.broker.announcements``.

With ``NEKRO_BROKER__PARTITIONS`` each server has the queues, deliveries, results and reply channels of its
chats; "the results' Redis" of all else is ``NEKRO_RESULTS__URL`` or the first server.

Keys of Celery and kombu themselves (results, bindings, queues) carry the same prefix through
their ``global_keyprefix`` options.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, TypeGuard

__all__ = ["Keys", "is_caller_id", "pinned_queue"]

#: Maximum length of the dead list; the oldest messages are dropped.
DEAD_LIMIT: Final = 10_000
#: Queue of dead letters on brokers other than Redis.
DEAD_QUEUE: Final = "nekro.dead"
#: Name of the dead list below the prefix.
DEAD_KEY: Final = "dead"
#: The same for refused messages. They are kept separately, so that a flood of them cannot displace the
#: calls that an operator wants to send again.
REFUSED_LIMIT: Final = 1_000
REFUSED_QUEUE: Final = "nekro.refused"
REFUSED_KEY: Final = "refused"
REFUSED_HEADER: Final = "x-nekro-refused"
#: Longer refused messages are not kept completely.
MAX_REFUSED_BYTES: Final = 16_384

_CALLER_ID = re.compile(r"[0-9a-f]{32}")


def pinned_queue(plugin_key: str) -> str:
    """Return the name of a pinned plugin's queue."""
    return f"pinned.{plugin_key}"


def is_caller_id(value: object) -> TypeGuard[str]:
    """Whether a ``reply_to`` has the format of a ``MethodCaller`` id; nothing else becomes part of a key."""
    return isinstance(value, str) and _CALLER_ID.fullmatch(value) is not None


@dataclass(frozen=True, kw_only=True)
class Keys:
    """The key names under one prefix (``BrokerSettings.key_prefix``)."""

    prefix: str

    def reply(self, caller_id: str) -> str:
        """Channel on the results' Redis that one caller subscribes to."""
        return f"{self.prefix}reply:{caller_id}"

    def result(self, task_id: str) -> str:
        """String with the result record of a task, on the results' Redis; Celery's own key."""
        return f"{self.prefix}celery-task-meta-{task_id}"

    def program(self, run_id: str) -> str:
        """Hash of the marks of a program's calls."""
        return f"{self.prefix}program:{run_id}"

    @property
    def dead(self) -> str:
        """List of dead letters, newest first."""
        return f"{self.prefix}{DEAD_KEY}"

    @property
    def refused(self) -> str:
        """List of refused messages, newest first."""
        return f"{self.prefix}{REFUSED_KEY}"

    @property
    def moving(self) -> str:
        """String that exists while a worker moves dead letters to the first server."""
        return f"{self.prefix}{DEAD_KEY}_moving"

    @property
    def epoch(self) -> str:
        """Hash for the detection of lost messages; see ``nekro.broker.redis.losses``."""
        return f"{self.prefix}epochs"

    def rate(self, key_id: str) -> str:
        """String with the time at which the requests of an API key have been paid for."""
        return f"{self.prefix}rate:{key_id}"

    def login(self, word: str) -> str:
        """String that exists after a log-in was used."""
        return f"{self.prefix}login:{word}"

    def request(self, digest: str) -> str:
        """Id of the call of a client's request (string)."""
        return f"{self.prefix}request:{digest}"

    @property
    def revoked(self) -> str:
        """Sorted set of task ids that no worker may start."""
        return f"{self.prefix}revoked"

    def offers(self, queue: str) -> str:
        """Sorted set of places that workers offer for messages of a queue (direct delivery)."""
        return f"{self.prefix}offers:{queue}"

    def fair_length(self, queue: str) -> str:
        """Number of the calls that wait behind the list of a queue for the turns of their owners (string)."""
        return f"{self.prefix}{queue}:fair_length"

    def seen(self, lane: str) -> str:
        """Hash with the last time that a worker of a lane reached Redis."""
        return f"{self.prefix}{self.unacked(lane)['unacked_index_key']}_seen"

    @property
    def events(self) -> str:
        """Channel on the results' Redis that announces events."""
        return f"{self.prefix}events"

    def watcher(self, watcher_id: str) -> str:
        """Presence key of a 0.2 process that reads the queue ``watch.<id>`` of events."""
        return f"{self.prefix}watcher:{watcher_id}"

    @staticmethod
    def unacked(lane: str) -> dict[str, str]:
        """Return transport options with separate unacked keys for a lane (kombu adds the prefix)."""
        name = f"unacked.{lane}"
        return {
            "unacked_key": name,
            "unacked_index_key": f"{name}_index",
            "unacked_mutex_key": f"{name}_mutex",
        }
