"""Chats: lists of them, their titles and messages, and the end of what happens in one.

A title is the one that was given, else the platform's name, else the first words of a person.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Final, Literal
from urllib.parse import quote

from nekro.app.chats.attachments import Attachment, FileIds, attachments_of
from nekro.operations.actor import Actor, Identity, Scope
from nekro.operations.pages import (
    MOST_WAIT_SECONDS,
    Cursor,
    Limit,
    Moment,
    Param,
    cursor_of,
    number_of,
    page_of,
    place_of,
    place_text,
)
from nekro_agent.errors import NotFoundError
from nekro_agent.ports import ChatInfo
from nekro_agent.tools.visible_text import without_invisible
from nekro_client.models import (
    ChatBody,
    ChatSummary,
    FileInfo,
    FilePart,
    GivenTitle,
    ImagePart,
    Message,
    MessageSnippet,
    Page,
    Part,
    Reset,
    StoppedRound,
    Summary,
    TextPart,
)
from storage.listings.chats import ChatListing, ListedChat

if TYPE_CHECKING:
    from nekro.app.rounds.stop import StoppedRounds
    from storage.repositories.messages import Message as Row
    from storage.repositories.rounds import Round
    from storage.transaction import Transaction

__all__ = [
    "cancel_chat",
    "change_chat",
    "file_info",
    "get_chat",
    "list_chats",
    "list_messages",
    "list_summaries",
    "message_answer",
    "readable_chats",
    "require_chat",
    "reset_chat",
    "words_of",
]


#: Characters of the first words of a message, as a title.
_MOST_CHARS: Final = 60
_FENCE: Final = "```"
#: Characters of a message in a list.
_SNIPPET_CHARS: Final = 200
#: Chats that one request looks at for a key that has some of them; then the page is short.
_MOST_LOOKED_AT: Final = 5000
_BATCH: Final = 500


async def require_chat(transaction: Transaction, chat_key: str) -> ChatInfo:
    """Return a chat.

    Raises:
        NotFoundError: there is none with this key.
    """
    chat = await transaction.chats.find(chat_key)
    if chat is None:
        raise _missing(chat_key)
    return chat


async def list_chats(
    actor: Actor,
    text: Annotated[
        str,
        Param(
            alias="q",
            max_length=200,
            description="Only chats whose key, name or given title contains it.",
        ),
    ] = "",
    failures_since: Annotated[
        Moment | None,
        Param(description="Count the turns that have failed since then: when its reader last looked."),
    ] = None,
    transient: Annotated[
        bool, Param(description="Also chats that one request of the OpenAI API has made for itself.")
    ] = False,
    limit: Limit = 50,
    cursor: Cursor = None,
) -> Page[ChatSummary]:
    """List the chats that the key may read, the one with the newest activity first.

    A page may be shorter than `limit` although another one follows.
    """
    actor.identity.require(Scope.READ)
    after = None if cursor is None else place_of(cursor)
    async with actor.services.database.read() as transaction:
        listing = transaction.chat_listing
        chats, next_at = await _readable(
            listing, actor.identity, text=text, with_transient=transient, after=after, limit=limit
        )
        keys = [chat.chat_key for chat in chats]
        last, open_rounds = await listing.last_messages(keys), await listing.open_rounds(keys)
        titles = await _titles_of(listing, chats)
        failures = None if failures_since is None else await listing.failures(keys, since=failures_since)
    items = [
        _summary(chat, titles[chat.chat_key], last.get(chat.chat_key), open_rounds, failures)
        for chat in chats
    ]
    return Page(items=items, next_cursor=None if next_at is None else cursor_of(place_text(*next_at)))


async def readable_chats(actor: Actor, *, limit: int) -> list[ListedChat]:
    """List the chats that the key may read, the one with the newest activity first, without messages."""
    actor.identity.require(Scope.READ)
    async with actor.services.database.read() as transaction:
        listing, identity = transaction.chat_listing, actor.identity
        chats, _ = await _readable(listing, identity, text="", with_transient=True, after=None, limit=limit)
    return chats


async def get_chat(actor: Actor, chat_key: str) -> ChatSummary:
    """Return a chat as lists show it."""
    actor.identity.require(Scope.READ, chat_key=chat_key)
    async with actor.services.database.read() as transaction:
        listing = transaction.chat_listing
        chat = await listing.find(chat_key)
        if chat is None:
            raise _missing(chat_key)
        titles = await _titles_of(listing, [chat])
        last, open_rounds = await listing.last_messages([chat_key]), await listing.open_rounds([chat_key])
    return _summary(chat, titles[chat_key], last.get(chat_key), open_rounds, None)


async def change_chat(actor: Actor, chat_key: str, body: ChatBody) -> GivenTitle:
    """Give a chat a title, or take it away: then the platform's name or the first words are shown."""
    actor.identity.require(Scope.POST, chat_key=chat_key)
    title = _given_title(body.title)
    async with actor.services.database.begin() as transaction:
        await transaction.chats.give_title(chat_key, title)
    return GivenTitle(chat_key=chat_key, title=title)


