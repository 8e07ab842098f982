"""Clients of adapters, and the requests that they receive.

A message of the agent is a row before anybody sends it, in the transaction that records the message, and it
stays until a client confirmed it. Messages of a channel are sent in order, one at a time.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from sqlalchemy import Select, delete, func, literal, or_, select, update

from storage.repositories.base import Repository, chosen_once, is_one_of
from storage.repositories.leases import is_held_by
from storage.sql import insert, now, seconds_from_now
from storage.states import SendState
from storage.tables import ADAPTER_CLIENTS, ADAPTER_SENDS, ADAPTER_SUBSCRIPTIONS

__all__ = ["MESSAGE_EVENT", "AdapterClient", "AdapterRepository", "AdapterSend"]

#: The request that sends a message; the others are questions.
MESSAGE_EVENT: Final = "send_message"
_OPEN: Final = (SendState.WAITING, SendState.SENT)


@dataclass(frozen=True, kw_only=True)
class AdapterClient:
    """A program that connects chats of an adapter."""

    id: str
    adapter_key: str
    platform: str
    name: str
    version: str
    seen_at: datetime


@dataclass(frozen=True, kw_only=True)
class AdapterSend:
    """A request to a client."""

    id: str
    sequence: int
    channel_id: str
    event: str
    message_id: str | None
    data: dict[str, Any] | None
    state: SendState
    #: How often it was sent.
    attempt: int
    client_id: str | None
    answer: dict[str, Any] | None
    error: str | None
    created_at: datetime


class AdapterRepository(Repository):
    """Rows of clients, their channels and their requests."""

    async def register(
        self, client_id: str, *, adapter_key: str, platform: str, name: str, version: str
    ) -> None:
        """Add a client."""
        values = {
            "id": client_id, "adapter_key": adapter_key, "platform": platform, "name": name,
            "version": version, "created_at": now(), "seen_at": now(), "fence": 0,
        }  # fmt: skip
        await self._rows(insert(self._dialect, ADAPTER_CLIENTS).values(values))

    async def find(self, client_id: str, *, adapter_key: str) -> AdapterClient | None:
        """Return a client of an adapter; None if there is none."""
        statement = select(ADAPTER_CLIENTS).where(
            ADAPTER_CLIENTS.c.id == client_id, ADAPTER_CLIENTS.c.adapter_key == adapter_key
        )
        return await self._one_or_none(AdapterClient, statement)

    async def clients_of(self, channel_id: str, *, adapter_key: str) -> list[AdapterClient]:
        """List the clients that receive a channel, the one seen last first."""
        statement = (
            select(ADAPTER_CLIENTS)
            .join(ADAPTER_SUBSCRIPTIONS, ADAPTER_SUBSCRIPTIONS.c.client_id == ADAPTER_CLIENTS.c.id)
            .where(
                ADAPTER_SUBSCRIPTIONS.c.channel_id == channel_id, ADAPTER_CLIENTS.c.adapter_key == adapter_key
            )
            .order_by(ADAPTER_CLIENTS.c.seen_at.desc())
        )
        return await self._all(AdapterClient, statement)

    async def subscribe(self, client_id: str, channel_ids: Collection[str]) -> None:
        """Let a client receive channels; those that it receives already are skipped."""
        if channel_ids:
            rows = [{"client_id": client_id, "channel_id": one} for one in dict.fromkeys(channel_ids)]
            new = insert(self._dialect, ADAPTER_SUBSCRIPTIONS).values(rows)
            await self._rows(new.on_conflict_do_nothing())

    async def unsubscribe(self, client_id: str, channel_ids: Collection[str]) -> None:
        """Let a client receive channels no more."""
        await self._count(
            delete(ADAPTER_SUBSCRIPTIONS).where(
                ADAPTER_SUBSCRIPTIONS.c.client_id == client_id,
                ADAPTER_SUBSCRIPTIONS.c.channel_id.in_(channel_ids),
            )
        )

    async def connect(self, client_id: str, *, owner: str, lease_seconds: float) -> int:
        """Acquire a client's stream, also from an earlier connection; returns the fencing token.

        What an earlier connection sent and the client did not confirm is due again.
        """
        fence = await self._scalar(
            update(ADAPTER_CLIENTS)
            .where(ADAPTER_CLIENTS.c.id == client_id)
            .values(
                owner=owner,
                lease_until=seconds_from_now(lease_seconds),
                fence=ADAPTER_CLIENTS.c.fence + 1,
                seen_at=now(),
            )
            .returning(ADAPTER_CLIENTS.c.fence)
        )
        await self._count(
            update(ADAPTER_SENDS)
            .where(ADAPTER_SENDS.c.client_id == client_id, is_one_of(ADAPTER_SENDS.c.state, SendState.SENT))
            .values(state=SendState.WAITING, due_at=now())
        )
        return int(fence)

    async def renew(self, client_id: str, fence: int, *, lease_seconds: float) -> bool:
        """Renew the lease of a client's stream; False when a later connection has it."""
        statement = (
            update(ADAPTER_CLIENTS)
            .where(ADAPTER_CLIENTS.c.id == client_id, is_held_by(ADAPTER_CLIENTS, fence))
            .values(lease_until=seconds_from_now(lease_seconds), seen_at=now())
        )
        return bool(await self._count(statement))

    async def disconnect(self, client_id: str, fence: int) -> None:
        """Release a client's stream unless a later connection has it; what it did not confirm is due."""
        if await self._count(
            update(ADAPTER_CLIENTS)
            .where(ADAPTER_CLIENTS.c.id == client_id, is_held_by(ADAPTER_CLIENTS, fence))
            .values(lease_until=None)
        ):
            await self._count(
                update(ADAPTER_SENDS)
                .where(
                    ADAPTER_SENDS.c.client_id == client_id,
                    ADAPTER_SENDS.c.client_fence == fence,
                    is_one_of(ADAPTER_SENDS.c.state, SendState.SENT),
                )
                .values(state=SendState.WAITING, due_at=now())
            )

    async def add_message(self, message_id: str, *, adapter_key: str, channel_id: str) -> None:
        """Add a message to send; its id becomes the request's."""
        await self._add(message_id, adapter_key, channel_id, MESSAGE_EVENT, message_id=message_id)

    async def ask(
        self,
        request_id: str,
        *,
        adapter_key: str,
        channel_id: str,
        event: str,
        data: Mapping[str, Any],
        seconds: float,
    ) -> None:
        """Add a question, which is asked for so many seconds."""
        expires_at = seconds_from_now(seconds)
        await self._add(request_id, adapter_key, channel_id, event, data=dict(data), expires_at=expires_at)

    async def _add(
        self, request_id: str, adapter_key: str, channel_id: str, event: str, **values: Any
    ) -> None:
        common = {
            "id": request_id, "adapter_key": adapter_key, "channel_id": channel_id, "event": event,
            "state": SendState.WAITING, "attempt": 0, "due_at": now(), "created_at": now(),
        }  # fmt: skip
        await self._rows(insert(self._dialect, ADAPTER_SENDS).values({**common, **values}))

    async def get_send(self, request_id: str) -> AdapterSend | None:
        """Return a request; None if there is none."""
        return await self._one_or_none(
            AdapterSend, select(ADAPTER_SENDS).where(ADAPTER_SENDS.c.id == request_id)
        )

    async def has_due(self, client_id: str, *, adapter_key: str) -> bool:
        """Whether a request is due for a client."""
        return await self._scalar(self._due(client_id, adapter_key).limit(1)) is not None

    async def take_due(
        self, client_id: str, fence: int, *, adapter_key: str, answer_seconds: float, limit: int
    ) -> list[AdapterSend]:
        """Claim requests for a client, in order: of each channel only the oldest message that is not ended.

        Args:
            fence: of the client's connection; nothing is taken if a later one exists.
            answer_seconds: a request that is not answered by then is due again.
        """
        is_connected = (
            select(literal(1))
            .where(ADAPTER_CLIENTS.c.id == client_id, is_held_by(ADAPTER_CLIENTS, fence))
            .exists()
        )
        due = self._due(client_id, adapter_key).where(is_connected).limit(limit)
        statement = (
            update(ADAPTER_SENDS)
            .where(ADAPTER_SENDS.c.sequence.in_(chosen_once(due.with_for_update(skip_locked=True))))
            .values(
                state=SendState.SENT,
                attempt=ADAPTER_SENDS.c.attempt + 1,
                client_id=client_id,
                client_fence=fence,
                due_at=seconds_from_now(answer_seconds),
            )
            .returning(ADAPTER_SENDS)
        )
        return sorted(await self._all(AdapterSend, statement), key=lambda send: send.sequence)

    @staticmethod
    def _due(client_id: str, adapter_key: str) -> Select[int]:
        oldest = (
            select(func.min(ADAPTER_SENDS.c.sequence))
            .where(
                ADAPTER_SENDS.c.adapter_key == adapter_key,
                ADAPTER_SENDS.c.event == MESSAGE_EVENT,
                is_one_of(ADAPTER_SENDS.c.state, *_OPEN),
            )
            .group_by(ADAPTER_SENDS.c.channel_id)
        )
        channels = select(ADAPTER_SUBSCRIPTIONS.c.channel_id).where(
            ADAPTER_SUBSCRIPTIONS.c.client_id == client_id
        )
        return (
            select(ADAPTER_SENDS.c.sequence)
            .where(
                ADAPTER_SENDS.c.adapter_key == adapter_key,
                is_one_of(ADAPTER_SENDS.c.state, *_OPEN),
                ADAPTER_SENDS.c.channel_id.in_(channels),
                ADAPTER_SENDS.c.due_at <= now(),
                or_(ADAPTER_SENDS.c.event != MESSAGE_EVENT, ADAPTER_SENDS.c.sequence.in_(oldest)),
                or_(ADAPTER_SENDS.c.expires_at.is_(None), ADAPTER_SENDS.c.expires_at > now()),
            )
            .order_by(ADAPTER_SENDS.c.sequence)
        )

    async def give_up(self, *, adapter_key: str, attempts: int, error: str) -> int:
        """End requests that no client answered after so many attempts, and questions whose time is over."""
        unanswered = (ADAPTER_SENDS.c.attempt >= attempts) & (ADAPTER_SENDS.c.due_at <= now())
        statement = (
            update(ADAPTER_SENDS)
            .where(
                ADAPTER_SENDS.c.adapter_key == adapter_key,
                is_one_of(ADAPTER_SENDS.c.state, *_OPEN),
                or_(unanswered, ADAPTER_SENDS.c.expires_at <= now()),
            )
            .values(state=SendState.FAILED, error=error, finished_at=now())
        )
        return await self._count(statement)

    async def confirm(self, request_id: str, *, client_id: str, answer: Mapping[str, Any]) -> bool:
        """Record that the client that has a request confirmed it; False if it has no such open request."""
        return bool(
            await self._count(
                self._of_client(request_id, client_id).values(
                    state=SendState.DONE, answer=dict(answer), finished_at=now()
                )
            )
        )

    async def refuse(
        self, request_id: str, *, client_id: str, error: str, attempts: int, pause_seconds: float
    ) -> bool:
        """Record that a client refused a request, which fails after so many attempts; else it is due later.

        False if the client has no such open request.
        """
        statement = self._of_client(request_id, client_id)
        if await self._count(
            statement.where(ADAPTER_SENDS.c.attempt >= attempts).values(
                state=SendState.FAILED, error=error, finished_at=now()
            )
        ):
            return True
        return bool(
            await self._count(
                statement.values(state=SendState.WAITING, error=error, due_at=seconds_from_now(pause_seconds))
            )
        )

    @staticmethod
    def _of_client(request_id: str, client_id: str) -> Any:
        # Also while it is due again: the answer may be late.
        return update(ADAPTER_SENDS).where(
            ADAPTER_SENDS.c.id == request_id,
            ADAPTER_SENDS.c.client_id == client_id,
            is_one_of(ADAPTER_SENDS.c.state, *_OPEN),
        )
