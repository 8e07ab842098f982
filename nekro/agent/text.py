"""Make texts fit for a prompt: safe, cut to a length, with a handle of the whole; and methods as text.

Prompts mark their parts with tags of our own (``<sandbox_output>``, ``<agent_result>``, …). Users who write
into a chat and code that prints must not be able to forge such a part, so the opening bracket of anything
that resembles one of our tags is replaced with a similar character. Other markup is left unchanged, because
it is common in chats and programs.

Prompts and answers of `help_of` show methods in the same form. Documentation is the text of a plugin, or of
the server that it stands for: it is bounded, and cannot forge the tags of a prompt.
"""

from __future__ import annotations

import hashlib
import re
from functools import cache, lru_cache
from typing import Final

from nekro.agent.model import MethodBrief
from nekro.agent.room import TokenCounter
from nekro_agent.tools.visible_text import JOINERS, without_invisible

__all__ = [
    "LEAST_TOKENS",
    "MOST_DOC_CHARS",
    "TAGS",
    "attribute",
    "check_word_of",
    "clean",
    "cut_middle",
    "cut_text",
    "handle_of_message",
    "handle_of_output",
    "handle_of_result",
    "hide_check_words",
    "method_line",
    "method_text",
    "neutralise",
    "restore_check_word",
    "reveals_check_word",
    "summary",
]


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


@cache
def _tag_pattern() -> re.Pattern[str]:
    """Compiled at its first use: it takes 10 ms."""
    hidden = f"[{_INVISIBLE}]*"
    names = "|".join(hidden.join(re.escape(letter) for letter in tag) for tag in TAGS)
    # White space and slashes are one class, so that no run of them can be matched in two ways.
    return re.compile(
        f"[{_BRACKETS}](?=[\\s/{_INVISIBLE}]*(?:{names}){hidden}(?![0-9A-Za-z_]))", re.IGNORECASE
    )


def neutralise(text: str) -> str:
    """Return ``text`` without invisible characters and without anything that resembles our own tags.

    >>> neutralise("a < b, <b>bold</b>, </chat_history>")
    'a < b, <b>bold</b>, ‹/chat_history>'
    """
    return _tag_pattern().sub(_LOOK_ALIKE, clean(text))


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


#: Longest documentation of one method in a shortened list, and in the answer of `help_of`.
MOST_DOC_CHARS: Final = 4_000
_SUMMARY_CHARS: Final = 100
_AGENT_MARK: Final = " - **[AGENT METHOD - STOP AFTER CALL]**"


def method_text(method: MethodBrief, *, limit: int | None = MOST_DOC_CHARS) -> str:
    """Return a method in full: name, signature and documentation.

    Args:
        limit: most characters of the documentation; None does not limit.
    """
    head = f"* {method.name}{method.signature}{_AGENT_MARK if method.type.wakes_agent else ''}"
    doc = (method.doc or "").strip()
    shown = doc if limit is None else cut_middle(doc, limit)
    return neutralise(f"{head}\n{shown}" if shown else head)


@lru_cache(maxsize=4096)
def method_line(method: MethodBrief) -> str:
    """Return a method as one line: its name and what it does."""
    text = summary(method.doc)
    return neutralise(f"* {method.name}") + (f" - {text}" if text else "")


def summary(doc: str | None) -> str:
    """Return the first line of a documentation, shortened and safe for a prompt; "" without one."""
    line = (doc or "").strip().split("\n")[0]
    return attribute(neutralise(line), limit=_SUMMARY_CHARS)


#: Least limit that a text is cut to: the note in the gap takes about as much.
LEAST_TOKENS: Final = 40
#: So many characters of a text are looked at for each token of a limit, so that the work does not grow with
#: the text. Only long runs of one character have more of them in a token.
_CHARS_PER_TOKEN: Final = 16
_MOST_STEPS: Final = 5


