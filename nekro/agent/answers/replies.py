"""Classifies a model's answer: a program, words for the people in the chat, or neither.

Answers are untrusted text of any shape. They are judged line by line in linear time; a short answer without a
block is also read by Python's parser, within limits, and never compiled.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import islice
from typing import Any, Final

from pydantic_core import from_json

from nekro.agent.answers.extraction import AnswerParts, ExtractedCode, extract_code, split_answer
from nekro.agent.answers.notations import CALL_LABELS, CALL_MARK, TAG_OF_A_LINE
from nekro.agent.answers.programs import (
    MOST_PARSED_CHARS,
    USELESS_IN_WORDS,
    calls_known,
    is_change,
    is_refused,
    joined_program,
    parse,
    plain_program,
    program_in_json,
    tagged_program,
)
from nekro.agent.llm import LLMAnswer

__all__ = [
    "INLINE_BLOCK",
    "LANGUAGES",
    "SHELL_LABELS",
    "Reply",
    "ReplyKind",
    "begins_program",
    "call_line",
    "calls_first",
    "is_call_text",
    "read_program",
    "read_reply",
]

#: Beginning of a call as a JSON object, also of one that is cut off or is not quite JSON.
_CALL_OBJECT: Final = re.compile(
    r"""^\[?\s*\{\s*["'](?:name|function|tool|tool_name|type|tool_calls|arguments|parameters|action)["']\s*:"""
)
_ARGUMENTS: Final = re.compile(r"""["'](?:arguments|parameters|action_input)["']\s*:""")
#: The beginning of a line that may hold a call as a JSON object.
_CALL_LINE: Final = re.compile(r"^[ \t]*+(?=\[?[ \t]*\{)", re.MULTILINE)
_CALL_REASONS: Final = frozenset([
    "tool_calls", "function_call", "tool_use", "malformed_function_call", "unexpected_tool_call",
])  # fmt: skip
_NAMES: Final = ("name", "function", "tool", "tool_name", "action")
_VALUES: Final = ("arguments", "parameters", "action_input")
#: Longest answer that is read as JSON; the rules for lines judge longer ones.
_MOST_JSON_CHARS: Final = 200_000
#: Lines and blocks of one answer that are read as calls, and ends of a call that begins an answer.
_MOST_CALLS: Final = 8
_JSON: Final = json.JSONDecoder()
#: The heading of a call in a block, as in ReAct.
_ACTION: Final = re.compile(r"^[ \t]{0,20}Action:[ \t]{0,20}$", re.MULTILINE)

_IMPORT: Final = re.compile(
    r"(?:import\s+[A-Za-z_][\w.]*(?:\s+as\s+\w+)?(?:\s*,\s*[A-Za-z_][\w.]*(?:\s+as\s+\w+)?)*"
    r"|from\s+[.\w]+\s+import\s+(?:\*|\(?[\w ,]*\)?,?))\s*(?:[;#\\].*)?$"
)
#: A call, alone or assigned: ``name(``, ``await name(``, ``first, second = name(``, ``text: str = name(``.
_CALL: Final = re.compile(
    r"(?:[A-Za-z_]\w*(?:\s*,\s*[A-Za-z_]\w*)*(?:\s*:\s*[\w.\[\],|]+)?\s*=\s*)?(?:await\s+)?"
    r"(?P<name>[A-Za-z_][\w.]*)\("
)
#: The end of a call and a letter directly behind it.
_GLUED: Final = re.compile(r"\)(?=[^\W\d_])")
#: The first characters of a line show its form; patterns never meet a longer text.
_HEAD_CHARS: Final = 300
#: Labels of other languages; a name in their code may equal that of a method.
LANGUAGES: Final = frozenset([
    "asm", "c", "c#", "c++", "cpp", "cs", "csharp", "css", "csv", "dart", "elixir", "go", "graphql", "html",
    "java", "javascript", "js", "json", "jsx", "julia", "kotlin", "latex", "lua", "matlab", "perl", "php",
    "r", "ruby", "rust", "scala", "sql", "svelte", "swift", "toml", "ts", "tsx", "typescript", "vue", "yaml",
    "yml",
])  # fmt: skip
#: Labels of shells; a call of a method in their code is part of another line.
SHELL_LABELS: Final = frozenset(
    {"bash", "sh", "shell", "zsh", "console", "terminal", "cmd", "powershell", "diff", "patch", "pycon"}
)
#: A block of Python in the middle of a line.
INLINE_BLOCK: Final = re.compile(r"```[ \t]{0,4}(?:python3?|py)\b")
#: A text that is a program between marks that are no fence.
_ODD_FENCE: Final = re.compile(
    r"\A(?P<mark>``|\'\'\'|\"\"\")[ \t]*(?:python3?|py)[ \t]*\n(?P<inner>.*)(?P=mark)",
    re.DOTALL | re.IGNORECASE,
)
#: Lines of one answer that are parsed to find a call among words.
_MOST_LINES: Final = 50
_NAME_OF_CALL: Final = re.compile(r"(?<![\w.])(?P<name>[A-Za-z_][\w.]{0,99})[ \t]{0,4}\(")
#: How a line of a program ends behind an opened call; a sentence about a method goes on in words.
_ENDS: Final = (")", "(", ",", "[", "{", "\\", '"', "'", ";")


class ReplyKind(StrEnum):
    """What an answer is."""

    #: A program to run, which may be empty.
    PROGRAM = "program"
    #: A message for the people in the chat.
    WORDS = "words"
    #: A call in the notation of the protocol or of the model, which runs nothing here.
    TOOL_CALL = "tool_call"
    #: Neither surely a program nor surely words: nothing runs and nothing is sent.
    MIXED = "mixed"
    #: Nothing, or reasoning only.
    NOTHING = "nothing"


@dataclass(frozen=True, kw_only=True)
class Reply:
    """An answer in its parts.

    ``reasoning`` includes the text around a program. ``extracted`` is the program; None unless ``kind`` is
    ``PROGRAM``. ``words`` is empty unless it is ``WORDS``.
    """

    kind: ReplyKind
    reasoning: str = ""
    extracted: ExtractedCode | None = None
    words: str = ""


def read_reply(answer: LLMAnswer, names: Collection[str]) -> Reply:
    """Classify an answer, in time linear in its length.

    A block labelled as Python or without a label is the program, the last one as in ``extract_code``. An
    answer without such a block is words, with the blocks of other languages as they are written, unless it
    plainly is a program without a fence or a call in another notation.

    Args:
        names: names of the methods that the program may call.
    """
    if answer.is_refusal:
        return Reply(kind=ReplyKind.WORDS, words=answer.text.strip())
    parts = split_answer(answer.text)
    text = parts.text.strip()
    program = parts.program
    if program is not None and not is_call_text(program.code.strip()):
        reasoning = _joined(parts.reasoning, parts.around)
        code = _whole_program(program.code, parts.drafts, names)
        if is_change(code):
            return Reply(kind=ReplyKind.MIXED, reasoning=_joined(parts.reasoning, text))
        return Reply(kind=ReplyKind.PROGRAM, extracted=replace(program, code=code), reasoning=reasoning)
    if program is None and (shown := _shown_program(parts, names)) is not None:
        return shown
    if program is not None or _calls_tool(answer, parts, names):
        return Reply(kind=ReplyKind.TOOL_CALL, reasoning=_joined(parts.reasoning, text))
    kind = None if parts.labels else _kind_without_block(text, names)
    if kind is None and _shows_program(parts, names):
        kind = ReplyKind.MIXED
    if kind is ReplyKind.MIXED:
        return Reply(kind=kind, reasoning=_joined(parts.reasoning, text))
    if kind is ReplyKind.PROGRAM:
        extracted = replace(extract_code(_bare(text)), reasoning=parts.reasoning)
        return Reply(kind=kind, extracted=_plain(extracted), reasoning=parts.reasoning)
    return Reply(kind=ReplyKind.WORDS if text else ReplyKind.NOTHING, reasoning=parts.reasoning, words=text)


def read_program(text: str) -> ExtractedCode:
    """Return the program of an answer that is one by agreement: with ``NEKRO_AGENT__ANSWERS=strict``."""
    return _plain(extract_code(text))


def _plain(extracted: ExtractedCode) -> ExtractedCode:
    return replace(extracted, code=plain_program(extracted.code))


def _whole_program(code: str, drafts: Sequence[str], names: Collection[str]) -> str:
    """Return the program of a block in plain Python, with what it needs of the blocks before it."""
    if code.startswith("```") and (inner := extract_code(code)).fenced and inner.closed:
        code = inner.code
    code = plain_program(code)
    return joined_program(code, drafts, names) if drafts else code


def _shown_program(parts: AnswerParts, names: Collection[str]) -> Reply | None:
    """Return the program that an answer without a block of Python holds in a tag or in JSON; None if none."""
    around = parts.around.strip()
    if len(parts.blocks) == 1:
        code = program_in_json(parts.blocks[0].strip(), names)
    elif parts.blocks:
        code = None
    elif (tagged := tagged_program(around, names)) is not None:
        if not tagged.closed:
            return Reply(kind=ReplyKind.MIXED, reasoning=_joined(parts.reasoning, around))
        code, around = tagged.code, tagged.around
    else:
        code, around = program_in_json(around, names), ""
    if code is None:
        return None
    extracted = ExtractedCode(reasoning=parts.reasoning, code=code, fenced=True, closed=True)
    return Reply(kind=ReplyKind.PROGRAM, extracted=extracted, reasoning=_joined(parts.reasoning, around))


def _shows_program(parts: AnswerParts, names: Collection[str]) -> bool:
    """Whether people would read calls of methods: in a block for no language of its own, or on a line."""
    if INLINE_BLOCK.search(parts.around) or call_line(parts.around, names) is not None:
        return True
    for label, block in zip(parts.labels, parts.blocks, strict=True):
        if label in SHELL_LABELS and any(call["name"] in names for call in _NAME_OF_CALL.finditer(block)):
            return True
        if label not in LANGUAGES and call_line(block, names) is not None:
            return True
    return False


def call_line(text: str, names: Collection[str], *, is_whole: bool = True) -> int | None:
    """Return where the first line of a text begins that is a call of a known method, or begins one.

    Args:
        is_whole: False if the last line may go on: then it need not be a call yet.
    """
    begin, left = 0, _MOST_LINES
    for line in text.split("\n"):
        start, begin = begin, begin + len(line) + 1
        code = line.strip()
        call = _CALL.match(code[:_HEAD_CHARS]) if "(" in code else None
        if call is None or call["name"] not in names or not left:
            continue
        left -= 1
        may_go_on = not is_whole and begin > len(text)
        if may_go_on or code.endswith(("(", ",")) or parse(code) is not None:
            return start
    return None


def _joined(*texts: str) -> str:
    return "\n".join(stripped for text in texts if (stripped := text.strip()))


def _calls_tool(answer: LLMAnswer, parts: AnswerParts, names: Collection[str]) -> bool:
    if answer.tool_calls or answer.finish_reason.lower() in _CALL_REASONS:
        return True
    if CALL_MARK.search(parts.around) or not CALL_LABELS.isdisjoint(parts.labels):
        return True
    if any(tag["name"] in names for tag in TAG_OF_A_LINE.finditer(parts.around)):
        return True
    is_one_block = len(parts.labels) == 1 and not parts.around.strip()
    whole = (parts.blocks[-1] if is_one_block else parts.text).strip()
    if is_call_text(whole) or _names_method(whole, names) or _holds_call(parts.around):
        return True
    # A block beside words may be an example: it is a call if it names a method or stands under a heading.
    known = None if _ACTION.search(parts.around) else names
    return any(is_call_text(block.strip(), known) for block in parts.blocks[:_MOST_CALLS])


def _holds_call(text: str) -> bool:
    """Whether a line of a text begins a call as a JSON object."""
    for count, line in enumerate(_CALL_LINE.finditer(text)):
        if count == _MOST_CALLS:
            break
        try:
            value, _ = _JSON.raw_decode(text[line.end() : line.end() + _MOST_JSON_CHARS])
        except (ValueError, RecursionError):
            continue
        if _is_call(value, None):
            return True
    return False


def is_call_text(whole: str, names: Collection[str] | None = None) -> bool:
    """Whether a text is only a call as a JSON object, or several in a list.

    Args:
        names: what is called must be one of them; None allows any name and JSON that is cut off.
    """
    if not whole.startswith(("{", "[")):
        return False
    if len(whole) <= _MOST_JSON_CHARS:
        try:
            return _is_call(from_json(whole.encode("utf-8", "replace")), names)
        except ValueError:
            pass
    return names is None and _CALL_OBJECT.match(whole) is not None and _ARGUMENTS.search(whole) is not None


def _names_method(whole: str, names: Collection[str]) -> bool:
    """Whether a text is only a JSON object with the name of a method, and its arguments beside it."""
    if not whole.startswith("{") or len(whole) > _MOST_JSON_CHARS:
        return False
    try:
        value = from_json(whole.encode("utf-8", "replace"))
    except ValueError:
        return False
    return any(value.get(key) in names for key in _NAMES if isinstance(value.get(key), str))


def _is_call(value: Any, names: Collection[str] | None) -> bool:
    if isinstance(value, list):
        return bool(value) and all(_is_call(item, names) for item in value)
    if not isinstance(value, dict):
        return False
    if isinstance(calls := value.get("tool_calls"), list):
        return _is_call(calls, names)
    if isinstance(function := value.get("function"), dict):
        return _is_call(function, names)
    called = next((name for key in _NAMES if isinstance(name := value.get(key), str)), None)
    if called is None or not (names is None or called in names):
        return False
    return any(key in value for key in _VALUES)


def _bare(text: str) -> str:
    """Return a text without the backticks, or other marks of a program, around the whole of it."""
    odd = _ODD_FENCE.fullmatch(text)
    if odd is not None:
        return odd["inner"].strip("\n")
    inner = text.strip("`")
    count = len(text) - len(inner)
    is_bare = (
        0 < count <= 6 and text == f"{'`' * (count // 2)}{inner}{'`' * (count // 2)}" and "`" not in inner
    )
    return inner if is_bare else text


def _kind_without_block(text: str, names: Collection[str]) -> ReplyKind | None:
    """Return what an answer without a block is; None if it is words."""
    text = _bare(text)
    if begins_program(text, names) or calls_known(text, names):
        # Words may follow on a program's first lines.
        return ReplyKind.MIXED if is_refused(_plain(extract_code(text)).code) else ReplyKind.PROGRAM
    return ReplyKind.MIXED if _is_mixed(text, names) else None


def _is_mixed(text: str, names: Collection[str]) -> bool:
    """Whether words follow directly on a call that begins an answer: ``say("hi")I said it.``"""
    head = text[:MOST_PARSED_CHARS]
    if not calls_first(head, names):
        return False
    ends = islice(_GLUED.finditer(head), _MOST_CALLS)
    return any(parse(head[: end.start() + 1]) is not None for end in ends)


def calls_first(text: str, names: Collection[str]) -> bool:
    """Whether a text begins with a call of a known method."""
    call = _CALL.match(text)
    return call is not None and (call["name"] in names or call["name"] in USELESS_IN_WORDS)


def begins_program(text: str, names: Collection[str]) -> bool:
    """Whether the first line with a statement is an import or a call of a known method."""
    lines = text.split("\n")
    first = next((line for line in lines if line.strip() and not line.lstrip().startswith("#")), "").strip()
    if len(first) <= _HEAD_CHARS and _IMPORT.match(first):
        return True
    if not calls_first(first[:_HEAD_CHARS], names):
        return False
    return first.endswith(_ENDS) or '"""' in first or "'''" in first or ")  #" in first or ") #" in first
