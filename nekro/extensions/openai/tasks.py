"""What front ends ask for themselves, such as a title of a conversation, and what they add to messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

__all__ = ["is_note", "is_task"]

#: How the questions begin, and what else they have; the defaults of published front ends.
_OF_THE_USER: Final[tuple[tuple[str, ...], ...]] = (
    # Open WebUI: titles, tags, follow-ups, searches, completions of what is typed; summaries; emoji; merges.
    ("### Task:", "<chat_history>", "</chat_history>"),
    ("### Task:", "### Messages Being Compacted:", "### Recent Messages Kept In Context:"),
    ("Your task is to reflect the speaker's likely facial expression", "Message: ```"),
    ("You have been provided with a set of responses from various models to the latest user query: ",),
    # LibreChat: titles.
    ("Provide a concise, 5-word-or-less title for the conversation", "\nConversation:\n"),
    ("Analyze this conversation and provide:\n1. The detected language", "\n2. A concise title"),
    # Continue: titles.
    ("Given the following... please reply with a title for the chat",),
    ("Given the following... please reply with a short summary that is 4-12 words",),
)
_OF_THE_SYSTEM: Final[tuple[tuple[str, ...], ...]] = (
    # Cherry Studio: titles.
    ("Summarize the given session as a 10-word title using user language",),
    ("将给定的对话总结为一个10字以内的标题，使用用户语言",),
    ("You are an assistant skilled in conversation. You need to summarize the user's conversation into",),
)


def is_task(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a front end asks about a conversation, for itself.

    Most do so by one message with their instructions and the conversation; some by a system message.
    """
    said = [message for message in messages if message.get("role") not in ("system", "developer")]
    if len(said) == 1 and said[0].get("role") == "user" and _is_one_of(_OF_THE_USER, said[0]):
        return True
    return bool(messages) and messages[0].get("role") == "system" and _is_one_of(_OF_THE_SYSTEM, messages[0])


def is_note(text: str) -> bool:
    """Whether a part of a message is Open WebUI's list of attached files, which is for its own tools."""
    text = text.strip()
    return text.startswith("<attached_files>") and text.endswith("</attached_files>")


def _is_one_of(tasks: Sequence[Sequence[str]], message: Mapping[str, Any]) -> bool:
    content = message.get("content")
    if isinstance(content, list) and len(content) == 1 and isinstance(content[0], Mapping):
        content = content[0].get("text")
    if not isinstance(content, str):
        return False
    text = content.strip()
    return any(text.startswith(begin) and all(map(text.count, rest)) for begin, *rest in tasks)