def cut_text(text: str, limit: int, counter: TokenCounter, *, handle: str | None = None) -> str:
    """Return foreign text for a prompt: made safe, and of about ``limit`` tokens at most.

    Of a longer one both ends are shown, because the beginning identifies a text and the end shows its
    outcome. The gap states what is hidden.

    Args:
        limit: tokens; less than ``LEAST_TOKENS`` counts as that.
        handle: `read_rest` finds the text by it; None: the gap names none.
    """
    limit = max(limit, LEAST_TOKENS)
    window = limit * _CHARS_PER_TOKEN
    if len(text) <= window and counter.count(text) <= limit:
        return neutralise(text)
    room = limit - LEAST_TOKENS // 2
    head = _fitting(text[:window], room * 2 // 3, counter)
    # Reversed, so that the end of the text stays.
    tail = _fitting(text[-window:][::-1], room - room * 2 // 3, counter)
    hidden = len(text) - head - tail
    if hidden <= 0:
        return neutralise(text)
    return f"{neutralise(text[:head])}{_gap(hidden, head, handle)}{neutralise(text[len(text) - tail :])}"


def _fitting(text: str, limit: int, counter: TokenCounter) -> int:
    """Return how many characters of the beginning of a text have about ``limit`` tokens at most."""
    length = min(len(text), limit * 4)
    for _ in range(_MOST_STEPS):
        tokens = counter.count(text[:length])
        if tokens <= limit and (length == len(text) or tokens > limit * 9 // 10):
            return length
        length = min(len(text), max(1, length * limit * 19 // 20 // max(tokens, 1)))
    while length > 1 and counter.count(text[:length]) > limit:
        length = length * 3 // 4
    return length


def _gap(hidden: int, start: int = 0, handle: str | None = None) -> str:
    if handle is None:
        return f"\n[… {hidden} characters hidden …]\n"
    return f'\n[… {hidden} characters hidden; read_rest("{handle}", {start}) returns them …]\n'


#: Ids of rows; others are not written into a prompt, where a handle stands in quotes.
_PLAIN: Final = re.compile(r"[\w.:-]{1,200}", re.ASCII)


def handle_of_message(message_id: str) -> str | None:
    """Return the handle of a message's text."""
    return _handle("message", message_id)


def handle_of_output(round_id: str) -> str | None:
    """Return the handle of the output of a round's program."""
    return _handle("round", round_id)


def handle_of_result(call_id: str | None, part: int | None = None) -> str | None:
    """Return the handle of a call's result.

    Args:
        part: index of a text among the parts of a MULTIMODAL_AGENT result; None: the text of an AGENT result.
    """
    return _handle("call", call_id or "", "" if part is None else f"#{part}")


def _handle(kind: str, name: str, rest: str = "") -> str | None:
    return f"{kind}:{name}{rest}" if _PLAIN.fullmatch(name) else None


#: Bytes of entropy of a check word: enough against guessing, short enough for the prompt.
_CHECK_WORD_BYTES: Final = 9
_CHECK_WORD: Final = re.compile(rf"\bcw-[0-9a-f]{{{2 * _CHECK_WORD_BYTES}}}\b", re.IGNORECASE)

_HIDDEN: Final = "cw-[hidden]"


def check_word_of(seed: str) -> str:
    """Return the one-time word of a round's prompt: the same at each attempt, unknown to who has no seed.

    Args:
        seed: ``ProgramSecrets.check_word``.
    """
    digest = hashlib.blake2b(b"check word", key=bytes.fromhex(seed), digest_size=_CHECK_WORD_BYTES)
    return f"cw-{digest.hexdigest()}"


def reveals_check_word(check_word: str, text: str | bytes) -> bool:
    """Whether ``text`` contains the round's one-time word, in any letter case.

    A model that was persuaded to repeat its instructions repeats the word with them, so
    code, output and call arguments that contain it end the run with SECURITY.
    """
    if isinstance(text, bytes):
        return check_word.encode() in text.lower()
    return check_word in text.lower()


def hide_check_words(text: str) -> str:
    """Return a text without one-time words, for records that others read while a round may still run."""
    return _CHECK_WORD.sub(_HIDDEN, text)


def restore_check_word(text: str, check_word: str) -> str:
    """Return a text with a round's word where ``hide_check_words`` has hidden it, to send it again."""
    return text.replace(_HIDDEN, check_word)