async def list_messages(
    actor: Actor,
    chat_key: str,
    limit: Limit = 50,
    cursor: Cursor = None,
    order: Literal["desc", "asc"] = "desc",
    with_past: Annotated[bool, Param()] = False,
) -> Page[Message]:
    """List messages, the newest first; ``with_past`` adds those from before the last reset.

    ``order=asc`` lists all messages, the oldest first, also those from before resets.
    """
    actor.identity.require(Scope.READ, chat_key=chat_key)
    position = None if cursor is None else number_of(cursor)
    async with actor.services.database.read() as transaction:
        await require_chat(transaction, chat_key)
        messages = transaction.messages
        if order == "asc":
            rows = await messages.after(chat_key, sequence=position or 0, limit=limit + 1)
        else:
            rows = await messages.newest(chat_key, limit=limit + 1, before=position, with_past=with_past)
            rows.reverse()
    ids = actor.services.file_ids
    return page_of(
        rows, limit=limit, answer=lambda row: message_answer(row, ids), position=lambda row: row.sequence
    )


async def list_summaries(actor: Actor, chat_key: str) -> Page[Summary]:
    """List the kept summaries of a chat, the newest first.

    Prompts show the newest one in the place of the messages that it covers.
    """
    actor.identity.require(Scope.READ, chat_key=chat_key)
    async with actor.services.database.read() as transaction:
        await require_chat(transaction, chat_key)
        rows = await transaction.summaries.versions(chat_key)
    return Page(items=[Summary(**vars(row) | {"group": row.group_name}) for row in rows], next_cursor=None)


async def reset_chat(actor: Actor, chat_key: str) -> Reset:
    """Stop the rounds of a chat, begin a new conversation, and run the plugins' reset hooks."""
    actor.identity.require(Scope.POST, chat_key=chat_key)

    async def work() -> Reset:
        # Imported here: it imports what sends calls, and lists need none of it.
        from nekro.app import use_cases

        return _stopped(await use_cases.reset_chat(actor.services, chat_key))

    return await actor.once.run(Reset, work)


async def cancel_chat(
    actor: Actor,
    chat_key: str,
    wait: Annotated[
        float, Param(ge=0, le=MOST_WAIT_SECONDS, description="seconds until it has stopped")
    ] = 10,
) -> Reset:
    """Cancel the waiting rounds of a chat and stop its running one."""
    actor.identity.require(Scope.POST, chat_key=chat_key)

    async def work() -> Reset:
        reason = "cancelled on request"
        return _stopped(await actor.services.stopper.stop(chat_key, reason=reason, wait_seconds=wait))

    return await actor.once.run(Reset, work)


def _stopped(rounds: StoppedRounds) -> Reset:
    return Reset(
        cancelled=[_stopped_round(row) for row in rounds.cancelled],
        stopped=[_stopped_round(row) for row in rounds.stopped],
        still_running=[_stopped_round(row) for row in rounds.still_running],
        waits=list(rounds.waits),
    )


def _stopped_round(row: Round) -> StoppedRound:
    return StoppedRound(id=row.id, number=row.number, state=row.state.value, worker=row.worker)


