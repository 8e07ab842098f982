"""Lists of chats and of their turns."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Annotated, Final

from fastapi import APIRouter, Query
from pydantic import AfterValidator, AwareDatetime

from gateway.dependencies import ChatKey, IdentityDep, ServicesDep
from gateway.identity import Identity, Scope
from gateway.routing import KeyedRoute
from gateway.streams.turn_lists import read_turns
from gateway.web.paging import Cursor, Limit, cursor_invalid, cursor_of, number_of, text_of
from nekro_agent.errors import NotFoundError
from nekro_client.models import ChatSummary, MessageSnippet, Page, TurnSummary
from storage.listings.chats import ChatListing, ListedChat
from storage.repositories.messages import Message

__all__ = ["router"]

router = APIRouter(route_class=KeyedRoute, tags=["chats"])

#: Characters of a message in a list.
_SNIPPET_CHARS: Final = 200
#: Chats that one request looks at for a key that has some of them; then the page is short.
_MOST_LOOKED_AT: Final = 5000
_BATCH: Final = 500


def _in_utc(moment: datetime) -> datetime:
    """Refuse a time that UTC does not have: in the first or last hours of all that can be written."""
    try:
        return moment.astimezone(UTC)
    except OverflowError:
        raise ValueError("it is before the year 1 or after the year 9999") from None


@router.get("/chats")
async def list_chats(
    services: ServicesDep,
    identity: IdentityDep,
    q: Annotated[str, Query(max_length=200, description="Only chats whose key or name contains it.")] = "",
    failures_since: Annotated[
        Annotated[AwareDatetime, AfterValidator(_in_utc)] | None,
        Query(description="Count the turns that have failed since then: when its reader last looked."),
    ] = None,
    limit: Limit = 50,
    cursor: Cursor = None,
) -> Page[ChatSummary]:
    """List the chats that the key may read, the one with the newest activity first.

    A page may be shorter than `limit` although another one follows.
    """
    identity.require(Scope.READ)
    after = None if cursor is None else _position(cursor)
    async with services.database.read() as transaction:
        listing = transaction.chat_listing
        chats, next_at = await _readable(listing, identity, text=q, after=after, limit=limit)
        keys = [chat.chat_key for chat in chats]
        last, open_rounds = await listing.last_messages(keys), await listing.open_rounds(keys)
        failures = None if failures_since is None else await listing.failures(keys, since=failures_since)
    items = [_summary(chat, last.get(chat.chat_key), open_rounds, failures) for chat in chats]
    return Page(items=items, next_cursor=None if next_at is None else _cursor(next_at))


@router.get("/chats/{chat_key}/turns")
async def list_turns(
    chat_key: ChatKey,
    services: ServicesDep,
    identity: IdentityDep,
    limit: Limit = 50,
    cursor: Cursor = None,
) -> Page[TurnSummary]:
    """List the turns of a chat, the newest first; `GET /turns/{id}` has the whole of one."""
    identity.require(Scope.READ, chat_key=chat_key)
    before = None if cursor is None else number_of(cursor)
    async with services.database.read() as transaction:
        if await transaction.chats.find(chat_key) is None:
            raise NotFoundError(f"there is no chat {chat_key!r}")
        found = await read_turns(transaction, chat_key, limit=limit, before=before)
    more = cursor_of(found[-1][0]) if len(found) == limit else None
    return Page(items=[item for _, item in found], next_cursor=more)


async def _readable(
    listing: ChatListing,
    identity: Identity,
    *,
    text: str,
    after: tuple[datetime, str] | None,
    limit: int,
) -> tuple[list[ListedChat], tuple[datetime, str] | None]:
    """Return the next chats that the key has, and where the next page begins; None: it is the last one."""
    # Before its first wildcard, a pattern is text that the key begins with.
    prefix = re.split(r"[*?\[]", identity.chats, maxsplit=1)[0]
    batch = limit + 1 if identity.is_of_all_chats else _BATCH
    kept: list[ListedChat] = []
    looked_at = 0
    began_at: datetime | None = None
    while True:
        rows = await listing.page(limit=batch, after=after, text=text, prefix=prefix)
        began_at = rows[0].active_at if began_at is None and rows else began_at
        for row in rows:
            if not identity.has_chat(row.chat_key):
                continue
            if len(kept) == limit:
                return kept, (kept[-1].active_at, kept[-1].chat_key)
            kept.append(row)
        if len(rows) < batch:
            return kept, None
        last_at = rows[-1].active_at
        after = (last_at, rows[-1].chat_key)
        looked_at += len(rows)
        if looked_at >= _MOST_LOOKED_AT and last_at != began_at:
            # Without the key of the last chat, which may be of others: the next page begins with all chats
            # that were active at its time.
            return [chat for chat in kept if chat.active_at != last_at], (last_at, "")


def _summary(
    chat: ListedChat,
    last: Message | None,
    open_rounds: Mapping[str, int],
    failures: Mapping[str, int] | None,
) -> ChatSummary:
    return ChatSummary(
        chat_key=chat.chat_key,
        adapter=chat.adapter_key,
        name=chat.channel_name,
        type=chat.channel_type,
        created_at=chat.created_at,
        active_at=chat.active_at,
        last_event=chat.last_event,
        last_message=None if last is None else _snippet(last),
        open_rounds=open_rounds.get(chat.chat_key, 0),
        failures=None if failures is None else failures.get(chat.chat_key, 0),
    )


def _snippet(message: Message) -> MessageSnippet:
    return MessageSnippet(
        id=message.id,
        kind=message.kind.value,
        sender_name=message.sender_name,
        text=message.text[:_SNIPPET_CHARS],
        created_at=message.created_at,
    )


def _cursor(position: tuple[datetime, str]) -> str:
    return cursor_of(f"{position[0].isoformat()} {position[1]}")


def _position(cursor: str) -> tuple[datetime, str]:
    moment, _, chat_key = text_of(cursor).partition(" ")
    try:
        at = datetime.fromisoformat(moment)
        if at.tzinfo is None:
            raise cursor_invalid()
        return at.astimezone(UTC), chat_key
    except (ValueError, OverflowError):
        raise cursor_invalid() from None
