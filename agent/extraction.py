"""Extracts the code to run from an LLM's answer.

An answer is optional reasoning (``<think>…</think>``), text, and a final fenced code block.
Answers are untrusted text of any shape, so each function walks the lines once and never
backtracks over them; nothing is parsed as Python on the host.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

__all__ = [
    "AnswerParts",
    "ExtractedCode",
    "extract_code",
    "hide_check_words",
    "new_check_word",
    "reveals_check_word",
    "split_answer",
    "text_beside_code",
]

_OPEN_THINK: Final = re.compile(r"^[ \t]*<think>", re.MULTILINE)
_CLOSE_THINK: Final = "</think>"
_HEADLESS_THINK: Final = re.compile(r"</think>[ \t]*$", re.MULTILINE)
#: Most parts of reasoning removed from one answer; each costs a pass over the text.
_MAX_THINK_TAGS: Final = 16

#: Strings that never end, in one answer; each costs a pass over the rest of the text.
_MAX_OPEN_STRINGS: Final = 4

#: A fence line: up to three spaces, the fence, an info string without fence characters.
_FENCE: Final = re.compile(r"^ {0,3}(?P<mark>`{3,}|~{3,})(?P<info>[^`~\n]*)$")
_PYTHON_LABELS: Final = frozenset({"python", "py", "python3", "py3"})
#: Tokens that matter for finding the end of a string literal.
_STRING_TOKEN: Final = re.compile(r"\\.|\"\"\"|'''|[\"'#]")

#: Modules that models invent for methods that need no import.
_INVENTED: Final = re.compile(
    r"^(?P<indent>[ \t]*)from[ \t]+"
    r"(?:plugins|predefined_methods|predefined_plugins|core\.api|plugin_manager)\b"
)
#: Lines that one import statement may continue on.
_MAX_IMPORT_LINES: Final = 100

#: Bytes of entropy of a check word: enough against guessing, short enough for the prompt.
_CHECK_WORD_BYTES: Final = 9
_CHECK_WORD: Final = re.compile(rf"\bcw-[0-9a-f]{{{2 * _CHECK_WORD_BYTES}}}\b", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class ExtractedCode:
    """The parts of an answer.

    ``fenced`` is False when the whole answer was taken as code; ``closed`` is False when the
    code's fence is never closed, as in an answer that was cut off.
    """

    reasoning: str
    code: str
    fenced: bool
    closed: bool

    @property
    def is_empty(self) -> bool:
        """Whether the code has no effect: it is empty or consists of comments."""
        # Split only where the compiler ends lines.
        lines = self.code.replace("\r", "\n").split("\n")
        return all(not line.strip() or line.lstrip().startswith("#") for line in lines)


@dataclass(frozen=True, kw_only=True)
class AnswerParts:
    """An answer as text with fenced blocks.

    ``text`` is everything but the reasoning; ``around`` is what of it is outside the blocks. ``labels`` are
    those of the blocks, in order and in lower case, "" for a block without one; ``last_block`` is the
    content of the last one.
    """

    reasoning: str
    text: str
    around: str
    labels: tuple[str, ...]
    last_block: str

    @property
    def has_program(self) -> bool:
        """Whether a block is labelled as Python or not at all."""
        return any(not label or label in _PYTHON_LABELS for label in self.labels)


@dataclass(frozen=True, kw_only=True)
class _Block:
    """Lines ``[start, end)`` between an opening fence and its end."""

    label: str
    start: int
    end: int
    closed: bool


def extract_code(text: str) -> ExtractedCode:
    """Split an answer into its reasoning and its code, in time linear in its length.

    The code is the last block labelled as Python, else the last unlabelled one, else the last one of
    any label. A fence inside a string of the code does not close the block. An answer without any
    fence is code as a whole. Imports of modules that only models invent (``from plugins …``) are
    removed.

    >>> extract_code("<think>easy</think>\\nHere:\\n```python\\nprint(1)\\n```").code
    'print(1)'
    """
    reasoning, rest = _split_reasoning(text.replace("\r\n", "\n").replace("\r", "\n"))
    lines = _detach_fence(rest.split("\n"))
    block = _choose(list(_blocks(lines)))
    if block is None:
        lines = [line for line in lines if not _FENCE.match(line)]
        code = _drop_invented(lines).strip("\n")
        return ExtractedCode(reasoning=reasoning, code=code, fenced=False, closed=True)
    code = _drop_invented(lines[block.start : block.end]).strip("\n")
    return ExtractedCode(reasoning=reasoning, code=code, fenced=True, closed=block.closed)


def split_answer(text: str) -> AnswerParts:
    """Split an answer into reasoning, text and blocks, in time linear in its length."""
    reasoning, rest = _split_reasoning(text.replace("\r\n", "\n").replace("\r", "\n"))
    lines = _detach_fence(rest.split("\n"))
    around: list[str] = []
    blocks = list(_blocks(lines))
    position = 0
    for block in blocks:
        around += lines[position : block.start - 1]
        position = block.end + 1
    around += lines[position:]
    return AnswerParts(
        reasoning=reasoning,
        text=rest,
        around="\n".join(around),
        labels=tuple(block.label for block in blocks),
        last_block="\n".join(lines[blocks[-1].start : blocks[-1].end]) if blocks else "",
    )


def text_beside_code(text: str) -> str:
    """Return the reasoning and the text around the blocks of an answer, which without a block is code.

    >>> text_beside_code("I look.\\n```python\\nprint(1)\\n```")
    'I look.'
    """
    parts = split_answer(text)
    shown = [parts.reasoning, parts.around] if parts.labels else [parts.reasoning]
    return "\n".join(part.strip() for part in shown if part.strip())


def new_check_word() -> str:
    """Return a fresh one-time word for one round's prompt."""
    return "cw-" + secrets.token_hex(_CHECK_WORD_BYTES)


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
    return _CHECK_WORD.sub("cw-[hidden]", text)


