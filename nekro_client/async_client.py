"""The client: turns, jobs, approvals, timers, dead letters and keys, and what a gateway has beside chats."""

from __future__ import annotations

from types import TracebackType

import httpx

from nekro_client.async_chats import AsyncChat, AsyncEventStream
from nekro_client.async_connections import AsyncChangeStream, AsyncConnection, AsyncRunStream
from nekro_client.client_requests import ClientRequests, run_body, run_operation
from nekro_client.models import Turn
from nekro_client.operations import RETRY_SECONDS
from nekro_client.requests import Asynchronous
from nekro_client.streams import ChangeCursor, TurnWait
from nekro_client.work_requests import (
    ApprovalRequests,
    DeadLetterRequests,
    JobRequests,
    KeyRequests,
    TimerRequests,
    TurnRequests,
)

__all__ = [
    "AsyncApprovals",
    "AsyncClient",
    "AsyncDeadLetters",
    "AsyncJobs",
    "AsyncKeys",
    "AsyncTimers",
    "AsyncTurns",
]


class AsyncTurns(TurnRequests, Asynchronous):
    """What messages, calls, timers and jobs caused."""

    async def wait(self, turn_id: str, *, timeout_seconds: float | None = None) -> Turn:
        """Return a turn when it has ended or waits for a person, as the chat's event stream shows.

        It waits if ``waits_for`` or ``waits`` names something; what that starts is a turn of its own.

        Raises:
            WaitTimeoutError: it has not after ``timeout_seconds``; None waits without end.
        """
        wait = TurnWait(turn_id, timeout_seconds=timeout_seconds)
        turn = await self.get(turn_id)
        while not wait.is_over(turn):
            if wait.position is None:
                wait.position = await AsyncChat(self._connection, turn.chat_key).last_event_number()
            else:
                await self._wait_for_end_event(wait, turn)
            turn = await self.get(turn_id)
        return turn

    async def _wait_for_end_event(self, wait: TurnWait, turn: Turn) -> None:
        async with AsyncEventStream(self._connection.http, wait.cursor(turn)) as events:
            async for event in events:
                if event.turn_id == wait.turn_id:
                    return


class AsyncJobs(JobRequests, Asynchronous):
    """Background jobs of plugins."""


class AsyncApprovals(ApprovalRequests, Asynchronous):
    """Calls that wait for approval, and decisions on them."""


class AsyncTimers(TimerRequests, Asynchronous):
    """Timers of chats that have not ended."""


class AsyncDeadLetters(DeadLetterRequests, Asynchronous):
    """Messages that workers could not process."""


class AsyncKeys(KeyRequests, Asynchronous):
    """Keys of the API; for keys with the scope admin."""


class AsyncClient(ClientRequests, Asynchronous):
    """A connection to a gateway for one event loop, usable as a context manager.

    A request that fails in passing (connection lost, 429, 503) is sent again with growing pauses. A POST has
    an idempotency key, so the gateway does what it asks for once.
    """

    def __init__(
        self,
        url: str | None = None,
        key: str | None = None,
        *,
        retry_seconds: float = RETRY_SECONDS,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """Connect on first use.

        Args:
            url: of the gateway, as ``https://agent.example.org``; None reads ``NEKRO_URL``.
            key: ``nk_…``; None reads ``NEKRO_KEY``, else, for a gateway on this host, the file of `nekro up`
                (``nekro_client.local_key``); "" sends none.
            retry_seconds: how long a request that fails in passing is repeated; 0: not at all.
            transport: for tests and special networks; None is httpx's.

        Raises:
            ClientError: there is no URL, or it is not one of HTTP.
        """
        super().__init__(AsyncConnection(url, key, retry_seconds=retry_seconds, transport=transport))
        self.turns = AsyncTurns(self._connection)
        self.jobs = AsyncJobs(self._connection)
        self.approvals = AsyncApprovals(self._connection)
        self.timers = AsyncTimers(self._connection)
        self.dead_letters = AsyncDeadLetters(self._connection)
        self.keys = AsyncKeys(self._connection)

    async def __aenter__(self) -> AsyncClient:
        """Return the client."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the connections."""
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self._connection.close()

    def chat(self, key: str) -> AsyncChat:
        """Return a chat by its key; it need not exist yet.

        Raises:
            ValueError: it cannot be a chat key.
        """
        return AsyncChat(self._connection, key)

    def changes(self, *, give_up_seconds: float | None = 300) -> AsyncChangeStream:
        """Return hints about what changes, without end: which list to read again.

        It begins with the hint ``reset``: read what you show. It comes again when hints may have been missed,
        after a lost connection for example. ``close`` ends the stream.

        Args:
            give_up_seconds: how long the gateway may be out of reach; None means for ever.
        """
        return AsyncChangeStream(self._connection.http, ChangeCursor(give_up_seconds=give_up_seconds))

    def stream_run(
        self,
        code: str,
        *,
        chat_key: str,
        user_id: str | None = None,
        follow_up: bool = False,
        timeout_seconds: float | None = None,
        idempotency_key: str | None = None,
    ) -> AsyncRunStream:
        """Run code as ``run`` does; returns its output, piece by piece while it runs, and then its report."""
        body = run_body(code, chat_key, user_id, follow_up, timeout_seconds)
        return AsyncRunStream(
            self._connection, run_operation(body, seconds=0, idempotency_key=idempotency_key)
        )
