"""``/api/v1/webhooks``: subscriptions of URLs to events, their deliveries and dead letters."""

from __future__ import annotations

import re
from datetime import datetime
from http import HTTPStatus
from typing import Annotated, Final
from urllib.parse import urlsplit

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import JSONResponse

from broker_config.embedded import resolve_signing_key
from nekro.app.services import Services
from nekro.extensions.webhooks.rows import Delivery, Webhook, WebhookRows
from nekro.extensions.webhooks.sender import WebhookSender, webhook_secret
from nekro.gateway.dependencies import IdentityDep, ServicesDep, record_act
from nekro.gateway.extensions import GatewayPart, running
from nekro.gateway.idempotency import OnceDep, with_content
from nekro.gateway.web.bodies import KeyedRoute
from nekro.operations.actor import Identity, RefusedError, Scope
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


@router.post("", status_code=HTTPStatus.CREATED, response_model=models.NewWebhook)
async def create_webhook(
    body: models.WebhookBody, request: Request, services: ServicesDep, identity: IdentityDep, once: OnceDep
) -> Response:
    """Subscribe a URL to events from now on; the answer is the only one with the secret."""
    identity.require_all(Scope.ADMIN)
    _check_patterns(body.events, body.chats)
    webhook_id = once.id

    async def work() -> _Made:
        await _check_url(request, body.url)
        async with services.database.begin() as transaction:
            webhooks = WebhookRows(transaction.connection)
            known = await webhooks.find(webhook_id)
            if known is not None:  # an execution before ended after it was added
                return _made(known)
            # Of the URL only the host: the rest may contain a secret.
            data = {"host": urlsplit(body.url).hostname, "events": body.events, "chats": body.chats}
            await record_act(transaction.audit, request, identity, "webhook.create", webhook_id, data)
            webhook = await webhooks.add(
                webhook_id,
                url=body.url,
                description=body.description,
                events=body.events,
                chats=body.chats,
            )
            await _charge(transaction, identity, webhook)
            return _made(webhook)

    return _with_secret(services, await once.respond(work, status=HTTPStatus.CREATED))


@router.get("")
async def list_webhooks(services: ServicesDep, identity: IdentityDep) -> models.Page[models.Webhook]:
    """List the subscriptions, the oldest first."""
    identity.require_all(Scope.ADMIN)
    async with services.database.read() as transaction:
        found = await WebhookRows(transaction.connection).all()
    return models.Page(items=[_shown(one) for one in found])


@router.get("/{webhook_id}")
async def get_webhook(webhook_id: str, services: ServicesDep, identity: IdentityDep) -> models.Webhook:
    """Return one subscription."""
    identity.require_all(Scope.ADMIN)
    async with services.database.read() as transaction:
        return _shown(await WebhookRows(transaction.connection).get(webhook_id))


@router.patch("/{webhook_id}")
async def change_webhook(
    webhook_id: str,
    body: models.WebhookChange,
    request: Request,
    services: ServicesDep,
    identity: IdentityDep,
) -> models.Webhook:
    """Change a subscription; one that is activated again goes on with the present events."""
    identity.require_all(Scope.ADMIN)
    values = body.model_dump(exclude_none=True)
    _check_patterns(body.events or (), body.chats or "*")
    if body.url is not None:
        await _check_url(request, body.url)
    if body.is_active:
        values["fault"] = None
    async with services.database.begin() as transaction:
        data = {
            "fields": sorted(body.model_dump(exclude_none=True)),
            "events": body.events,
            "chats": body.chats,
        }
        await record_act(transaction.audit, request, identity, "webhook.change", webhook_id, data)
        webhook = await WebhookRows(transaction.connection).change(webhook_id, values)
        await _charge(transaction, identity, webhook)
        return _shown(webhook)


@router.delete("/{webhook_id}", status_code=HTTPStatus.NO_CONTENT, response_class=Response)
async def delete_webhook(
    webhook_id: str, request: Request, services: ServicesDep, identity: IdentityDep
) -> None:
    """End a subscription, and delete its deliveries."""
    identity.require_all(Scope.ADMIN)
    async with services.database.begin() as transaction:
        await record_act(transaction.audit, request, identity, "webhook.delete", webhook_id)
        await WebhookRows(transaction.connection).remove(webhook_id)
        await transaction.stored_bytes.release(_item(webhook_id))


@router.post("/{webhook_id}/secret", response_model=models.NewWebhook)
async def renew_webhook_secret(
    webhook_id: str, request: Request, services: ServicesDep, identity: IdentityDep, once: OnceDep
) -> Response:
    """Replace the secret at once."""
    identity.require_all(Scope.ADMIN)

    async def work() -> _Made:
        # An execution after one that died replaces a secret that no client has seen.
        async with services.database.begin() as transaction:
            webhooks = WebhookRows(transaction.connection)
            before = await webhooks.get(webhook_id)
            await record_act(transaction.audit, request, identity, "webhook.secret", webhook_id)
            values = {"secret_version": before.secret_version + 1}
            return _made(await webhooks.change(webhook_id, values))

    return _with_secret(services, await once.respond(work))


