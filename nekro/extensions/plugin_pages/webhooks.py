"""Webhooks of plugins: ``POST /api/webhook/{endpoint}``, as Nekro Agent serves them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any, Final

from fastapi import APIRouter, Request
from pydantic import BaseModel
from starlette.datastructures import Headers

from broker_config.settings import GatewaySettings, PluginAccess
from nekro.app.services import Services
from nekro.extensions.plugin_pages.forwarding import admit, is_reachable, not_served, plugin_headers
from nekro.gateway.dependencies import ServicesDep
from nekro.gateway.idempotency import NOT_ONCE
from nekro.plugins.entries import WebhookEntry
from nekro.plugins.entry_registry import Registry
from nekro_agent.errors import NekroError
from nekro_agent.ports import ChatInfo

__all__ = ["router"]

router = APIRouter(tags=["plugins"])

#: A webhook belongs to no chat.
_NO_CHAT: Final = ChatInfo(chat_key="", container_key="")


class WebhookAnswer(BaseModel):
    """Answer to a webhook, in the form of Nekro Agent."""

    #: Whether the webhooks of all plugins returned.
    success: bool
    message: str
    #: ``results``: a list of ``{"plugin_key", "result"}``; ``errors``: of ``{"plugin_key", "error"}``.
    data: dict[str, list[dict[str, Any]]]


@router.post(
    "/api/webhook/{endpoint}",
    openapi_extra={"requestBody": {"content": {"application/json": {}}}, **NOT_ONCE},
)
async def receive_webhook(endpoint: str, request: Request, services: ServicesDep) -> WebhookAnswer:
    """Run the webhook of every plugin that serves the endpoint, each as a task of its own.

    A plugin with the access ``key`` takes part if the request has a key, also as ``X-Webhook-Token`` or
    ``?webhook_token=``, because senders of webhooks often cannot set ``Authorization``.
    """
    await services.refresh()
    settings = services.settings.gateway
    entries = _entries(services.registry, settings, endpoint)
    if not entries:
        raise not_served(request.url.path)
    entries = await _admitted(request, settings, entries)
    body = await request.body()
    await services.plugin_tasks.refresh()
    sent = (
        _run(services, one, _headers(request, settings.access_to(one.plugin_key)), _parsed(body))
        for one in entries
    )
    ends = await asyncio.gather(*sent)
    results, errors = [end for end in ends if "result" in end], [end for end in ends if "error" in end]
    return WebhookAnswer(
        success=not errors,
        message=f"{len(results)} webhooks returned, {len(errors)} failed",
        data={"results": results, "errors": errors},
    )


async def _run(
    services: Services, entry: WebhookEntry, headers: Mapping[str, str], body: Any
) -> dict[str, Any]:
    """Run one webhook on a worker; returns the entry of the answer.

    Args:
        body: plain data.
    """
    tasks, seconds = services.plugin_tasks, services.settings.gateway.plugin_seconds
    try:
        value = await tasks.run(
            services.caller,
            entry.task,
            (dict(headers), body),
            plugin_key=entry.plugin_key,
            chat=_NO_CHAT,
            user_id=None,
            timeout_seconds=seconds,
            lane=tasks.lanes.lane_of(entry),
        )
    except NekroError as exc:
        return {"plugin_key": entry.plugin_key, "error": str(exc)}
    return {"plugin_key": entry.plugin_key, "result": value}


def _entries(registry: Registry, settings: GatewaySettings, endpoint: str) -> list[WebhookEntry]:
    return [
        webhook
        for plugin in registry.plugins
        for webhook in plugin.webhooks
        if webhook.endpoint == endpoint and is_reachable(settings, plugin)
    ]


async def _admitted(
    request: Request, settings: GatewaySettings, entries: list[WebhookEntry]
) -> list[WebhookEntry]:
    """Return the webhooks that the request may run: those that need a key only if it has one.

    Raises:
        RefusedError: all of them need a key, and it has none.
    """
    needy = [e for e in entries if settings.access_to(e.plugin_key) is PluginAccess.KEY]
    free = [entry for entry in entries if entry not in needy]
    if not needy or (free and not _has_key(request)):
        return free
    await admit(_with_token(request), PluginAccess.KEY)
    return entries


def _has_key(request: Request) -> bool:
    return "authorization" in request.headers or _token(request) is not None


def _token(request: Request) -> str | None:
    return request.headers.get("x-webhook-token") or request.query_params.get("webhook_token")


def _with_token(request: Request) -> Request:
    """Return the request with its token as its authorization."""
    token = _token(request)
    if token is None or "authorization" in request.headers:
        return request
    authorization = (b"authorization", f"Bearer {token}".encode("latin-1", "replace"))
    return Request({**request.scope, "headers": [*request.scope["headers"], authorization]})


def _headers(request: Request, access: PluginAccess) -> dict[str, str]:
    """Return the headers that a plugin with this access receives; of equal names the first."""
    return dict(Headers(raw=plugin_headers(request.scope["headers"], access)))


def _parsed(body: bytes) -> Any:
    """Return the body's JSON; ``{"raw_content": text}`` if it is none."""
    text = body.decode("utf-8", "replace")
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return {"raw_content": text}
