"""Which Redis serves a chat: chats are partitioned over the servers of ``NEKRO_BROKER__PARTITIONS``.

The server of ``NEKRO_BROKER__URL`` is the first one and serves a share of the chats like the others. What
belongs to no chat is on it alone: control commands, announcements of events, dead letters, pinned queues.

The choice is rendezvous hashing (Thaler and Ravishankar, 1998): a chat is served by the server with the
highest hash of chat and server, so of N servers a new one takes one Nth of the chats, and the others keep
theirs. It may differ between processes while a list is changed. That costs nothing, because each worker
takes messages from all servers of its list, and claims are rows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from broker_config.settings import BrokerSettings, Settings
from broker_config.urls import is_drained, server_name, without_drain

__all__ = ["ChatServers", "server_settings"]


@dataclass(frozen=True, slots=True)
class _Server:
    #: Its place in the list of servers; 0 is the first one.
    number: int
    #: What is hashed: the URL without user and password, which may change.
    name: bytes


class ChatServers:
    """Chooses the servers of chats."""

    def __init__(self, broker: BrokerSettings) -> None:
        """Create it.

        Args:
            broker: with its URL resolved.
        """
        urls = [broker.url or "", *broker.partitions]
        self._servers = [
            _Server(number, server_name(url).encode())
            for number, url in enumerate(urls)
            if not is_drained(url)
        ]

    def order(self, chat_key: str) -> Sequence[int]:
        """Return the numbers of the servers that may serve a chat: the best one first.

        The next one is for a lane that no worker serves there. The last one is the first server of the list
        (0), which all workers serve.
        """
        if len(self._servers) == 1:
            return (0,)
        key = chat_key.encode("utf-8", "surrogatepass")
        ranked = sorted(self._servers, key=lambda one: _weight(key, one.name), reverse=True)
        numbers = [one.number for one in ranked]
        return numbers[: numbers.index(0) + 1]


def server_settings(settings: Settings) -> tuple[Settings, ...]:
    """Return the settings of each server in turn: of a process whose only broker it is.

    Args:
        settings: with every URL resolved.
    """
    broker, results = settings.broker, settings.results
    has_own_results = results.url not in (None, broker.url)

    def only(url: str) -> Settings:
        groups = {
            "broker": broker.model_copy(update={"url": url, "partitions": ()}),
            "results": results if has_own_results else results.model_copy(update={"url": url}),
        }
        return settings.model_copy(update=groups)

    return (settings, *(only(without_drain(url)) for url in broker.partitions))


def _weight(key: bytes, name: bytes) -> bytes:
    return hashlib.blake2b(b"%d:%s%s" % (len(key), key, name), digest_size=8).digest()
