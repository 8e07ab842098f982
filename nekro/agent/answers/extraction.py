"""Reads an LLM's answer: reasoning, text, fenced blocks, and the program among them.

Answers are untrusted text of any shape, so the reader walks the lines once and never backtracks over them;
nothing is parsed as Python here. Fences follow CommonMark, and beyond it what people recognise as a block.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from os.path import commonprefix
from typing import Final

from nekro.agent.answers.notations import (
    ANSWER_TAGS,
    BOX,
    BOXED,
    CALL_MARK,
    CODE_END,
    HARMONY_TOKEN,
    HEADED,
    NAKED_HARMONY,
    REASONING,
    ROLE_HEADER,
    STOP_TOKEN,
    WRAPPED,
)

__all__ = [
    "PYTHON_LABELS",
    "AnswerParts",
    "ExtractedCode",
    "extract_code",
    "split_answer",
    "text_beside_code",
]

#: Strings that never end, in one answer; each costs a pass over the rest of the text.
_MAX_OPEN_STRINGS: Final = 4

#: A line that opens a block: marks of lists and quotations, the fence, an info string without its characters.
_FENCE: Final = re.compile(
    r"^(?P<lead>[ \t>]{0,40}(?:(?:[-*+]|\d{1,9}[.)])[ \t]{1,8})?)(?P<mark>`{3,}|~{3,})(?P<info>[^`~\n]*)$"
)
#: What a block begins with.
_OPENS: Final = re.compile(r"[ \t>]*(?:(?:[-*+]|\d{1,9}[.)])[ \t]{1,8})?(?:`{3}|~{3})")
#: A fence behind text.
_LATE_FENCE: Final = re.compile(r"^(?P<before>[^`]*[^`\s])[ \t]*(?P<mark>`{3,})(?P<info>[^`~\n]*)$")
#: A whole block in one line.
_ONE_LINE: Final = re.compile(
    r"^[ \t]*```[ \t]*(?:python3?|py)[ \t]+(?P<code>[^`\n]+)```[ \t]*$", re.IGNORECASE
)
#: Labels of blocks of Python.
PYTHON_LABELS: Final = frozenset({"python", "py", "python3", "py3", "ipython", "ipython3"})
#: Labels that open a block where a fence could also close one of Python.
_OTHER_LABELS: Final = frozenset([
    "bash", "c", "console", "cpp", "css", "csv", "diff", "go", "html", "java", "javascript", "js", "json",
    "log", "markdown", "md", "output", "plaintext", "result", "rust", "sh", "shell", "sql", "text", "toml",
    "ts", "txt", "typescript", "xml", "yaml", "yml",
])  # fmt: skip
#: The label in an info string: ``python:main.py``, ``{python}``, ``{.python}``, ``python title="x"``.
_LABEL: Final = re.compile(r"\{?[ \t]*\.?(?P<label>[^\s:,;={}(#.]*)")
#: Other info strings for Python: ``main.py``, ``language-python``, ``[python]``, ``python_code``.
_PYTHON_INFO: Final = re.compile(
    r"[\w./-]{1,60}\.py$|[\[<(]?(?:lang(?:uage)?-)?python(?:3(?:\.\d{1,2})?)?(?:[_-](?:code|exec|script|run))?[\])>]?$",
    re.IGNORECASE,
)
#: One word that a fence without text behind it may have.
_WORD: Final = re.compile(r"[\w+#.:-]+", re.ASCII)
#: Marks of an end are searched in this many characters at the end of a line.
_TAIL: Final = 80
#: Tokens that matter for finding the end of a string literal.
_STRING_TOKEN: Final = re.compile(r"\\.|\"\"\"|'''|[\"'#]")
#: Spaces that Python refuses outside of strings, and characters without a width.
_ODD_SPACE: Final = re.compile("[\u00a0\u2000-\u200a\u202f\u205f\u3000]")
_NO_WIDTH: Final = re.compile("[\u200b-\u200d\u2060\ufeff]")

#: Modules that models invent for methods that need no import.
_INVENTED: Final = re.compile(
    r"^(?P<indent>[ \t]*)from[ \t]+"
    r"(?:plugins|predefined_methods|predefined_plugins|core\.api|plugin_manager)\b"
)
#: Lines that one import statement may continue on.
_MAX_IMPORT_LINES: Final = 100


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
    those of the blocks, in order and in lower case, "" for a block without one; ``blocks`` are their
    contents, and ``spans`` where they begin and end in ``text``. ``settled`` is how much of ``text`` precedes
    reasoning whose end was not found. ``program`` is the block to run; None if no block is labelled as Python
    or not at all. ``drafts`` are the closed blocks of its kind before it.
    """

    reasoning: str
    text: str
    around: str
    labels: tuple[str, ...]
    blocks: tuple[str, ...]
    spans: tuple[tuple[int, int], ...]
    settled: int
    program: ExtractedCode | None
    drafts: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class _Block:
    """A fenced block: its lines without the fences, and whether its end was found."""

    label: str
    lines: tuple[str, ...]
    closed: bool


