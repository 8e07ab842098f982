"""`subscriptions/listen`: notifies clients that tools, prompts, resources or the history of a chat changed.

Each gateway watches the catalogue and the events by itself, so a client may listen at any of them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection
from contextlib import aclosing, nullcontext
from typing import Any, Final

from loguru import logger
from mcp.server.context import ServerRequestContext
from mcp.server.subscriptions import (
    InMemorySubscriptionBus,
    ListenHandler,
    PromptsListChanged,
    ResourcesListChanged,
    ResourceUpdated,
    ToolsListChanged,
)
from mcp.shared.exceptions import MCPError
from mcp_types import INVALID_PARAMS, SubscriptionsListenRequestParams, SubscriptionsListenResult

from nekro.app.services import Services
from nekro.extensions.mcp.server.callers import Caller
from nekro.extensions.mcp.server.resources import chat_of, messages_uri
from nekro.gateway.dependencies import take_stream
from nekro.gateway.streams.hub import EventHub, EventsLostError, SlowReaderError
from nekro.operations.actor import Scope
from nekro_agent.durations import FRESH_SECONDS
from nekro_agent.errors import NekroError
from nekro_client.models import EventType

__all__ = ["ListeningClients"]

#: Histories that one client may watch.
_MOST_URIS: Final = 16
_MESSAGES: Final = (EventType.MESSAGE_RECEIVED, EventType.MESSAGE_SENT, EventType.FILE_SENT)
_LISTS: Final = (EventType.FILE_SENT, EventType.JOB_STARTED, EventType.JOB_ENDED)


class ListeningClients:
    """Serves the listening clients of one process."""

    def __init__(
        self, services: Services, hub: EventHub, caller_of: Callable[[ServerRequestContext[Any]], Caller]
    ) -> None:
        self._services, self._hub, self._caller_of = services, hub, caller_of
        self._open: dict[ListenHandler, InMemorySubscriptionBus] = {}
        self._watching: asyncio.Task[None] | None = None
        self._is_closed = False

    async def listen(
        self, ctx: ServerRequestContext[Any], params: SubscriptionsListenRequestParams
    ) -> SubscriptionsListenResult:
        """Serve one client until it leaves, its key is no longer valid, or ``close``.

        Raises:
            MCPError: it asks for a resource that cannot be watched, or that its key does not have.
            StorageUnavailableError: the database did not answer when it began.
            RefusedError, OverloadedError: it has too many streams.
        """
        caller = self._caller_of(ctx)
        uris = params.notifications.resource_subscriptions or []
        chats = {uri: self._watchable(caller, uri) for uri in uris}
        if len(chats) > _MOST_URIS:
            raise MCPError(INVALID_PARAMS, f"a client may watch at most {_MOST_URIS} resources at a time")
        if self._is_closed:
            raise MCPError(INVALID_PARAMS, "this gateway is stopping; connect again")
        if ctx.request is not None:
            take_stream(ctx.request, caller.identity)
        bus = InMemorySubscriptionBus()
        handler = ListenHandler(bus, max_subscriptions=1)
        followed: list[tuple[str, Collection[str], ResourceUpdated | ResourcesListChanged]] = [
            (chat, _MESSAGES, ResourceUpdated(uri=uri)) for uri, chat in chats.items()
        ]
        if params.notifications.resources_list_changed and caller.may(Scope.READ):
            followed.append((caller.chat_key, _LISTS, ResourcesListChanged()))
        # Before the client hears that it listens: what happens from then on must reach it.
        begins = [(await self._hub.newest(chat)).number for chat, _, _ in followed]
        tasks = [
            asyncio.create_task(self._follow(chat, after, types, bus, event), name="nekro-mcp-follow")
            for (chat, types, event), after in zip(followed, begins, strict=True)
        ]
        self._open[handler] = bus
        if self._watching is None:
            self._watching = asyncio.create_task(self._watch(), name="nekro-mcp-catalogue")
        # Who uses stdin and stdout needs no key.
        owned = nullcontext() if ctx.request is None else self._hub.owned(caller.identity, handler.close)
        try:
            with owned:
                return await handler(ctx, params)
        finally:
            del self._open[handler]
            for task in tasks:
                task.cancel()
            if not self._open and self._watching is not None:
                self._watching.cancel()
                self._watching = None

    def close(self) -> None:
        """End every stream; clients connect again, to another gateway."""
        self._is_closed = True
        for handler in list(self._open):
            handler.close()

    def _watchable(self, caller: Caller, uri: str) -> str:
        chat_key = chat_of(uri)
        has_scope = Scope.READ in caller.identity.scopes
        if (
            chat_key is None
            or uri != messages_uri(chat_key)
            or not (has_scope and caller.identity.has_chat(chat_key))
        ):
            raise MCPError(INVALID_PARAMS, f"{uri[:500]!r} is not a history that the key may read")
        return chat_key

    async def _follow(
        self,
        chat_key: str,
        after: int,
        types: Collection[str],
        bus: InMemorySubscriptionBus,
        event: ResourceUpdated | ResourcesListChanged,
    ) -> None:
        """Tell a client of each event after a number; after an interruption once, and it reads all again."""
        position: int | None = after
        while True:
            try:
                if position is None:
                    # In this order: the client reads what came before, and hears of what comes later.
                    position = (await self._hub.newest(chat_key)).number
                    await bus.publish(event)
                stream = self._hub.stream(chat_key, after=position, types=types, with_live=False)
                async with aclosing(stream) as events:
                    async for _ in events:
                        await bus.publish(event)
                return  # the hub is closed
            except (SlowReaderError, EventsLostError):
                position = None
            except NekroError as exc:
                position = None
                logger.bind(error=str(exc)).warning("mcp_subscription_interrupted")
                await asyncio.sleep(FRESH_SECONDS)

    async def _watch(self) -> None:
        known = self._catalogue()
        while True:
            await asyncio.sleep(FRESH_SECONDS)
            with contextlib.suppress(NekroError):
                await self._services.refresh()
            now = self._catalogue()
            if now != known:
                known = now
                for bus in list(self._open.values()):
                    await bus.publish(ToolsListChanged())
                    await bus.publish(PromptsListChanged())

    def _catalogue(self) -> frozenset[object]:
        entries = self._services.registry.enabled()
        return frozenset((one.task, one.signature, one.doc, one.label) for one in entries)
