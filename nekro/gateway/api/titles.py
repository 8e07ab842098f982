"""Titles of chats: the one that was given, else the platform's name, else the first words of a person."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from nekro_agent.tools.visible_text import without_invisible
from storage.listings.chats import ChatListing, ListedChat

__all__ = ["given_title", "titles_of", "words_of"]

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