@dataclass(frozen=True, kw_only=True)
class _End:
    """Where a block ends: a line, what of it is code, and what of it follows the block."""

    number: int
    head: str = ""
    rest: str = ""
    closed: bool = True


def extract_code(text: str) -> ExtractedCode:
    """Split an answer into its reasoning and its code, in time linear in its length.

    The code is the last block labelled as Python, else the last unlabelled one, else the last one of
    any label. A fence inside a string of the code does not close the block. An answer without any
    fence is code as a whole. Imports of modules that only models invent (``from plugins …``) are
    removed.

    >>> extract_code("<think>easy</think>\\nHere:\\n```python\\nprint(1)\\n```").code
    'print(1)'
    """
    reader = _Reader(text)
    block = _choose(reader.blocks) or (reader.blocks[-1] if reader.blocks else None)
    if block is not None:
        return _extracted(block, reader.reasoning)
    lines = reader.text.strip("\n").split("\n")
    if _label(lines[0]) in PYTHON_LABELS and _label(lines[0]) == lines[0].strip().lower():
        lines = lines[1:]
    code = _runnable([line for line in lines if not _FENCE.match(line)])
    return ExtractedCode(reasoning=reader.reasoning, code=code, fenced=False, closed=True)


def split_answer(text: str) -> AnswerParts:
    """Split an answer into reasoning, text and blocks, in time linear in its length."""
    reader = _Reader(text)
    block = _choose(reader.blocks)
    return AnswerParts(
        reasoning=reader.reasoning,
        text=reader.text,
        around=reader.around,
        labels=tuple(block.label for block in reader.blocks),
        blocks=tuple("\n".join(block.lines) for block in reader.blocks),
        spans=reader.spans,
        settled=reader.settled,
        program=None if block is None else _extracted(block, reader.reasoning),
        drafts=tuple(_runnable(other.lines) for other in _of_one_kind(reader.blocks)[:-1] if other.closed),
    )


def text_beside_code(text: str) -> str:
    """Return the reasoning and the text around the blocks of an answer, which without a block is code.

    >>> text_beside_code("I look.\\n```python\\nprint(1)\\n```")
    'I look.'
    """
    parts = split_answer(text)
    shown = [parts.reasoning, parts.around] if parts.labels else [parts.reasoning]
    return "\n".join(part.strip() for part in shown if part.strip())


