"""Delivers events to the URLs of webhooks.

Gateways deliver, because they are the processes that speak HTTP with the outside. Any number of them work on
the same rows: one transaction takes a delivery for a limited time, so two gateways send the same delivery
only if the first one ended or hung before it recorded the answer. The receiver then sees the same webhook id
again. The secrets that sign deliveries follow from the fleet's signing key and are not stored.
"""

from __future__ import annotations

import asyncio
import base64
import hmac
import random
import time
from collections import Counter
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from functools import partial
from typing import Final

from loguru import logger
from standardwebhooks import Webhook as Signature

from broker_config.embedded import resolve_signing_key
from broker_config.settings import GatewaySettings
from nekro.app.services import Services
from nekro.base.metrics import metrics
from nekro.base.tasks import end_tasks, log_errors
from nekro.extensions.webhooks.rows import Delivery, Webhook, WebhookRows
from nekro.gateway.extensions import Running
from nekro.gateway.outgoing import OutgoingHttp, RequestFailedError
from nekro.gateway.streams.events import stream_event
from nekro.wire.plain_json import json_text
from nekro_agent.downloads.addresses import AddressPolicy
from nekro_agent.durations import FRESH_SECONDS
from nekro_client.models import WebhookPayload
from storage.repositories.events import ChatEvent
from storage.states import DeliveryState

__all__ = [
    "WebhookSender",
    "address_policy",
    "body_of",
    "wants",
    "webhook_secret",
]


def address_policy(settings: GatewaySettings) -> AddressPolicy:
    """Return which addresses a webhook may have."""
    return AddressPolicy(settings.webhook_allow_private, setting="NEKRO_GATEWAY__WEBHOOK_ALLOW_PRIVATE")


def webhook_secret(signing_key: str, webhook_id: str, version: int) -> str:
    """Return the secret of a webhook in the form of Standard Webhooks: ``whsec_<Base64>``."""
    purpose = f"nekro-workers webhook secret 1\0{webhook_id}\0{version}"
    secret = hmac.digest(signing_key.encode(), purpose.encode(), "sha256")
    return f"whsec_{base64.b64encode(secret).decode()}"


#: Longest request to the URL of a webhook; the delivery is then tried again later.
_SEND_SECONDS: Final = 15.0
#: Longer than a delivery can take, so that a gateway that works is never overtaken.
_TAKEN_SECONDS: Final = 60.0
#: Deliveries of one webhook under way in one gateway; a slow URL does not delay the others.
_AT_A_TIME: Final = 8

_MOST_CHATS: Final = 200
#: Chats without an event in this time are looked at only by the complete check.
_RECENT_SECONDS: Final = 600.0
#: How often all chats are looked at.
_CHECK_ALL_SECONDS: Final = 60.0
#: Pause after the first failed delivery: a receiver restarts within it or within the next pauses.
_FIRST_PAUSE_SECONDS: Final = 5.0
#: How many times as long each further pause is.
_BACK_OFF: Final = 4
#: Two attempts a day for a URL that is down for long.
_LONGEST_PAUSE_SECONDS: Final = 12 * 3600.0

_GONE: Final = 410


