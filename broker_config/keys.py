"""Every Redis key of our own, in one place.

``<prefix>reply:<caller id>``
    list, gone ``REPLY_SECONDS`` after the last push: finished results for one ``MethodCaller``.
``<prefix>dead``
    list, until somebody drops it: raw messages that no worker can read, newest first.
``<prefix>refused``
    list of JSON ``{"reason", "bytes", "message"}``, until somebody drops it: messages that were not signed
    by us, newest first; ``message`` is the text as it came, cut to ``MAX_REFUSED_BYTES`` characters.
``<prefix>epochs``
    hash, for ever: which run of which server the data belongs to, and how many messages were
    published. Shows which messages a Redis lost; see ``broker_config.epochs``.
``<prefix>revoked``
    sorted set (task id → until when), gone a day after the last revocation, on the results' Redis.
``<prefix>watcher:<id>``
    string, gone a minute after its last renewal: somebody reads the queue ``watch.<id>``.
``<prefix>offers:<queue>``
    sorted set (offer → until when), gone a minute after the last offer: places for one message in
    workers that wait. Beside it, channels: ``<prefix>handed:<id>`` of a worker, and of a caller the
    name of its reply list.
``<prefix>unacked.<lane>``, ``…_index``, ``…_mutex``, ``…_index_seen``
    hash, sorted set, string, hash, written by the transport: deliveries that workers of a lane hold, and
    when a worker of the lane reached Redis last.

Keys of Celery and kombu themselves (results, bindings, queues) carry the same prefix through
their ``global_keyprefix`` options.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, TypeGuard

__all__ = ["REPLY_SECONDS", "Keys", "is_caller_id"]

#: How long replies wait for a caller that does not fetch them (it died or lost its connection).
REPLY_SECONDS: Final = 120
#: Most messages kept in the dead list; the oldest make room.
DEAD_LIMIT: Final = 10_000
#: Queue of what was set aside on brokers that are no Redis.
DEAD_QUEUE: Final = "nekro.dead"
#: Name of the dead list below the prefix.
DEAD_KEY: Final = "dead"
#: The same for messages that were refused. They have places of their own: a flood of them must not push out
#: the calls that an operator wants to send again.
REFUSED_LIMIT: Final = 1_000
REFUSED_QUEUE: Final = "nekro.refused"
REFUSED_KEY: Final = "refused"
REFUSED_HEADER: Final = "x-nekro-refused"
#: Longest refused message that is kept whole.
MAX_REFUSED_BYTES: Final = 16_384

_CALLER_ID = re.compile(r"[0-9a-f]{32}")


def is_caller_id(value: object) -> TypeGuard[str]:
    """Whether a ``reply_to`` is one that ``MethodCaller`` makes; nothing else becomes part of a key."""
    return isinstance(value, str) and _CALLER_ID.fullmatch(value) is not None


@dataclass(frozen=True, kw_only=True)
class Keys:
    """The key names under one prefix (``BrokerSettings.key_prefix``)."""

    prefix: str

    def reply(self, caller_id: str) -> str:
        """List on the results' Redis that one caller pops its results from."""
        return f"{self.prefix}reply:{caller_id}"

    @property
    def dead(self) -> str:
        """List of malformed messages, newest first."""
        return f"{self.prefix}{DEAD_KEY}"

    @property
    def refused(self) -> str:
        """List of messages that were not signed by us, newest first."""
        return f"{self.prefix}{REFUSED_KEY}"

    @property
    def epoch(self) -> str:
        """Hash that tells what the broker's data has lost; see ``broker_config.epochs``."""
        return f"{self.prefix}epochs"

    @property
    def revoked(self) -> str:
        """Ids of tasks that no worker may start."""
        return f"{self.prefix}revoked"

    def offers(self, queue: str) -> str:
        """Places that workers offer for messages of a queue; see ``broker_config.handoff``."""
        return f"{self.prefix}offers:{queue}"

    def watcher(self, watcher_id: str) -> str:
        """Sign of life of one ``broker_config.watching.EventWatcher``."""
        return f"{self.prefix}watcher:{watcher_id}"

    @staticmethod
    def unacked(lane: str) -> dict[str, str]:
        """Transport options that give a lane unacked keys of its own (kombu adds the prefix)."""
        name = f"unacked.{lane}"
        return {
            "unacked_key": name,
            "unacked_index_key": f"{name}_index",
            "unacked_mutex_key": f"{name}_mutex",
        }
