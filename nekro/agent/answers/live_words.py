"""Find, while an answer arrives, how far it is words for people whatever follows.

The reader that judges the whole answer also reads what there is so far. What may still turn out to be
something else is held back: the first line while it may begin a program, a tail that may begin a tag, a block
that may be a program or a call. What was read as plain text is not read again, and the rest only when it has
grown by a share of its length, so the work is linear in the length of the answer.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from keyword import kwlist, softkwlist
from typing import Final

from nekro.agent.answers.extraction import PYTHON_LABELS, AnswerParts, split_answer
from nekro.agent.answers.notations import ANSWER_TAGS, CALL_LABELS, CALL_MARK, REASONING, TAG_OF_A_LINE
from nekro.agent.answers.programs import CODE_TAG
from nekro.agent.answers.replies import (
    INLINE_BLOCK,
    LANGUAGES,
    SHELL_LABELS,
    begins_program,
    call_line,
    calls_first,
    is_call_text,
)
from nekro.agent.llm.attempt import joined

__all__ = [
    "LiveWords",
    "ends_unopened_reasoning",
    "is_certainly_words",
]


#: Characters of a beginning that are looked at; one that shows nothing until then is not decided here.
_MOST_CHARS: Final = 2_000
_KEYWORDS: Final = frozenset([*kwlist, *softkwlist])
_STRING_PREFIXES: Final = frozenset(["b", "br", "f", "fr", "r", "rb", "rf", "rt", "t", "tr", "u"])
_TOKEN: Final = re.compile(
    r"(?P<open>\"\"\"|'''|[\"'](?![^\n]*[\"']))"
    r"|(?P<string>\"(?:[^\"\\\n]|\\.)*\"|'(?:[^'\\\n]|\\.)*')"
    r"|(?P<name>[^\W\d]\w*)"
    r"|(?P<number>\d[\w.]*)"
    r"|(?P<comment>#[^\n]*)"
    r"|(?P<blank>[ \t\u00a0\u2000-\u200d\u202f\u205f\u2060\u3000\ufeff]+)"
    r"|(?P<line>\n)"
    r"|(?P<closing>[)\]}])"
    r"|(?P<never>[?$`]|!(?=[^=])|[^\x00-\x7f])"
    r"|(?P<other>.)",
    re.DOTALL,
)
#: Lines before the first statement.
_COMMENTS: Final = re.compile(r"(?:\s*#[^\n]*(?:\n|\Z))*\s*")
#: What no statement begins with.
_NO_STATEMENT: Final = (*">|&%/=,;:)]}", "**")
_VALUES: Final = frozenset({"name", "number", "string", "closing"})


def is_certainly_words(text: str, names: Collection[str]) -> bool:
    """Whether an answer that begins with a text, and has no block there, is no program however it goes on.

    It is none if Python cannot read it: two names side by side, a character that Python does not have. A call
    of a known method that begins the text decides nothing, because words behind it make it neither.

    Args:
        names: names of the methods that programs may call.
    """
    head = _COMMENTS.sub("", text[:_MOST_CHARS], count=1)
    if not head or calls_first(head, names):
        return False
    if head.startswith("`"):  # the whole answer may be code between two backticks
        code, closing, rest = head[1:].partition("`")
        return bool(closing and code and rest.strip() and rest[0] != "`")
    first, is_complete, _ = head.partition("\n")
    if first.startswith(("import", "from")) and (not is_complete or begins_program(first, names)):
        return False
    return head.startswith(_NO_STATEMENT) or _is_no_python(head)


def _is_no_python(text: str) -> bool:
    """Whether a text has what Python cannot read whatever follows."""
    before, end = "", 0
    for token in _TOKEN.finditer(text):
        kind, found = str(token.lastgroup), token.group()
        is_adjacent, end = token.start() == end and before != "", token.end()
        if kind == "never":
            return True
        if kind in ("open", "string") and is_adjacent and _is_no_prefix(text, token.start()):
            return True
        if kind == "open":
            return False
        if kind in ("name", "number", "string"):
            if kind == "name" and (token.end() == len(text) or found in _KEYWORDS):
                before = "" if found in _KEYWORDS else "name"
                continue
            if before in _VALUES and not (kind == "string" and (is_adjacent or before == "string")):
                return True
            before = kind
        elif kind == "closing":
            before = kind
        elif kind not in ("blank", "comment"):
            before = ""
    return False


def _is_no_prefix(text: str, at: int) -> bool:
    """Whether the name that ends at a quotation mark is none that a string of Python may begin with."""
    name = re.search(r"\w+$", text[max(0, at - 40) : at])
    return name is not None and name.group().lower() not in _STRING_PREFIXES


#: What is not read yet is read when it has grown by this many characters, and by this share of its length.
_LEAST_GROWTH: Final = 4
_GROWTH_SHARE: Final = 16
#: These characters identify the beginning of reasoning again.
_FEW_CHARS: Final = 20
#: Something incomplete may begin within this many characters of the end of a text.
_TAIL: Final = 320
_ANSWER_TAG: Final = "|".join(ANSWER_TAGS)
#: The beginning of a tag, a token, a fence, a check word or a character at the end of a text.
_PARTIAL: Final = re.compile(
    rf"(?:<(?![\s=\d])[^<>\n]{{0,200}}|</(?:{_ANSWER_TAG})>\s*"
    r"|\[/?[A-Z_\d ]{0,24}"
    r"|\](?:<\]?[a-z]*\[?>?\[?)?|\u25c1[^\u25b7\n]{0,12}|\u273f[^\n]{0,12}|[`~]+|[\ud800-\udbff]"
    r"|(?<![^\s>])to(?:=[a-z.]*)?|(?<![^\W_])c(?:w(?:-[0-9a-f]*)?)?)$",
    re.IGNORECASE,
)
#: A line that may begin a call, as a JSON object or in words, up to the end of the text; a tag around the
#: answer itself, before which all may be reasoning.
_NO_WORDS: Final = re.compile(
    r"^[ \t]*(?:\[[ \t]*)?\{|^[ \t]*(?:Action:[^\n]*(?:\n[ \t]*(?:A[a-z]*(?: [A-Za-z]*)?)?)?|\[)\Z"
    rf"|^<(?:{_ANSWER_TAG})>|<tool_name>",
    re.MULTILINE,
)
#: Marks of a quotation or a list, behind which a fence may follow.
_LEAD: Final = re.compile(r"[ \t>]*+(?:[-*+]|\d{1,9}[.)]?)?[ \t]*")
#: What a call in other notations begins a line with.
_LINE_MARKS: Final = ("functools[{", "commentary to=", "action:", "invoke name=", "tool_code")
#: How an answer begins whose reasoning has a heading of words.
_HEADINGS: Final = (
    "assistantanalysis",
    "analysis",
    "here is my thought process:",
    "here's my thought process:",
    "thought:",
    "thoughts:",
)
#: What may stand before an answer in the box of a formula.
_BEFORE_BOX: Final = re.compile(r"[\s$]*+(?:\\[(\[])?\s*")
_BOX: Final = "\\boxed{"
#: Labels of blocks that may be programs or calls; those of a shell are known at their end.
_HELD_LABELS: Final = PYTHON_LABELS | CALL_LABELS | {""}


class LiveWords:
    """Reads one answer while it arrives."""

    def __init__(
        self, names: Collection[str], *, check_word: str, most_bytes: int, waits_for_end: bool = False
    ) -> None:
        """Create it before any part of the answer has come.

        Args:
            names: see ``read_reply``.
            check_word: that of the prompt; words end before it.
            most_bytes: longest message.
            waits_for_end: the model begins with reasoning that has no opening tag: nothing is words before
                a tag that closes it.
        """
        self._names, self._check_word, self._left = names, check_word, most_bytes
        self._waits_for_end = waits_for_end
        #: What came and is not done with; it is read again when it has ``_due`` characters.
        self._pieces: list[str] = []
        self._chars = self._due = 0
        #: The words of it that were returned.
        self._shown = ""
        #: Whether words were returned, whether some of them are done with, and whether no others follow.
        self._has_begun = self._has_forgotten = self._is_over = False

    def add(self, piece: str) -> str:
        """Add a piece of the answer; return the words that have become certain."""
        if self._is_over:
            return ""
        self._pieces.append(piece)
        self._chars += len(piece)
        if self._chars < self._due:
            return ""
        text = joined(self._pieces)
        self._pieces = [text]
        self._due = self._chars + max(_LEAST_GROWTH, self._chars // _GROWTH_SHARE)
        if self._waits_for_end and not _has_end(text):
            return ""
        return self._found(text)

    def _found(self, text: str) -> str:
        words = self._certain(text)
        if not words.startswith(self._shown):  # reasoning without a beginning has ended: all of it was that
            self._is_over = True
            return ""
        new = words[len(self._shown) :]
        self._left -= len(new.encode("utf-8", "surrogatepass"))
        if not new or self._left < 0:
            self._is_over |= self._left < 0
            return ""
        self._has_begun = True
        self._shown = words
        self._forget(text)
        return new

    def _forget(self, text: str) -> None:
        """Drop lines that were returned as they came: how the rest is read does not depend on them."""
        done = self._shown.rfind("\n") + 1
        if done and text.startswith(self._shown) and not self._waits_for_end:
            plain = self._shown[:done]
            if "```" not in plain and "~~~" not in plain and not REASONING.search(plain):
                self._has_forgotten = True
                self._pieces, self._chars = [text[done:]], self._chars - done
                self._shown = self._shown[done:]
                self._due = self._chars + _LEAST_GROWTH

    def _certain(self, raw: str) -> str:
        """Return the words at the beginning of a text that stay words whatever follows it."""
        parts = split_answer(_without_open_line(raw))
        words = parts.text[: min(parts.settled, _end_of_words(parts, self._names))].rstrip()
        if not self._has_forgotten:
            words = words.lstrip()
        if not self._has_begun and not self._may_begin(words):
            return ""
        if (found := words.lower().find(self._check_word)) >= 0:
            self._is_over = True
            words = words[:found]
        tail = words[-_TAIL:]
        partial = _PARTIAL.search(tail)
        words = words if partial is None else words[: len(words) - len(tail) + partial.start()]
        last = words[words.rfind("\n") + 1 :]
        begun = last.lstrip().lower()
        marks = (*_LINE_MARKS, *self._names)
        if _LEAD.fullmatch(last) or (begun and any(mark.lower().startswith(begun) for mark in marks)):
            words = words[: len(words) - len(last)]
        return words.rstrip()

    def _may_begin(self, words: str) -> bool:
        begun = words[:40].lower()
        boxed = words[_BEFORE_BOX.match(words[:40]).end() :][: len(_BOX)]  # type: ignore[union-attr]
        if not begun or any(begun.startswith(one) or one.startswith(begun) for one in (*_HEADINGS, ">>>")):
            return False
        return not _BOX.startswith(boxed) and is_certainly_words(words, self._names)


def ends_unopened_reasoning(text: str) -> bool:
    """Whether an answer begins with reasoning that has a closing tag but no opening one."""
    reasoning = split_answer(text).reasoning[:_FEW_CHARS].strip()
    return bool(reasoning) and text.lstrip().startswith(reasoning)


def _has_end(text: str) -> bool:
    parts = split_answer(text)
    return bool(parts.reasoning) and parts.settled == len(parts.text)


def _without_open_line(text: str) -> str:
    """Return a text without a last line that may be a fence, or a part of one."""
    whole = text.rstrip()
    last = whole.rfind("\n") + 1
    line = whole[last:]
    is_complete = "\n" in text[len(whole) :]
    bare = line.strip(" \t>")
    if "```" in line or "~~~" in line or bare.startswith(("`", "~")):
        is_bare = not bare.strip("`~")
        if not is_complete or is_bare:
            return text[:last]
    return text


def _end_of_words(parts: AnswerParts, names: Collection[str]) -> int:
    """Return where in the text of an answer something begins that may be no words."""
    text, begin = parts.text.rstrip(), 0
    for number, (label, block, (start, end)) in enumerate(
        zip(parts.labels, parts.blocks, parts.spans, strict=True)
    ):
        found = _call_in(text, begin, start, names)
        if found is not None:
            return found
        is_last = number + 1 == len(parts.labels) and not text[end:].strip()
        whole = block.strip()
        is_call = whole.startswith(("{", "[")) and (is_last or is_call_text(whole, names))
        is_shell = label in SHELL_LABELS and (is_last or any(f"{name}(" in whole for name in names))
        is_program = label not in LANGUAGES and call_line(block, names, is_whole=not is_last) is not None
        if label in _HELD_LABELS or is_call or is_shell or is_program or (is_last and not whole):
            return start
        begin = end
    found = _call_in(text, begin, len(text), names, is_whole=False)
    return len(text) if found is None else found


def _call_in(text: str, begin: int, end: int, names: Collection[str], *, is_whole: bool = True) -> int | None:
    """Return where a call or a program in another notation begins in a part of a text."""
    part = text[begin:end]
    patterns = (CALL_MARK, _NO_WORDS, CODE_TAG, INLINE_BLOCK)
    ends = [match.start() for pattern in patterns if (match := pattern.search(part))]
    if (line := call_line(part, names, is_whole=is_whole)) is not None:
        ends.append(line)
    ends += [tag.start() for tag in TAG_OF_A_LINE.finditer(part) if tag["name"] in names][:1]
    return begin + min(ends) if ends else None