def _missing(chat_key: str) -> NotFoundError:
    return NotFoundError(f"there is no chat {chat_key!r}")


def _given_title(text: str | None) -> str | None:
    """Return a title as it is stored: on one line, without invisible characters; None if nothing is left."""
    return " ".join(without_invisible(text).split()) or None if text else None


def words_of(text: str) -> str | None:
    """Return the first words of a message, those before its code if there are any; None without words."""
    words = _given_title(text.partition(_FENCE)[0]) or _given_title(text.replace(_FENCE, " "))
    if words is None or len(words) <= _MOST_CHARS:
        return words
    kept = words[:_MOST_CHARS]
    # A script without spaces, or a long address, is cut anywhere.
    whole = kept.rpartition(" ")[0] if words[_MOST_CHARS] != " " else kept
    return f"{(whole if len(whole) > _MOST_CHARS // 2 else kept).rstrip(' ,;:')}…"


async def _titles_of(listing: ChatListing, chats: Sequence[ListedChat]) -> dict[str, str | None]:
    """Return the title of each chat; None for one without name and words."""
    named = {chat.chat_key: chat.title or _given_title(chat.channel_name) for chat in chats}
    first = await listing.first_words([key for key, title in named.items() if title is None])
    return {key: title or words_of(first.get(key, "")) for key, title in named.items()}


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
    last: Row | None,
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


def _snippet(message: Row) -> MessageSnippet:
    return MessageSnippet(
        id=message.id,
        kind=message.kind.value,
        sender_name=message.sender_name,
        text=message.text[:_SNIPPET_CHARS],
        created_at=message.created_at,
    )


def message_answer(row: Row, ids: FileIds, *, turn_id: str | None = None) -> Message:
    """Return a message of a chat.

    Args:
        turn_id: the turn that it has just started; None: the recorded one.
    """
    return Message(
        id=row.id,
        sequence=row.sequence,
        chat_key=row.chat_key,
        kind=row.kind.value,
        sender_id=row.sender_id,
        sender_name=row.sender_name,
        text=row.text,
        parts=_message_parts(ids, row),
        turn_id=turn_id or row.turn_id,
        call_id=row.call_id,
        round_id=row.round_id,
        plugin=row.plugin_key,
        data=row.data,
        created_at=row.created_at,
    )


def file_info(ids: FileIds, chat_key: str, file: Attachment) -> FileInfo:
    """Return the description of a file of a message."""
    file_id = ids.make(chat_key, file.path, modified_ns=file.modified_ns)
    return FileInfo(
        id=file_id,
        name=file.name,
        path=file.path,
        media_type=file.media_type,
        size_bytes=file.size_bytes or 0,
        sha256=file.sha256,
        created_at=_moment(file.modified_ns),
        url=f"/api/v1/chats/{quote(chat_key, safe='')}/files/{file_id}",
    )


def _message_parts(ids: FileIds, row: Row) -> list[Part]:
    """Return the parts of a recorded message, in order."""
    found: list[Part] = []
    segments = (row.data or {}).get("content_data")
    if not isinstance(segments, list) or not segments:
        segments = [{"type": "text", "text": row.text}] if row.text else []
    for segment in segments:
        if isinstance(segment, Mapping) and segment.get("type") == "text":
            found.append(TextPart(text=str(segment.get("text") or "")))
        elif isinstance(segment, Mapping):
            found += _file_parts(ids, row.chat_key, attachments_of({"content_data": [segment]}))
    data = {name: value for name, value in (row.data or {}).items() if name != "content_data"}
    return [*found, *_file_parts(ids, row.chat_key, attachments_of(data))]


def _file_parts(ids: FileIds, chat_key: str, files: Sequence[Attachment]) -> list[Part]:
    return [
        (ImagePart if file.kind == "image" else FilePart)(file=file_info(ids, chat_key, file))
        for file in files
    ]


def _moment(nanoseconds: int | None) -> datetime | None:
    return None if nanoseconds is None else datetime.fromtimestamp(nanoseconds / 1e9, UTC)