class _Reader:
    """Reads an answer once, line by line; its parts are ready after construction."""

    def __init__(self, text: str) -> None:
        self.blocks: list[_Block] = []
        #: Where each of them begins and ends in the pieces of the text.
        self._places: list[tuple[int, int]] = []
        #: The piece of the text that follows the first reasoning without an end; None: each has one.
        self._unsettled: int | None = None
        self._thoughts: list[str] = []
        self._text: list[str] = []
        self._around: list[str] = []
        self._open_strings = 0
        text = text.replace("\r\n", "\n").replace("\r", "\n").removeprefix("\ufeff")
        header = ROLE_HEADER.match(text)
        self._lines = self._unpack(text[header.end() if header else 0 :]).split("\n")
        while self._lines and not self._lines[-1].strip():
            self._lines.pop()
        #: The current line, and from where on it is still to be read. A copy of what is left for each tag of
        #: a line would take quadratic time.
        self._number = 0
        self._rest: tuple[str, int] | None = None
        while self._number < len(self._lines):
            line, begin = self._rest or (self._lines[self._number], 0)
            self._rest = None
            if _OPENS.match(line, begin) is None or not self._read_block(line[begin:]):
                self._read_text(line, begin)
            if self._rest is None:
                self._number += 1
        self._keep_answer_only()

    @property
    def reasoning(self) -> str:
        """The parts of the reasoning, each on lines of its own."""
        return "\n".join(thought.strip() for thought in self._thoughts if thought.strip())

    @property
    def text(self) -> str:
        """All but the reasoning."""
        text = "".join(self._text)
        wrapped = WRAPPED.fullmatch(text) or BOXED.fullmatch(text)
        return text if wrapped is None else wrapped["inner"]

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """Where each block begins and ends in ``text``."""
        ends = self._ends() if self.blocks else []
        return tuple((ends[start], ends[end]) for start, end in self._places)

    @property
    def settled(self) -> int:
        """How much of ``text`` is before the first reasoning without an end."""
        return len(self.text) if self._unsettled is None else max(0, self._ends()[self._unsettled])

    def _ends(self) -> list[int]:
        """Return where each piece of the text begins in ``text``, and the last one ends."""
        text = "".join(self._text)
        wrapped = WRAPPED.fullmatch(text) or BOXED.fullmatch(text)
        ends = [0 if wrapped is None else -wrapped.start("inner")]
        for piece in self._text:
            ends.append(ends[-1] + len(piece))
        return ends

    @property
    def around(self) -> str:
        """The text outside of the blocks."""
        return "".join(self._around)

    def _unpack(self, text: str) -> str:
        """Return an answer without the channels of gpt-oss and without what stands under headings."""
        naked = NAKED_HARMONY.fullmatch(text)
        if naked is not None:
            self._thoughts.append(naked["thought"] or naked["only"] or "")
            return naked["rest"] or ""
        for heading in HEADED:
            headed = heading.fullmatch(text)
            thought = "" if headed is None else headed["thought"]
            # A program or a call before the answer is not reasoning, and the answer assumes its result.
            if headed is not None and not _has_fence(thought) and CALL_MARK.search(thought) is None:
                self._thoughts.append(thought)
                return headed["rest"] or ""
        if "_of_box" in text:
            text = BOX.sub("", text)
        first = HARMONY_TOKEN.search(text)
        if first is None or "<|message|>" not in text or _has_fence(text[: first.start()]):
            return text
        parts = HARMONY_TOKEN.split(text)
        self._thoughts.append(parts[0])
        header, kept = "", []
        for token, content in zip(parts[1::2], parts[2::2], strict=True):
            if token == "channel":  # noqa: S105 - a control token
                header = content.strip()
            elif token == "message" and " to=" in header:  # noqa: S105
                kept.append(f"<|channel|>commentary to={header.partition(' to=')[2]}\n{content}")
            elif token == "message" and (not header or header.startswith("final")):  # noqa: S105
                kept.append(content)
            elif token == "message":  # noqa: S105
                self._thoughts.append(content)
            elif token != "constrain":  # noqa: S105
                header = ""
        return "\n".join(kept)

    def _keep_answer_only(self) -> None:
        """Make reasoning of the text before an answer in a tag, which ends the text."""
        text = "" if self.blocks else "".join(self._text).rstrip()
        for tag in ANSWER_TAGS if text.endswith(">") else ():
            start = text.rfind(f"\n<{tag}>")
            if start >= 0 and text.endswith(f"</{tag}>"):
                self._thoughts.append(text[:start])
                self._text = self._around = [text[start:]]

    def _read_text(self, line: str, begin: int) -> None:
        for mark in REASONING.finditer(line, begin):
            if mark.lastgroup == "quoted":
                continue
            if mark.lastgroup == "stop":
                self._keep(line[begin : mark.start()])
                self._number = len(self._lines)
            elif mark.lastgroup == "open":
                self._keep(line[begin : mark.start()])
                self._read_thought(line, mark.end())
            else:
                # The chat template has opened the reasoning, so the answer holds only its end.
                self._thoughts.append("".join(self._text) + line[begin : mark.start()])
                self.blocks, self._places, self._text, self._around = [], [], [], []
                self._unsettled = None
                self._rest = (line, mark.end())
            return
        line = line[begin:]
        late = _LATE_FENCE.match(line) if "```" in line else None
        label = "" if late is None else _label(late["info"])
        if late is not None and (label in PYTHON_LABELS or (not label and late["before"].endswith(":"))):
            self._keep(late["before"] + "\n")
            self._rest = (late["mark"] + late["info"], 0)
        else:
            self._keep(line + "\n")

    def _read_thought(self, line: str, begin: int) -> None:
        """Read reasoning up to the tag that closes it; to the last one if tags are mentioned in it."""
        depth, number, thought = 1, self._number, list[str]()
        #: The last tag that closes: number of its line, lines of the thought before it, begin of the thought.
        last: tuple[int, int, re.Match[str], int] | None = None
        while depth and number < len(self._lines):
            for mark in REASONING.finditer(line, begin):
                if mark.lastgroup == "open":
                    depth += 1
                elif mark.lastgroup == "close":
                    depth -= 1
                    last = (number, len(thought), mark, begin)
                if not depth:
                    break
            if depth:
                thought.append(line[begin:])
                number += 1
                line, begin = (self._lines[number] if number < len(self._lines) else ""), 0
        if depth and self._unsettled is None:
            self._unsettled = len(self._text)
        if last is None:  # cut off during the reasoning
            self._number = number
        else:
            self._number, kept, mark, begin = last
            self._rest = (mark.string, mark.end())
            thought = [*thought[:kept], mark.string[begin : mark.start()]]
        self._thoughts.append("\n".join(thought))

    def _read_block(self, line: str) -> bool:
        """Read the block that a line opens; return whether it opens one."""
        if (whole := _ONE_LINE.match(line)) is not None:
            self._add(_Block(label="python", lines=(whole["code"].strip(),), closed=True), line + "\n")
            return True
        fence = _FENCE.match(line)
        if fence is None:
            return False
        label = _label(fence["info"])
        is_python = label in PYTHON_LABELS
        # A bare fence on the last line closes something that was not opened.
        if self._number + 1 == len(self._lines) and not is_python:
            return False
        end = self._find_end(fence["mark"], fence["lead"], is_python=is_python or not label)
        last = len(self._lines) if end is None else end.number
        raw = self._lines[self._number + 1 : last]
        if end is not None and end.head:
            raw.append(end.head)
        shown = "\n".join([line, *raw, *([] if end is None else [fence["mark"]])]) + "\n"
        self._add(
            _Block(label=label, lines=_outdent(raw, fence["lead"]), closed=end is not None and end.closed),
            shown,
        )
        self._number = last
        self._rest = None if end is None or not end.rest else (end.rest, 0)
        return True

    def _find_end(self, mark: str, lead: str, *, is_python: bool) -> _End | None:
        """Find the end of a block.

        In Python a fence inside a triple-quoted string is text. If that rule leaves no closing fence
        because the string never ends, the last fence closes the block, so that the code stays complete.
        """
        is_python = is_python and self._open_strings < _MAX_OPEN_STRINGS
        quote: str | None = None
        last: _End | None = None
        for number in range(self._number + 1, len(self._lines)):
            line = self._lines[number]
            is_last = number + 1 == len(self._lines)
            end = _end_in(line, number, mark, lead, is_python=is_python, is_last=is_last, quote=quote)
            if end is not None:
                if quote is None:
                    return end
                last = end
            if is_python:
                quote = _walk(line, quote)[1]
        self._open_strings += 1
        return last

    def _keep(self, text: str) -> None:
        self._text.append(text)
        self._around.append(text)

    def _add(self, block: _Block, shown: str) -> None:
        if self._text and not self._text[-1].endswith("\n"):
            self._keep("\n")
        self.blocks.append(block)
        self._places.append((len(self._text), len(self._text) + 1))
        self._text.append(shown)


