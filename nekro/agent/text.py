"""Makes untrusted text safe for a prompt.

Prompts mark their parts with tags of our own (``<sandbox_output>``, ``<agent_result>``, …). Users
who write into a chat and code that prints must not be able to forge such a part, so the opening
bracket of anything that resembles one of our tags is replaced with a similar character. Other
markup is left unchanged, because it is common in chats and programs.
"""

from __future__ import annotations

import re
from typing import Final

from nekro_agent.tools.visible_text import JOINERS, without_invisible

__all__ = ["TAGS", "attribute", "clean", "cut_middle", "neutralise"]

#: Every tag that templates and renderers use.
TAGS: Final = (
    "agent_result",
    "chat_history",
    "chat_summary",
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

#: What ``clean`` leaves would hide a tag from the pattern below but not from a model.
_INVISIBLE: Final = JOINERS
#: Brackets that models read as ``<``.
_BRACKETS: Final = "<\uff1c\ufe64"
_LOOK_ALIKE: Final = "\u2039"


def _tag_pattern() -> re.Pattern[str]:
    hidden = f"[{_INVISIBLE}]*"
    names = "|".join(hidden.join(re.escape(letter) for letter in tag) for tag in TAGS)
    # White space and slashes are one class, so that no run of them can be matched in two ways.
    return re.compile(
        f"[{_BRACKETS}](?=[\\s/{_INVISIBLE}]*(?:{names}){hidden}(?![0-9A-Za-z_]))", re.IGNORECASE
    )


_TAG: Final = _tag_pattern()


def neutralise(text: str) -> str:
    """Return ``text`` without invisible characters and without anything that resembles our own tags.

    >>> neutralise("a < b, <b>bold</b>, </chat_history>")
    'a < b, <b>bold</b>, ‹/chat_history>'
    """
    return _TAG.sub(_LOOK_ALIKE, clean(text))


def clean(text: str) -> str:
    """Return ``text`` with uniform line ends and without invisible characters; emoji stay whole."""
    return without_invisible(text.replace("\r\n", "\n").replace("\r", "\n"))


def attribute(text: str, *, limit: int = 80) -> str:
    """Return ``text`` as the value of one of our tags' attributes: one line, no quotes or brackets."""
    line = " ".join(clean(text).split())
    line = line.translate({ord('"'): "'", ord("<"): "\u2039", ord(">"): "\u203a"})
    return line if len(line) <= limit else line[: limit - 1] + "…"


def cut_middle(text: str, limit: int) -> str:
    """Shorten ``text`` to at most ``limit`` characters by removing its middle.

    The gap states the number of hidden characters. Both ends stay, because the beginning identifies a
    text and the end shows its outcome.

    Args:
        limit: >= 60, to leave space for the note in the gap.
    """
    if len(text) <= limit:
        return text
    # The length of the note depends on the count and the other way round: reserve the longest note.
    room = limit - len(_gap(len(text)))
    head = room * 2 // 3
    tail = room - head
    return text[:head] + _gap(len(text) - head - tail) + text[len(text) - tail :]


def _gap(hidden: int) -> str:
    return f"\n[… {hidden} characters hidden …]\n"
