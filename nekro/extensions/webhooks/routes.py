"""``/api/v1/webhooks``: subscriptions of URLs to events, their deliveries and dead letters."""

from __future__ import annotations

import re
from datetime import datetime
from http import HTTPStatus
from typing import Final
from urllib.parse import urlsplit

from fastapi import APIRouter, Response

from broker_config.embedded import resolve_signing_key
from nekro.extensions.webhooks.rows import Delivery, Webhook, WebhookRows
from nekro.extensions.webhooks.sender import WebhookSender, address_policy, webhook_secret
from nekro.gateway.document.examples import BEGUN, CHAT, ENDED, Examples
from nekro.gateway.extensions import GatewayPart
from nekro.gateway.operation_routes import ActorDep, route
from nekro.gateway.web.bodies import KeyedRoute
from nekro.operations.actor import Actor, RefusedError, Scope
from nekro.operations.pages import Limit
from nekro_agent.downloads.addresses import checked_url
from nekro_agent.errors import DownloadError, NotFoundError
from nekro_client import models
from storage.accounts.stored_bytes import ROW_BYTES, size_of
from storage.states import DeliveryState, StoredKind
from storage.transaction import Transaction

__all__ = ["GATEWAY_PART"]

router = APIRouter(route_class=KeyedRoute, prefix="/webhooks", tags=["webhooks"])

#: Patterns with these characters are matched in time that grows with their number only.
_PATTERN: Final = re.compile(r"[A-Za-z0-9_.*?-]{1,200}")
_PORTS: Final = {"http": 80, "https": 443}


class _Made(models.Webhook):
    """What is stored as the answer to a request: the secret follows from it and the signing key."""

    secret_version: int


async def create_webhook(actor: Actor, body: models.WebhookBody) -> models.NewWebhook:
    """Subscribe a URL to events from now on; the answer is the only one with the secret."""
    actor.identity.require_all(Scope.ADMIN)
    _check_patterns(body.events, body.chats)
    webhook_id = actor.once.id

    async def work() -> _Made:
        await _check_url(actor, body.url)
        async with actor.services.database.begin() as transaction:
            webhooks = WebhookRows(transaction.connection)
            known = await webhooks.find(webhook_id)
            if known is not None:  # an execution before ended after it was added
                return _made(known)
            # Of the URL only the host: the rest may contain a secret.
            data = {"host": urlsplit(body.url).hostname, "events": body.events, "chats": body.chats}
            await actor.record(transaction, "webhook.create", webhook_id, data)
            webhook = await webhooks.add(
                webhook_id,
                url=body.url,
                description=body.description,
                events=body.events,
                chats=body.chats,
            )
            await _charge(transaction, actor, webhook)
            return _made(webhook)

    return _with_secret(actor, await actor.once.run(_Made, work))


async def list_webhooks(actor: Actor) -> models.Page[models.Webhook]:
    """List the subscriptions, the oldest first."""
    actor.identity.require_all(Scope.ADMIN)
    async with actor.services.database.read() as transaction:
        found = await WebhookRows(transaction.connection).all()
    return models.Page(items=[_shown(one) for one in found])


async def get_webhook(actor: Actor, webhook_id: str) -> models.Webhook:
    """Return one subscription."""
    actor.identity.require_all(Scope.ADMIN)
    async with actor.services.database.read() as transaction:
        return _shown(await WebhookRows(transaction.connection).get(webhook_id))


async def change_webhook(actor: Actor, webhook_id: str, body: models.WebhookChange) -> models.Webhook:
    """Change a subscription; one that is activated again goes on with the present events."""
    actor.identity.require_all(Scope.ADMIN)
    values = body.model_dump(exclude_none=True)
    _check_patterns(body.events or (), body.chats or "*")
    if body.url is not None:
        await _check_url(actor, body.url)
    if body.is_active:
        values["fault"] = None
    async with actor.services.database.begin() as transaction:
        data = {
            "fields": sorted(body.model_dump(exclude_none=True)),
            "events": body.events,
            "chats": body.chats,
        }
        await actor.record(transaction, "webhook.change", webhook_id, data)
        webhook = await WebhookRows(transaction.connection).change(webhook_id, values)
        await _charge(transaction, actor, webhook)
        return _shown(webhook)


@router.delete("/{webhook_id}", status_code=HTTPStatus.NO_CONTENT, response_class=Response)
async def delete_webhook(webhook_id: str, actor: ActorDep) -> None:
    """End a subscription, and delete its deliveries."""
    actor.identity.require_all(Scope.ADMIN)
    async with actor.services.database.begin() as transaction:
        await actor.record(transaction, "webhook.delete", webhook_id)
        await WebhookRows(transaction.connection).remove(webhook_id)
        await transaction.stored_bytes.release(_item(webhook_id))


async def renew_webhook_secret(actor: Actor, webhook_id: str) -> models.NewWebhook:
    """Replace the secret at once."""
    actor.identity.require_all(Scope.ADMIN)

    async def work() -> _Made:
        # An execution after one that died replaces a secret that no client has seen.
        async with actor.services.database.begin() as transaction:
            webhooks = WebhookRows(transaction.connection)
            before = await webhooks.get(webhook_id)
            await actor.record(transaction, "webhook.secret", webhook_id)
            values = {"secret_version": before.secret_version + 1}
            return _made(await webhooks.change(webhook_id, values))

    return _with_secret(actor, await actor.once.run(_Made, work))