def _extracted(block: _Block, reasoning: str) -> ExtractedCode:
    return ExtractedCode(reasoning=reasoning, code=_runnable(block.lines), fenced=True, closed=block.closed)


def _runnable(lines: Sequence[str]) -> str:
    return _drop_invented(_plain_spaces(lines)).strip("\n")


def _has_fence(text: str) -> bool:
    return any(_FENCE.match(line) for line in text.split("\n"))


def _label(info: str) -> str:
    """Return the label in an info string, "python" for one that names Python or a file of it."""
    info = _NO_WIDTH.sub("", info).strip()
    if _PYTHON_INFO.match(info[:_TAIL]):
        return "python"
    found = _LABEL.match(info)
    return found["label"].lower() if found else ""


def _of_one_kind(blocks: Sequence[_Block]) -> list[_Block]:
    """Return the blocks labelled as Python, else those without a label."""
    labelled = [block for block in blocks if block.label in PYTHON_LABELS]
    return labelled or [block for block in blocks if not block.label]


def _choose(blocks: Sequence[_Block]) -> _Block | None:
    """Return the last block labelled as Python, else the last one without a label."""
    found = _of_one_kind(blocks)
    return found[-1] if found else None


def _outdent(lines: Sequence[str], lead: str) -> tuple[str, ...]:
    """Remove the marks of quotation and the indentation that all lines of a block share."""
    if ">" in lead:
        lines = [re.sub(r"^[ \t]{0,3}(?:>[ \t]?){1,8}", "", line) for line in lines]
    leads = [line[: len(line) - len(line.lstrip(" \t"))] for line in lines if line.strip()]
    common = commonprefix(leads)  # noqa: RUF071 - no paths
    return tuple(line.removeprefix(common) for line in lines)


