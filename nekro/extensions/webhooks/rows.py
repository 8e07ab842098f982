"""Subscriptions of URLs to events of chats, and the deliveries that follow from them.

A delivery is a row before it is sent, and its id follows from webhook, chat and event, so the readers of
any number of gateways make each delivery once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from sqlalchemy import and_, delete, func, insert, literal, select, update

from storage import sql
from storage.repositories.base import Repository, chosen_once, found, is_one_of
from storage.repositories.events import ChatEvent, EventRepository
from storage.sql import now, seconds_from_now
from storage.states import DeliveryState
from storage.tables import CHAT_EVENTS, CHATS, WEBHOOK_CURSORS, WEBHOOK_DELIVERIES, WEBHOOKS

__all__ = ["Delivery", "Webhook", "WebhookRows"]

#: Events of a chat that become deliveries in one transaction.
_PAGE: Final = 200
_MOST_ERROR_CHARS: Final = 500


@dataclass(frozen=True, kw_only=True)
class Webhook:
    """A subscription of a URL to events."""

    id: str
    url: str
    description: str
    #: Patterns of event types.
    events: list[str]
    #: Pattern of chat keys.
    chats: str
    secret_version: int
    is_active: bool
    #: Why it was deactivated; None if an operator did, or if it is active.
    fault: str | None
    created_at: datetime
    updated_at: datetime


@dataclass(frozen=True, kw_only=True)
class Delivery:
    """One event for the URL of a webhook."""

    id: str
    webhook_id: str
    chat_key: str
    number: int
    type: str
    body: str
    state: DeliveryState
    attempts: int
    due_at: datetime
    status: int | None
    error: str | None
    created_at: datetime
    finished_at: datetime | None


class WebhookRows(Repository):
    """Rows of webhooks, of how far they have read, and of their deliveries."""

    async def add(
        self, webhook_id: str, *, url: str, description: str, events: Sequence[str], chats: str
    ) -> Webhook:
        """Add an active webhook, which receives the events from now on."""
        values = {
            "id": webhook_id, "url": url, "description": description, "events": list(events),
            "chats": chats, "secret_version": 1, "is_active": True, "created_at": now(), "updated_at": now(),
        }  # fmt: skip
        await self._rows(insert(WEBHOOKS).values(values))
        known = select(literal(webhook_id), CHATS.c.chat_key, CHATS.c.last_event)
        await self._rows(insert(WEBHOOK_CURSORS).from_select(["webhook_id", "chat_key", "number"], known))
        return await self.get(webhook_id)

    async def find(self, webhook_id: str) -> Webhook | None:
        """Return a webhook; None if there is none."""
        return await self._one_or_none(Webhook, select(WEBHOOKS).where(WEBHOOKS.c.id == webhook_id))

    async def get(self, webhook_id: str) -> Webhook:
        """Return a webhook.

        Raises:
            NotFoundError: there is none.
        """
        return found(await self.find(webhook_id), "webhook", webhook_id)

    async def all(self) -> list[Webhook]:
        """List the webhooks, the oldest first."""
        return await self._all(Webhook, select(WEBHOOKS).order_by(WEBHOOKS.c.created_at, WEBHOOKS.c.id))

    async def change(self, webhook_id: str, values: Mapping[str, Any]) -> Webhook:
        """Change columns of a webhook; one that becomes active goes on with the present events.

        Raises:
            NotFoundError: there is none.
        """
        before = await self.get(webhook_id)
        await self._count(
            update(WEBHOOKS).where(WEBHOOKS.c.id == webhook_id).values({**values, "updated_at": now()})
        )
        if values.get("is_active") and not before.is_active:
            await self._skip_to_present(webhook_id)
        return await self.get(webhook_id)

    async def _skip_to_present(self, webhook_id: str) -> None:
        await self._count(delete(WEBHOOK_CURSORS).where(WEBHOOK_CURSORS.c.webhook_id == webhook_id))
        known = select(literal(webhook_id), CHATS.c.chat_key, CHATS.c.last_event)
        await self._rows(insert(WEBHOOK_CURSORS).from_select(["webhook_id", "chat_key", "number"], known))

    async def remove(self, webhook_id: str) -> None:
        """Delete a webhook and its deliveries.

        Raises:
            NotFoundError: there is none.
        """
        await self.get(webhook_id)
        await self._count(delete(WEBHOOKS).where(WEBHOOKS.c.id == webhook_id))

    async def chats_behind(self, webhook_id: str, *, recent_seconds: float | None, limit: int) -> list[str]:
        """List chats with events that the webhook has not read.

        Args:
            recent_seconds: only chats with an event in this time, which is quick; None looks at all chats.
        """
        cursor = and_(
            WEBHOOK_CURSORS.c.webhook_id == webhook_id, WEBHOOK_CURSORS.c.chat_key == CHATS.c.chat_key
        )
        statement = (
            select(CHATS.c.chat_key)
            .outerjoin(WEBHOOK_CURSORS, cursor)
            .where(CHATS.c.last_event > func.coalesce(WEBHOOK_CURSORS.c.number, 0))
            .limit(limit)
        )
        if recent_seconds is not None:
            recent = select(CHAT_EVENTS.c.chat_key).where(
                CHAT_EVENTS.c.created_at > seconds_from_now(-recent_seconds)
            )
            statement = statement.where(CHATS.c.chat_key.in_(recent))
        return [row[0] for row in await self._rows(statement)]

    async def read_on(
        self, webhook_id: str, chat_key: str, *, body_of: Callable[[ChatEvent], str | None]
    ) -> int:
        """Make deliveries of the next events of a chat; returns how many events were read.

        Another transaction that reads the same chat for the webhook is not waited for.

        Args:
            body_of: returns the body of an event's delivery; None if the webhook does not want the event.
        """
        first = {"webhook_id": webhook_id, "chat_key": chat_key, "number": 0}
        await self._rows(sql.insert(self._dialect, WEBHOOK_CURSORS).values(first).on_conflict_do_nothing())
        own = (WEBHOOK_CURSORS.c.webhook_id == webhook_id) & (WEBHOOK_CURSORS.c.chat_key == chat_key)
        number = await self._scalar(
            select(WEBHOOK_CURSORS.c.number).where(own).with_for_update(skip_locked=True)
        )
        if number is None:
            return 0
        events = await EventRepository(self._connection).after(chat_key, number=number, limit=_PAGE)
        if not events:  # retention deleted what the webhook had not read
            newest = select(CHATS.c.last_event).where(CHATS.c.chat_key == chat_key).scalar_subquery()
            await self._count(update(WEBHOOK_CURSORS).where(own).values(number=newest))
            return 0
        rows = [
            {
                "id": _delivery_id(webhook_id, event), "webhook_id": webhook_id, "chat_key": chat_key,
                "number": event.number, "type": event.type, "body": body,
                "state": DeliveryState.WAITING, "attempts": 0, "due_at": now(), "created_at": now(),
            }
            for event in events
            if (body := body_of(event)) is not None
        ]  # fmt: skip
        for row in rows:
            new = sql.insert(self._dialect, WEBHOOK_DELIVERIES).values(row)
            await self._rows(new.on_conflict_do_nothing(index_elements=[WEBHOOK_DELIVERIES.c.id]))
        await self._count(update(WEBHOOK_CURSORS).where(own).values(number=events[-1].number))
        return len(events)

    async def take_due(self, webhook_id: str, *, lease_seconds: float, limit: int) -> list[Delivery]:
        """Claim due deliveries of a webhook; one that is not ended by then is due again."""
        due = (
            select(WEBHOOK_DELIVERIES.c.id)
            .where(
                WEBHOOK_DELIVERIES.c.webhook_id == webhook_id,
                is_one_of(WEBHOOK_DELIVERIES.c.state, DeliveryState.WAITING),
                WEBHOOK_DELIVERIES.c.due_at <= now(),
            )
            .order_by(WEBHOOK_DELIVERIES.c.due_at)
            .limit(limit)
            .with_for_update(skip_locked=True)
        )
        statement = (
            update(WEBHOOK_DELIVERIES)
            .where(WEBHOOK_DELIVERIES.c.id.in_(chosen_once(due)))
            .values(due_at=seconds_from_now(lease_seconds), attempts=WEBHOOK_DELIVERIES.c.attempts + 1)
            .returning(WEBHOOK_DELIVERIES)
        )
        return sorted(await self._all(Delivery, statement), key=lambda one: (one.chat_key, one.number))

    async def has_due(self) -> set[str]:
        """Return the ids of the webhooks with due deliveries."""
        statement = (
            select(WEBHOOK_DELIVERIES.c.webhook_id)
            .where(
                is_one_of(WEBHOOK_DELIVERIES.c.state, DeliveryState.WAITING),
                WEBHOOK_DELIVERIES.c.due_at <= now(),
            )
            .distinct()
        )
        return {row[0] for row in await self._rows(statement)}

    async def end(
        self, delivery_id: str, state: DeliveryState, *, status: int | None, error: str | None
    ) -> None:
        """End a delivery that waits."""
        await self._change_waiting(delivery_id, state=state, status=status, error=error, finished_at=now())

    async def retry(self, delivery_id: str, *, seconds: float, status: int | None, error: str | None) -> None:
        """Let a delivery be due again after so many seconds."""
        await self._change_waiting(delivery_id, due_at=seconds_from_now(seconds), status=status, error=error)

    async def _change_waiting(self, delivery_id: str, **values: Any) -> None:
        if values.get("error") is not None:
            values["error"] = values["error"][:_MOST_ERROR_CHARS]
        await self._count(
            update(WEBHOOK_DELIVERIES)
            .where(
                WEBHOOK_DELIVERIES.c.id == delivery_id,
                is_one_of(WEBHOOK_DELIVERIES.c.state, DeliveryState.WAITING),
            )
            .values(values)
        )

    async def deliveries(
        self, webhook_id: str, *, state: DeliveryState | None, before: datetime | None, limit: int
    ) -> list[Delivery]:
        """List deliveries of a webhook, the newest first.

        Args:
            state: None means all.
            before: only older ones, for paging.
        """
        statement = select(WEBHOOK_DELIVERIES).where(WEBHOOK_DELIVERIES.c.webhook_id == webhook_id)
        if state is not None:
            statement = statement.where(WEBHOOK_DELIVERIES.c.state == state)
        if before is not None:
            statement = statement.where(WEBHOOK_DELIVERIES.c.created_at < before)
        ordered = statement.order_by(WEBHOOK_DELIVERIES.c.created_at.desc(), WEBHOOK_DELIVERIES.c.id)
        return await self._all(Delivery, ordered.limit(limit))

    async def replay(self, webhook_id: str, *, delivery_id: str | None) -> int:
        """Let ended deliveries be due again, with the same id; returns how many.

        Args:
            delivery_id: None means every dead letter of the webhook.
        """
        chosen = WEBHOOK_DELIVERIES.c.webhook_id == webhook_id
        if delivery_id is None:
            chosen &= is_one_of(WEBHOOK_DELIVERIES.c.state, DeliveryState.DEAD)
        else:
            chosen &= WEBHOOK_DELIVERIES.c.id == delivery_id
            chosen &= is_one_of(WEBHOOK_DELIVERIES.c.state, DeliveryState.DEAD, DeliveryState.DONE)
        values = {"state": DeliveryState.WAITING, "attempts": 0, "due_at": now(), "finished_at": None}
        return await self._count(update(WEBHOOK_DELIVERIES).where(chosen).values(values))


def _delivery_id(webhook_id: str, event: ChatEvent) -> str:
    parts = f"{webhook_id}\0{event.chat_key}\0{event.number}"
    return f"msg_{hashlib.sha256(parts.encode('utf-8', 'surrogatepass')).hexdigest()[:32]}"