async def list_deliveries(
    actor: Actor,
    webhook_id: str,
    state: DeliveryState | None = None,
    limit: Limit = 50,
    cursor: datetime | None = None,
) -> models.Page[models.WebhookDelivery]:
    """List deliveries, the newest first."""
    actor.identity.require_all(Scope.ADMIN)
    async with actor.services.database.read() as transaction:
        webhooks = WebhookRows(transaction.connection)
        await webhooks.get(webhook_id)
        found = await webhooks.deliveries(webhook_id, state=state, before=cursor, limit=limit + 1)
    more = found[limit - 1].created_at.isoformat() if len(found) > limit else None
    return models.Page(items=[_delivery(one) for one in found[:limit]], next_cursor=more)


async def replay_deliveries(actor: Actor, webhook_id: str, body: models.ReplayBody) -> models.Replayed:
    """Deliver one ended delivery again, or every dead letter; the webhook id stays the same."""
    actor.identity.require_all(Scope.ADMIN)

    async def work() -> models.Replayed:
        async with actor.services.database.begin() as transaction:
            webhooks = WebhookRows(transaction.connection)
            await webhooks.get(webhook_id)
            count = await webhooks.replay(webhook_id, delivery_id=body.delivery_id)
            if not count and body.delivery_id is not None:
                raise NotFoundError(f"there is no ended delivery {body.delivery_id!r}")
            data = {"delivery_id": body.delivery_id, "count": count}
            await actor.record(transaction, "webhook.replay", webhook_id, data)
        return models.Replayed(count=count)

    return await actor.once.run(models.Replayed, work, is_repeatable=False)


def _item(webhook_id: str) -> str:
    return f"{StoredKind.DECLARATIONS}:webhook:{webhook_id}"


async def _charge(transaction: Transaction, actor: Actor, webhook: Webhook) -> None:
    size = ROW_BYTES + size_of(webhook.url, webhook.description, webhook.chats, *webhook.events)
    item_id = _item(webhook.id)
    await transaction.stored_bytes.hold(actor.identity.key_id, item_id, StoredKind.DECLARATIONS, size)


def _check_patterns(events: object, chats: str) -> None:
    patterns = [*(events if isinstance(events, list) else ()), chats]
    for pattern in patterns:
        # Of chat keys only the length matters: they may have any characters.
        if not _PATTERN.fullmatch(pattern) and not (pattern is chats and 0 < len(chats) <= 200):
            raise _invalid(f"{pattern!r} is not a pattern like message.* or group_1")


async def _check_url(actor: Actor, url: str) -> None:
    """Refuse a URL that no delivery could reach; the address is checked again at every delivery."""
    try:
        address, host = checked_url(url)
        parts = urlsplit(address)
        await address_policy(actor.services.settings.gateway).resolve(
            host, parts.port or _PORTS[parts.scheme]
        )
    except DownloadError as exc:
        raise _invalid(str(exc)) from exc
    if parts.username is not None:
        raise _invalid("the URL has a user name; deliveries are signed instead")


def _invalid(detail: str) -> RefusedError:
    return RefusedError(HTTPStatus.UNPROCESSABLE_ENTITY, "invalid_request", detail)


def _made(webhook: Webhook) -> _Made:
    return _Made.model_validate(webhook, from_attributes=True)


def _with_secret(actor: Actor, made: _Made) -> models.NewWebhook:
    key = resolve_signing_key(actor.services.settings).get_secret_value()
    secret = webhook_secret(key, made.id, made.secret_version)
    return models.NewWebhook(**made.model_dump(exclude={"secret_version"}), secret=secret)


def _shown(webhook: Webhook) -> models.Webhook:
    return models.Webhook.model_validate(webhook, from_attributes=True)


def _delivery(delivery: Delivery) -> models.WebhookDelivery:
    is_due = delivery.state is DeliveryState.WAITING
    fields = {"event_number": delivery.number, "due_at": delivery.due_at if is_due else None}
    return models.WebhookDelivery.model_validate({**vars(delivery), **fields})


_WEBHOOK: Final = "70efdf2ec9b086079795c442636b55fb"
_DELIVERY: Final = "6f4922f45568161a8cdf4ad2299f6d23"
_WEBHOOK_ROW: Final = {
    "id": _WEBHOOK,
    "url": "https://shop.example/hooks/nekro",
    "description": "Answers for the shop",
    "events": ["message.sent", "turn.ended"],
    "chats": "web-*",
    "is_active": True,
    "created_at": BEGUN,
}

_EXAMPLES: Final = Examples(
    parameters={
        "webhook_id": _WEBHOOK,
    },
    models={
        "NewWebhook": {**_WEBHOOK_ROW, "secret": "whsec_…"},
        "ReplayBody": {"delivery_id": _DELIVERY},
        "Replayed": {"count": 1},
        "Webhook": _WEBHOOK_ROW,
        "WebhookBody": {
            "url": _WEBHOOK_ROW["url"],
            "events": _WEBHOOK_ROW["events"],
            "chats": "web-*",
            "description": _WEBHOOK_ROW["description"],
        },
        "WebhookChange": {"is_active": True},
        "WebhookDelivery": {
            "id": _DELIVERY,
            "chat_key": CHAT,
            "event_number": 42,
            "type": "message.sent",
            "state": "done",
            "attempts": 1,
            "status": 200,
            "created_at": BEGUN,
            "finished_at": ENDED,
        },
    },
)

route(router, "POST", "", create_webhook, status=HTTPStatus.CREATED)
route(router, "GET", "", list_webhooks)
route(router, "GET", "/{webhook_id}", get_webhook)
route(router, "PATCH", "/{webhook_id}", change_webhook)
route(router, "POST", "/{webhook_id}/secret", renew_webhook_secret)
route(router, "GET", "/{webhook_id}/deliveries", list_deliveries)
route(router, "POST", "/{webhook_id}/replay", replay_deliveries, status=HTTPStatus.ACCEPTED)

GATEWAY_PART: Final = GatewayPart(
    api=(router,), build=lambda services, _hub: WebhookSender(services), examples=_EXAMPLES
)