def _end_in(
    line: str, number: int, mark: str, lead: str, *, is_python: bool, is_last: bool, quote: str | None
) -> _End | None:
    """Return how a line ends a block; None if it does not."""
    stripped = line.lstrip(" \t>" if ">" in lead else " \t")
    length = len(stripped) - len(stripped.lstrip(mark[0]))
    if length >= len(mark):
        return _end_at_fence(stripped, length, number, is_python=is_python)
    if quote is not None or not (is_python or is_last):
        return None
    tail = line[-_TAIL:].rstrip()
    tags = CODE_END.search(tail) if is_python else None
    if tags is not None:
        head = line.rstrip()[: tags.start() - len(tail)]
        _, after, is_inside = _walk(head, None)
        if after is None and not is_inside:
            rest = tags.group() if STOP_TOKEN.search(tags.group()) else ""
            head = head.rstrip()
            return _End(number=number, head=head.removesuffix(mark).rstrip(), rest=rest)
    if tail.endswith(mark):
        head = line.rstrip().removesuffix(mark)
        if is_last or _walk(head, None)[1:] == (None, False):
            return _End(number=number, head=head)
    return None


def _end_at_fence(stripped: str, length: int, number: int, *, is_python: bool) -> _End | None:
    """Return how a line that begins with a long enough fence ends a block; None if it opens one in it."""
    rest = stripped[length:].strip()
    if not rest:
        return _End(number=number)
    if _WORD.fullmatch(rest) is None or not (is_python or rest.isascii()):
        label = _label(rest)
        if not (is_python and rest.startswith("{") and label in PYTHON_LABELS):
            is_tag = CODE_END.fullmatch(rest) is not None and STOP_TOKEN.search(rest) is None
            return _End(number=number, rest="" if is_tag else rest)
    if not is_python:
        return None
    if _label(rest) in PYTHON_LABELS | _OTHER_LABELS:
        return _End(number=number, rest=stripped, closed=False)
    return _End(number=number, rest=rest)


def _walk(line: str, quote: str | None) -> tuple[list[tuple[int, int]], str | None, bool]:
    """Walk over a line of Python that begins inside of a triple quote, or outside of one (None).

    Returns what is outside of strings and comments as pairs of positions, the triple quote that is open after
    the line, and whether the line ends inside of another string or of a comment.
    """
    outside: list[tuple[int, int]] = []
    short: str | None = None
    start = 0
    for token in _STRING_TOKEN.finditer(line):
        found = token.group()
        if quote is not None or short is not None:
            if found in (quote, short):
                quote = short = None
                start = token.end()
        elif found == "#":
            outside.append((start, token.start()))
            return outside, None, True
        elif not found.startswith("\\"):
            outside.append((start, token.start()))
            quote, short = (found, None) if len(found) == 3 else (None, found)
    if quote is None and short is None:
        outside.append((start, len(line)))
    return outside, quote, short is not None


def _plain_spaces(lines: Sequence[str]) -> list[str]:
    """Replace spaces outside of strings that Python refuses."""
    if not any(_ODD_SPACE.search(line) or _NO_WIDTH.search(line) for line in lines):
        return list(lines)
    plain: list[str] = []
    quote: str | None = None
    for line in lines:
        outside, quote, _ = _walk(line, quote)
        pieces, position = [], 0
        for start, end in outside:
            pieces += [line[position:start], _NO_WIDTH.sub("", _ODD_SPACE.sub(" ", line[start:end]))]
            position = end
        plain.append("".join([*pieces, line[position:]]))
    return plain


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
