"""The servers of a caller: calls go to the server of their chat, and answers come from there.

Without partitions there is one. Each has a publisher, and a subscription and a reader of its results, unless
all results are on one Redis (``NEKRO_RESULTS__URL``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from broker_config.keys import Keys
from broker_config.partitions import ChatServers, server_settings
from broker_config.redis_library import redis
from broker_config.settings import Settings
from nekro.broker.program_calls import MARK, MARKS_SECONDS, Marked, ProgramCall, Sent
from nekro.broker.publishing import NotServedError, make_publisher
from nekro.broker.redis.link import RedisLink
from nekro.broker.redis.losses import Epoch
from nekro.broker.redis.subscription import Subscription
from nekro_agent.methods import Lane

if TYPE_CHECKING:
    from celery import Celery

__all__ = ["CallServers"]

_PINNED = f"{Lane.PINNED.value}."


class CallServers:
    """Publishes calls of chats, and hears and reads their results."""

    def __init__(
        self,
        make_app: Callable[[], Celery],
        settings: Settings,
        channel: str,
        *,
        on_announced: Callable[[int, bytes], None],
        on_subscribed: Callable[[int], None],
    ) -> None:
        """Connect to nothing yet; ``listen`` to the subscriptions, and ``close``.

        Args:
            channel: the caller's channel for announcements of results.
            on_announced: called with a server's number and each announcement.
            on_subscribed: called with a server's number after each subscription to it.
        """
        self._chats = ChatServers(settings.broker)
        self._keys = Keys(prefix=settings.broker.key_prefix)
        each = server_settings(settings)
        self._publishers = [
            make_publisher(make_app, one.broker, is_further=number > 0) for number, one in enumerate(each)
        ]
        urls = [one.results.url or one.broker.url for one in each]
        #: Numbers of the servers that have results: only the first one if it has those of all.
        self.with_results = [number for number, url in enumerate(urls) if url not in urls[:number]]
        self._readers = {number: RedisLink(each[number].broker, urls[number]) for number in self.with_results}
        self._subscriptions = [
            Subscription(
                each[number].broker,
                urls[number],
                channel,
                partial(on_announced, number),
                on_subscribed=partial(on_subscribed, number),
            )
            for number in self.with_results
        ]

    def __len__(self) -> int:
        """Number of servers."""
        return len(self._publishers)

    async def listen(self, number: int) -> None:
        """Deliver announcements of a server with results until cancelled."""
        await self._subscriptions[self.with_results.index(number)].listen()

    async def send(
        self,
        message: Any,
        *,
        chat_key: str,
        queue: str,
        may_repeat: bool,
        owners: tuple[str, str],
        program: ProgramCall | None = None,
    ) -> tuple[int, Sent]:
        """Publish a call of a chat; returns the number of the server that has it, and how it was published.

        A lane that no worker serves on the chat's server is served on another one: workers may not know that
        server yet. Pinned plugins have their queues on the first server.

        Raises:
            The errors of ``Publisher.send``, but for ``NotServedError``.
        """
        order = self._chats.order(chat_key)
        for number in order if not queue.startswith(_PINNED) else order[-1:]:
            publisher = self._publishers[number]
            if program is not None and publisher.marks is None and await self._mark(number, program):
                return number, Sent(None, is_repeated=True)
            try:
                sent = await publisher.send(
                    message, queue=queue, may_repeat=may_repeat, owners=owners, program=program
                )
            except NotServedError:
                continue
            return number, sent
        raise AssertionError("the first server takes each call")

    async def _mark(self, number: int, program: ProgramCall) -> bool:
        """Mark a call where results are; returns whether it had a mark. Without that Redis it has none."""
        keys = (self._keys.program(program.program_id),)
        try:
            link = self._link_of_marks(number)
            return bool(await link.run(MARK, keys, program.call_id, program.note, MARKS_SECONDS))
        except (redis.RedisError, OSError):
            return False  # it cannot be answered from there either

    def _link_of_marks(self, number: int) -> RedisLink:
        own = self._publishers[number].marks
        return self._readers[number if number in self._readers else 0] if own is None else own

    async def marks(self, chat_key: str, program_id: str) -> dict[str, Marked]:
        """Return the marks of a program's calls by call id.

        Raises:
            RedisError, OSError: a server does not answer.
        """
        found: dict[str, Marked] = {}
        for number in self._chats.order(chat_key):
            flat = await self._link_of_marks(number).execute("HGETALL", self._keys.program(program_id))
            pairs = zip(flat[::2], flat[1::2], strict=True)
            found |= {call_id.decode(): Marked.read(mark) for call_id, mark in pairs}
        return found

    def forget(self, chat_key: str, program_id: str) -> None:
        """Delete the marks of a program that is not run again, without waiting; else they expire."""
        for number in self._chats.order(chat_key):
            sent = self._link_of_marks(number).begin("UNLINK", self._keys.program(program_id))
            asyncio.ensure_future(sent).add_done_callback(_ignore_outcome)

    async def epoch(self, number: int) -> Epoch | None:
        """Return the epoch of a server; see ``Publisher.epoch``."""
        return await self._publishers[number].epoch()

    async def read(self, number: int, keys: Sequence[str]) -> list[bytes | None]:
        """Read stored results.

        Raises:
            RedisError, OSError: the server does not answer.
        """
        found: list[bytes | None] = await self._readers[number].execute("MGET", *keys)
        return found

    def stop_listening(self) -> None:
        """Close the subscriptions."""
        for subscription in self._subscriptions:
            subscription.abort()

    async def close(self) -> None:
        """Close all connections; pending messages are sent."""
        for reader in self._readers.values():
            await reader.close()
        for publisher in self._publishers:
            await publisher.close()


def _ignore_outcome(sent: asyncio.Future[Any]) -> None:
    if not sent.cancelled():
        sent.exception()
