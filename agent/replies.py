"""Classifies a model's answer: a program, words for the people in the chat, or neither.

Answers are untrusted text of any shape. They are judged line by line in linear time; nothing is parsed as
Python on the host.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from pydantic_core import from_json

from agent.extraction import AnswerParts, ExtractedCode, extract_code, split_answer
from agent.llm import LLMAnswer

__all__ = ["Reply", "ReplyKind", "read_reply"]

#: Lines with which models begin calls in the notation of their training, for example ``<tool_call>``.
_CALL_MARK: Final = re.compile(
    r"^[ \t]*(?:"
    r"<(?:[a-z]{1,20}:)?(?:tool_calls?|tool_use|function_calls?|invoke|function=[\w.-]{1,100})\b"
    r"|<[|\uff5c](?:tool|function|python_tag|plugin)"
    r"|\[TOOL_CALLS\]"
    r")",
    re.IGNORECASE | re.MULTILINE,
)
#: Beginning of a call as a JSON object, also of one that is cut off or is not quite JSON.
_CALL_OBJECT: Final = re.compile(
    r"""^\[?\s*\{\s*["'](?:name|function|tool|tool_name|type|tool_calls|arguments|parameters)["']\s*:"""
)
_ARGUMENTS: Final = re.compile(r"""["'](?:arguments|parameters)["']\s*:""")
#: Labels of blocks in which models write such calls.
_CALL_LABELS: Final = frozenset({"function_call", "tool_call", "tool_calls", "tool_code", "tool_use"})
_CALL_REASONS: Final = ("tool_calls", "function_call")
_NAMES: Final = ("name", "function", "tool", "tool_name")
#: Longest answer that is read as JSON; the rules for lines judge longer ones.
_MOST_JSON_CHARS: Final = 200_000

_IMPORT: Final = re.compile(
    r"(?:import\s+[A-Za-z_][\w.]*(?:\s+as\s+\w+)?(?:\s*,\s*[A-Za-z_][\w.]*(?:\s+as\s+\w+)?)*"
    r"|from\s+[.\w]+\s+import\s+(?:\*|\(?[\w ,]*\)?,?))\s*(?:[;#\\].*)?$"
)
#: A call, alone or assigned: ``name(``, ``await name(``, ``first, second = name(``, ``text: str = name(``.
_CALL: Final = re.compile(
    r"(?:[A-Za-z_]\w*(?:\s*,\s*[A-Za-z_]\w*)*(?:\s*:\s*[\w.\[\],|]+)?\s*=\s*)?(?:await\s+)?"
    r"(?P<name>[A-Za-z_][\w.]*)\("
)
#: Characters of a line in which its form shows, so that no pattern meets a long one.
_HEAD_CHARS: Final = 300
#: Names that a program of this system may call first beside methods; both are useless in a message.
_BUILT_IN: Final = frozenset({"exit", "print"})
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
    if parts.has_program:
        extracted = extract_code(answer.text)
        reasoning = _joined(parts.reasoning, parts.around)
        return Reply(kind=ReplyKind.PROGRAM, extracted=extracted, reasoning=reasoning)
    text = parts.text.strip()
    if _calls_tool(answer, parts):
        return Reply(kind=ReplyKind.TOOL_CALL, reasoning=_joined(parts.reasoning, text))
    if not parts.labels and _is_program(text.split("\n"), names):
        return Reply(kind=ReplyKind.PROGRAM, extracted=extract_code(answer.text), reasoning=parts.reasoning)
    kind = ReplyKind.WORDS if text else ReplyKind.NOTHING
    return Reply(kind=kind, reasoning=parts.reasoning, words=text)


def _joined(*texts: str) -> str:
    return "\n".join(stripped for text in texts if (stripped := text.strip()))


def _calls_tool(answer: LLMAnswer, parts: AnswerParts) -> bool:
    if answer.tool_calls or answer.finish_reason in _CALL_REASONS:
        return True
    if _CALL_MARK.search(parts.around) or not _CALL_LABELS.isdisjoint(parts.labels):
        return True
    is_one_block = len(parts.labels) == 1 and not parts.around.strip()
    return _is_call_text((parts.last_block if is_one_block else parts.text).strip())


def _is_call_text(whole: str) -> bool:
    """Whether a text is only a call as a JSON object, or several in a list."""
    if not whole.startswith(("{", "[")):
        return False
    if len(whole) <= _MOST_JSON_CHARS:
        try:
            return _is_call(from_json(whole.encode("utf-8", "replace")))
        except ValueError:
            pass
    return _CALL_OBJECT.match(whole) is not None and _ARGUMENTS.search(whole) is not None


def _is_call(value: Any) -> bool:
    if isinstance(value, list):
        return bool(value) and all(_is_call(item) for item in value)
    if not isinstance(value, dict):
        return False
    if isinstance(calls := value.get("tool_calls"), list):
        return _is_call(calls)
    if isinstance(function := value.get("function"), dict):
        return _is_call(function)
    has_name = any(isinstance(value.get(name), str) for name in _NAMES)
    return has_name and ("arguments" in value or "parameters" in value)


def _is_program(lines: Sequence[str], names: Collection[str]) -> bool:
    """Whether the first line with a statement is an import or a call of a known method."""
    first = next((line for line in lines if line.strip() and not line.lstrip().startswith("#")), "").strip()
    if len(first) <= _HEAD_CHARS and _IMPORT.match(first):
        return True
    call = _CALL.match(first[:_HEAD_CHARS])
    if call is None or not (call["name"] in names or call["name"] in _BUILT_IN):
        return False
    return first.endswith(_ENDS) or '"""' in first or "'''" in first or ")  #" in first or ") #" in first
