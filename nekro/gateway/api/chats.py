"""Lists of chats, and their titles.

A title is the one that was given, else the platform's name, else the first words of a person.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Annotated, Final

from fastapi import APIRouter, Query

from nekro.gateway.dependencies import ChatKey, IdentityDep, ServicesDep
from nekro.gateway.web.bodies import KeyedRoute
from nekro.gateway.web.paging import Cursor, Limit
from nekro.operations.actor import Identity, Scope
from nekro.operations.pages import Moment, cursor_of, place_of, place_text
from nekro_agent.errors import NotFoundError
from nekro_agent.tools.visible_text import without_invisible
from nekro_client.models import (
    ChatBody,
    ChatSummary,
    GivenTitle,
    MessageSnippet,
    Page,
)
from storage.listings.chats import ChatListing, ListedChat
from storage.repositories.messages import Message

__all__ = [
    "given_title",
    "router",
    "titles_of",
    "words_of",
]


#: Of the first words of a message.
_MOST_CHARS: Final = 60

_FENCE: Final = "```"


def given_title(text: str | None) -> str | None:
    """Return a title as it is stored: on one line, without invisible characters; None if nothing is left."""
    return " ".join(without_invisible(text).split()) or None if text else None


def words_of(text: str) -> str | None:
    """Return the first words of a message, those before its code if there are any; None without words."""
    words = given_title(text.partition(_FENCE)[0]) or given_title(text.replace(_FENCE, " "))
    if words is None or len(words) <= _MOST_CHARS:
        return words
    kept = words[:_MOST_CHARS]
    # A script without spaces, or a long address, is cut anywhere.
    whole = kept.rpartition(" ")[0] if words[_MOST_CHARS] != " " else kept
    return f"{(whole if len(whole) > _MOST_CHARS // 2 else kept).rstrip(' ,;:')}…"


async def titles_of(listing: ChatListing, chats: Sequence[ListedChat]) -> dict[str, str | None]:
    """Return the title of each chat; None for one without name and words."""
    named = {chat.chat_key: chat.title or given_title(chat.channel_name) for chat in chats}
    first = await listing.first_words([key for key, title in named.items() if title is None])
    return {key: title or words_of(first.get(key, "")) for key, title in named.items()}


router = APIRouter(route_class=KeyedRoute, tags=["chats"])

#: Characters of a message in a list.
_SNIPPET_CHARS: Final = 200
#: Chats that one request looks at for a key that has some of them; then the page is short.
_MOST_LOOKED_AT: Final = 5000

_BATCH: Final = 500


@router.get("/chats")
async def list_chats(
    services: ServicesDep,
    identity: IdentityDep,
    q: Annotated[
        str, Query(max_length=200, description="Only chats whose key, name or given title contains it.")
    ] = "",
    failures_since: Annotated[
        Moment | None,
        Query(description="Count the turns that have failed since then: when its reader last looked."),
    ] = None,
    transient: Annotated[
        bool, Query(description="Also chats that one request of the OpenAI API has made for itself.")
    ] = False,
    limit: Limit = 50,
    cursor: Cursor = None,
) -> Page[ChatSummary]:
    """List the chats that the key may read, the one with the newest activity first.

    A page may be shorter than `limit` although another one follows.
    """
    identity.require(Scope.READ)
    after = None if cursor is None else place_of(cursor)
    async with services.database.read() as transaction:
        listing = transaction.chat_listing
        chats, next_at = await _readable(
            listing, identity, text=q, with_transient=transient, after=after, limit=limit
        )
        keys = [chat.chat_key for chat in chats]
        last, open_rounds = await listing.last_messages(keys), await listing.open_rounds(keys)
        titles = await titles_of(listing, chats)
        failures = None if failures_since is None else await listing.failures(keys, since=failures_since)
    items = [
        _summary(chat, titles[chat.chat_key], last.get(chat.chat_key), open_rounds, failures)
        for chat in chats
    ]
    return Page(items=items, next_cursor=None if next_at is None else cursor_of(place_text(*next_at)))


@router.get("/chats/{chat_key}")
async def get_chat(chat_key: ChatKey, services: ServicesDep, identity: IdentityDep) -> ChatSummary:
    """Return a chat as lists show it."""
    identity.require(Scope.READ, chat_key=chat_key)
    async with services.database.read() as transaction:
        listing = transaction.chat_listing
        chat = await listing.find(chat_key)
        if chat is None:
            raise NotFoundError(f"there is no chat {chat_key!r}")
        titles = await titles_of(listing, [chat])
        last, open_rounds = await listing.last_messages([chat_key]), await listing.open_rounds([chat_key])
    return _summary(chat, titles[chat_key], last.get(chat_key), open_rounds, None)


@router.patch("/chats/{chat_key}")
async def change_chat(
    chat_key: ChatKey, body: ChatBody, services: ServicesDep, identity: IdentityDep
) -> GivenTitle:
    """Give a chat a title, or take it away: then the platform's name or the first words are shown."""
    identity.require(Scope.POST, chat_key=chat_key)
    title = given_title(body.title)
    async with services.database.begin() as transaction:
        await transaction.chats.give_title(chat_key, title)
    return GivenTitle(chat_key=chat_key, title=title)


async def _readable(
    listing: ChatListing,
    identity: Identity,
    *,
    text: str,
    with_transient: bool,
    after: tuple[datetime, str] | None,
    limit: int,
) -> tuple[list[ListedChat], tuple[datetime, str] | None]:
    """Return the next chats that the key has, and where the next page begins; None: it is the last one."""
    batch = limit + 1 if identity.is_of_all_chats else _BATCH
    kept: list[ListedChat] = []
    looked_at = 0
    began_at: datetime | None = None
    while True:
        rows = await listing.page(
            limit=batch, after=after, text=text, prefix=identity.chat_prefix, with_transient=with_transient
        )
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
    title: str | None,
    last: Message | None,
    open_rounds: Mapping[str, int],
    failures: Mapping[str, int] | None,
) -> ChatSummary:
    return ChatSummary(
        chat_key=chat.chat_key,
        adapter=chat.adapter_key,
        title=title,
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