def _split_reasoning(text: str) -> tuple[str, str]:
    """Remove the reasoning before the first code block from the text."""
    parts: list[str] = []
    for _ in range(_MAX_THINK_TAGS):
        opening = _OPEN_THINK.search(text)
        if opening is None or _has_fence(text[: opening.start()]):
            break
        closing = text.find(_CLOSE_THINK, opening.end())
        if closing < 0:  # the answer was cut off during the reasoning
            parts.append(text[opening.end() :])
            text = text[: opening.start()]
            break
        parts.append(text[opening.end() : closing])
        text = text[: opening.start()] + text[closing + len(_CLOSE_THINK) :]
    if not parts:
        return _split_headless_reasoning(text)
    return "\n".join(part.strip() for part in parts), text


def _split_headless_reasoning(text: str) -> tuple[str, str]:
    """Handle chat templates that open the reasoning themselves, so the answer contains only its end."""
    closing = _HEADLESS_THINK.search(text)
    if closing is None or not text[closing.end() :].strip() or "<think>" in text[: closing.start()]:
        return "", text
    return text[: closing.start()].strip(), text[closing.end() :]


def _has_fence(text: str) -> bool:
    return any(_FENCE.match(line) for line in text.split("\n"))


def _detach_fence(lines: list[str]) -> list[str]:
    """Move a closing fence at the end of the last line of code to a line of its own."""
    while lines and not lines[-1].strip():
        lines.pop()
    if len(lines) < 2 or not lines[-1].endswith("```") or _FENCE.match(lines[-1]):
        return lines
    if not any(_FENCE.match(line) for line in lines[:-1]):
        return lines
    return [*lines[:-1], lines[-1].rstrip("`"), "```"]


def _choose(blocks: Sequence[_Block]) -> _Block | None:
    labelled = [block for block in blocks if block.label in _PYTHON_LABELS]
    unlabelled = [block for block in blocks if not block.label]
    for candidates in (labelled, unlabelled, blocks):
        if candidates:
            return candidates[-1]
    return None


def _blocks(lines: Sequence[str]) -> Iterator[_Block]:
    """Yield the fenced blocks in order; a bare fence on the very last line opens none."""
    position = open_strings = 0
    while position < len(lines):
        fence = _FENCE.match(lines[position])
        position += 1
        if fence is None or position == len(lines):
            continue
        label = fence["info"].strip().lower().split(" ", 1)[0]
        is_python = (not label or label in _PYTHON_LABELS) and open_strings < _MAX_OPEN_STRINGS
        end, is_open = _closing_line(lines, position, fence["mark"], is_python=is_python)
        open_strings += is_open
        yield _Block(
            label=label, start=position, end=len(lines) if end is None else end, closed=end is not None
        )
        position = len(lines) if end is None else end + 1


def _closing_line(lines: Sequence[str], start: int, mark: str, *, is_python: bool) -> tuple[int | None, bool]:
    """Return the line of the fence that closes a block, or None, and whether a string is open there.

    In Python a fence inside a triple-quoted string is text. If that rule leaves no closing fence
    because the string never ends, the last fence closes the block, so that the code stays complete.
    """
    quote: str | None = None
    last: int | None = None
    for number in range(start, len(lines)):
        line = lines[number]
        if _closes(line, mark):
            if quote is None:
                return number, False
            last = number
        if is_python:
            quote = _quote_after(line, quote)
    return last, True


def _closes(line: str, mark: str) -> bool:
    fence = _FENCE.match(line)
    if fence is None or fence["info"].strip():
        return False
    return fence["mark"][0] == mark[0] and len(fence["mark"]) >= len(mark)


def _quote_after(line: str, quote: str | None) -> str | None:
    """Return the triple quote that is open after a line of Python, given the one open before it."""
    short: str | None = None
    for token in _STRING_TOKEN.finditer(line):
        found = token.group()
        if quote is not None:
            quote = None if found == quote else quote
        elif short is not None:
            short = None if found == short else short
        elif found == "#":
            break
        elif len(found) == 3:
            quote = found
        elif not found.startswith("\\"):
            short = found
    return quote


def _drop_invented(lines: Sequence[str]) -> str:
    """Delete imports of invented modules, including continuation lines.

    An indented import becomes ``pass``, because it may be the only statement of its block.
    """
    kept: list[str] = []
    position = 0
    while position < len(lines):
        match = _INVENTED.match(lines[position])
        if match is None:
            kept.append(lines[position])
            position += 1
            continue
        if match["indent"]:
            kept.append(match["indent"] + "pass")
        position = _statement_end(lines, position)
    return "\n".join(kept)


def _statement_end(lines: Sequence[str], start: int) -> int:
    """Return the line after an import statement that starts at ``start``."""
    depth = 0
    for number in range(start, min(start + _MAX_IMPORT_LINES, len(lines))):
        statement = lines[number].split("#", 1)[0].rstrip()
        depth += statement.count("(") - statement.count(")")
        if depth <= 0 and not statement.endswith("\\"):
            return number + 1
    return start + 1