class WebhookSender(Running):
    """Delivers for one gateway; ``start`` and ``close`` it on the loop of the services."""

    def __init__(self, services: Services) -> None:
        settings = services.settings
        self._database = services.database
        self._settings = settings.gateway
        self._key = resolve_signing_key(settings).get_secret_value()
        self.http = OutgoingHttp(address_policy(self._settings))
        self._running: Counter[str] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()
        self._task: asyncio.Task[None] | None = None
        self._checked_at: float | None = None

    def start(self) -> None:
        """Deliver from now on."""
        self._task = asyncio.create_task(self._deliver_forever(), name="nekro-webhooks")

    async def close(self) -> None:
        """Stop; what was not answered yet is delivered again later."""
        await end_tasks(self._task, *self._tasks)
        await self.http.close()

    async def _deliver_forever(self) -> None:
        while True:
            with log_errors("webhooks_not_delivered"):
                await self._look()
            await asyncio.sleep(FRESH_SECONDS / 2)

    async def _look(self) -> None:
        async with self._database.read() as transaction:
            webhooks = [one for one in await WebhookRows(transaction.connection).all() if one.is_active]
        if not webhooks:
            return
        is_complete = self._checked_at is None or time.monotonic() - self._checked_at > _CHECK_ALL_SECONDS
        if is_complete:
            self._checked_at = time.monotonic()
        for webhook in webhooks:
            with log_errors("webhook_events_not_read", webhook=webhook.id):  # the others do not depend on it
                await self._read(webhook, recent_seconds=None if is_complete else _RECENT_SECONDS)
        async with self._database.read() as transaction:
            due = await WebhookRows(transaction.connection).has_due()
        for webhook in webhooks:
            if webhook.id in due:
                with log_errors("webhook_deliveries_not_taken", webhook=webhook.id):
                    await self._take(webhook)

    async def _read(self, webhook: Webhook, *, recent_seconds: float | None) -> None:
        """Make deliveries of new events."""
        async with self._database.read() as transaction:
            chats = await WebhookRows(transaction.connection).chats_behind(
                webhook.id, recent_seconds=recent_seconds, limit=_MOST_CHATS
            )
        for chat_key in chats:
            async with self._database.begin() as transaction:
                webhooks = WebhookRows(transaction.connection)
                await webhooks.read_on(webhook.id, chat_key, body_of=partial(body_of, webhook))

    async def _take(self, webhook: Webhook) -> None:
        free = _AT_A_TIME - self._running[webhook.id]
        if free <= 0:
            return
        async with self._database.begin() as transaction:
            webhooks = WebhookRows(transaction.connection)
            taken = await webhooks.take_due(webhook.id, lease_seconds=_TAKEN_SECONDS, limit=free)
        for delivery in taken:
            self._running[webhook.id] += 1
            task = asyncio.create_task(self._deliver(webhook, delivery))
            self._tasks.add(task)
            task.add_done_callback(partial(self._ended, webhook.id))

    def _ended(self, webhook_id: str, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._running[webhook_id] -= 1

    async def _deliver(self, webhook: Webhook, delivery: Delivery) -> None:
        with log_errors("webhook_delivery_not_recorded", delivery_id=delivery.id):
            status, error = await self._send(webhook, delivery)
            await self._record(webhook, delivery, status, error)

    async def _send(self, webhook: Webhook, delivery: Delivery) -> tuple[int | None, str | None]:
        """Return the status of the answer, or None and why there is none."""
        sent_at = datetime.now(tz=UTC)
        secret = webhook_secret(self._key, webhook.id, webhook.secret_version)
        headers = {
            "Content-Type": "application/json",
            "webhook-id": delivery.id,
            "webhook-timestamp": str(int(sent_at.timestamp())),
            "webhook-signature": Signature(secret).sign(delivery.id, sent_at, delivery.body),
        }
        try:
            content = delivery.body.encode()
            status = await self.http.post(
                webhook.url, headers=headers, content=content, seconds=_SEND_SECONDS
            )
        except RequestFailedError as exc:
            return None, str(exc)
        return status, None if 200 <= status < 300 else f"the answer has status {status}"

    async def _record(
        self, webhook: Webhook, delivery: Delivery, status: int | None, error: str | None
    ) -> None:
        async with self._database.begin() as transaction:
            webhooks = WebhookRows(transaction.connection)
            if error is None:
                outcome = "sent"
                await webhooks.end(delivery.id, DeliveryState.DONE, status=status, error=None)
            elif status == _GONE or delivery.attempts >= self._settings.webhook_attempts:
                outcome = "dead"
                await webhooks.end(delivery.id, DeliveryState.DEAD, status=status, error=error)
            else:
                outcome, seconds = "failed", self._pause(delivery.attempts)
                await webhooks.retry(delivery.id, seconds=seconds, status=status, error=error)
            if status == _GONE:
                fault = "the URL answered that it is gone (410)"
                await webhooks.change(webhook.id, {"is_active": False, "fault": fault})
        metrics().webhook_deliveries.labels(outcome).inc()
        log = logger.bind(
            webhook=webhook.id, delivery_id=delivery.id, attempt=delivery.attempts, status=status
        )
        if error is not None:
            log.bind(error=error).warning("webhook_not_delivered")

    def _pause(self, attempts: int) -> float:
        seconds: float = _FIRST_PAUSE_SECONDS * _BACK_OFF ** (attempts - 1)
        return min(seconds, _LONGEST_PAUSE_SECONDS) * random.uniform(1, 1.2)  # noqa: S311 - spreads retries


def wants(webhook: Webhook, *, chat_key: str, event_type: str) -> bool:
    """Whether a webhook receives an event."""
    return fnmatchcase(chat_key, webhook.chats) and any(
        fnmatchcase(event_type, pattern) for pattern in webhook.events
    )


def body_of(webhook: Webhook, event: ChatEvent) -> str | None:
    """Return the body of the delivery of an event; None if the webhook does not receive it."""
    if not wants(webhook, chat_key=event.chat_key, event_type=event.type):
        return None
    data = stream_event(event).event
    return json_text(WebhookPayload(type=event.type, timestamp=event.created_at, data=data))