@router.get("/{webhook_id}/deliveries")
async def list_deliveries(
    webhook_id: str,
    services: ServicesDep,
    identity: IdentityDep,
    state: DeliveryState | None = None,
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
    cursor: datetime | None = None,
) -> models.Page[models.WebhookDelivery]:
    """List deliveries, the newest first."""
    identity.require_all(Scope.ADMIN)
    async with services.database.read() as transaction:
        webhooks = WebhookRows(transaction.connection)
        await webhooks.get(webhook_id)
        found = await webhooks.deliveries(webhook_id, state=state, before=cursor, limit=limit + 1)
    more = found[limit - 1].created_at.isoformat() if len(found) > limit else None
    return models.Page(items=[_delivery(one) for one in found[:limit]], next_cursor=more)


@router.post("/{webhook_id}/replay", status_code=HTTPStatus.ACCEPTED, response_model=models.Replayed)
async def replay_deliveries(
    webhook_id: str,
    body: models.ReplayBody,
    request: Request,
    services: ServicesDep,
    identity: IdentityDep,
    once: OnceDep,
) -> Response:
    """Deliver one ended delivery again, or every dead letter; the webhook id stays the same."""
    identity.require_all(Scope.ADMIN)

    async def work() -> models.Replayed:
        async with services.database.begin() as transaction:
            webhooks = WebhookRows(transaction.connection)
            await webhooks.get(webhook_id)
            count = await webhooks.replay(webhook_id, delivery_id=body.delivery_id)
            if not count and body.delivery_id is not None:
                raise NotFoundError(f"there is no ended delivery {body.delivery_id!r}")
            data = {"delivery_id": body.delivery_id, "count": count}
            await record_act(transaction.audit, request, identity, "webhook.replay", webhook_id, data)
        return models.Replayed(count=count)

    return await once.respond(work, status=HTTPStatus.ACCEPTED, is_repeatable=False)


def _item(webhook_id: str) -> str:
    return f"{StoredKind.DECLARATIONS}:webhook:{webhook_id}"


async def _charge(transaction: Transaction, identity: Identity, webhook: Webhook) -> None:
    size = ROW_BYTES + size_of(webhook.url, webhook.description, webhook.chats, *webhook.events)
    item_id = _item(webhook.id)
    await transaction.stored_bytes.hold(identity.key_id, item_id, StoredKind.DECLARATIONS, size)


def _check_patterns(events: object, chats: str) -> None:
    patterns = [*(events if isinstance(events, list) else ()), chats]
    for pattern in patterns:
        # Of chat keys only the length matters: they may have any characters.
        if not _PATTERN.fullmatch(pattern) and not (pattern is chats and 0 < len(chats) <= 200):
            raise _invalid(f"{pattern!r} is not a pattern like message.* or group_1")


async def _check_url(request: Request, url: str) -> None:
    """Refuse a URL that no delivery could reach; the address is checked again at every delivery."""
    sender = running(request, WebhookSender)
    try:
        address, host = checked_url(url)
        parts = urlsplit(address)
        await sender.http.policy.resolve(host, parts.port or _PORTS[parts.scheme])
    except DownloadError as exc:
        raise _invalid(str(exc)) from exc
    if parts.username is not None:
        raise _invalid("the URL has a user name; deliveries are signed instead")


def _invalid(detail: str) -> RefusedError:
    return RefusedError(HTTPStatus.UNPROCESSABLE_ENTITY, "invalid_request", detail)


def _made(webhook: Webhook) -> _Made:
    return _Made.model_validate(webhook, from_attributes=True)


def _with_secret(services: Services, answer: JSONResponse) -> JSONResponse:
    made = _Made.model_validate_json(bytes(answer.body))
    key = resolve_signing_key(services.settings).get_secret_value()
    secret = webhook_secret(key, made.id, made.secret_version)
    shown = models.NewWebhook(**made.model_dump(exclude={"secret_version"}), secret=secret)
    return with_content(answer, shown.model_dump(mode="json"))


def _shown(webhook: Webhook) -> models.Webhook:
    return models.Webhook.model_validate(webhook, from_attributes=True)


def _delivery(delivery: Delivery) -> models.WebhookDelivery:
    is_due = delivery.state is DeliveryState.WAITING
    fields = {"event_number": delivery.number, "due_at": delivery.due_at if is_due else None}
    return models.WebhookDelivery.model_validate({**vars(delivery), **fields})


GATEWAY_PART: Final = GatewayPart(api=(router,), build=lambda services, _hub: WebhookSender(services))
