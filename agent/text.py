"""Text that did not come from us, made fit for a prompt.

Prompts mark their parts with tags of our own (``<sandbox_output>``, ``<agent_result>``, …).
Whoever writes into a chat, and whatever code prints, must not be able to write such a part,
so the opening bracket of anything that reads like one of our tags is replaced by a look-alike.
Other markup stays as it is: chats and programs are full of it.
"""

from __future__ import annotations

import re
from typing import Final

__all__ = ["TAGS", "attribute", "clean", "cut_middle", "neutralise"]

#: Every tag that the templates and renderers write.
TAGS: Final = (
    "agent_result",
    "chat_history",
    "methods",
    "message",
    "new_messages",
    "notice",
    "persona",
    "plugin",
    "plugin_context",
    "plugins",
    "round",
    "sandbox_output",
    "sandbox_run",
)

#: Characters that are invisible and would hide a tag from the pattern below, not from a model.
_INVISIBLE: Final = "\u00ad\u200b-\u200f\u2028-\u202e\u2060-\u2064\ufeff"
#: Brackets that models read as ``<``.
_BRACKETS: Final = "<\uff1c\ufe64"
_LOOK_ALIKE: Final = "\u2039"
_CONTROL: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def _tag_pattern() -> re.Pattern[str]:
    hidden = f"[{_INVISIBLE}]*"
    names = "|".join(hidden.join(re.escape(letter) for letter in tag) for tag in TAGS)
    # Blanks and slashes come as one class, so that no run of them can be split in two ways.
    return re.compile(
        f"[{_BRACKETS}](?=[\\s/{_INVISIBLE}]*(?:{names}){hidden}(?![0-9A-Za-z_]))", re.IGNORECASE
    )


_TAG: Final = _tag_pattern()


def neutralise(text: str) -> str:
    """Return ``text`` without control characters and without anything that reads like our own tags.

    >>> neutralise("a < b, <b>bold</b>, </chat_history>")
    'a < b, <b>bold</b>, ‹/chat_history>'
    """
    return _TAG.sub(_LOOK_ALIKE, clean(text))


def clean(text: str) -> str:
    """Return ``text`` with line ends unified and control characters and lone surrogates removed."""
    return _CONTROL.sub("", text.replace("\r\n", "\n").replace("\r", "\n"))


def attribute(text: str, *, limit: int = 80) -> str:
    """Return ``text`` as the value of one of our tags' attributes: one line, no quotes or brackets."""
    line = " ".join(clean(text).split())
    line = line.translate({ord('"'): "'", ord("<"): "\u2039", ord(">"): "\u203a"})
    return line if len(line) <= limit else line[: limit - 1] + "…"


def cut_middle(text: str, limit: int) -> str:
    """Shorten ``text`` to at most ``limit`` characters by leaving out its middle.

    The gap names how many characters are hidden. Beginnings say what something is and ends say
    how it went, so both stay.

    Args:
        limit: >= 60, room for the note in the gap.
    """
    if len(text) <= limit:
        return text
    # The note's own length depends on the count, which depends on the note: reserve the widest.
    room = limit - len(_gap(len(text)))
    head = room * 2 // 3
    tail = room - head
    return text[:head] + _gap(len(text) - head - tail) + text[len(text) - tail :]


def _gap(hidden: int) -> str:
    return f"\n[… {hidden} characters hidden …]\n"
