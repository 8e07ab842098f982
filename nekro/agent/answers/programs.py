"""Restores programs that were shown instead of written: what people see as Python although it is none.

Models and the software around them show programs with prompts, line numbers, marks of a diff, HTML entities
or typographic marks, in a tag or in JSON, or in several blocks. A restored program is used only if Python's
parser reads it. Each step reads a text a fixed number of times, and only short texts are parsed.
"""

from __future__ import annotations

import ast
import builtins
import html
import re
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from textwrap import dedent
from typing import Any, Final

from pydantic_core import from_json

from nekro.agent.answers.notations import CODE_END

__all__ = [
    "CODE_TAG",
    "MOST_PARSED_CHARS",
    "USELESS_IN_WORDS",
    "TaggedProgram",
    "calls_known",
    "defined_names",
    "dotted_name",
    "is_change",
    "is_refused",
    "joined_program",
    "missing_names",
    "parse",
    "plain_program",
    "program_in_json",
    "tagged_program",
]

#: Longest text, and its deepest nesting of brackets, that Python's parser reads.
MOST_PARSED_CHARS: Final = 10_000
_MOST_NESTING: Final = 40
_TYPE_PARAMETERS: Final = frozenset({"TypeVar", "TypeVarTuple", "ParamSpec"})

#: A prompt of the interactive interpreter, which begins a line of input or continues it.
_PROMPT: Final = re.compile(r"[ \t]{0,20}(?:>>>|\.\.\.)(?: |$)")
_FIRST_PROMPT: Final = re.compile(r"[ \t]{0,20}>>>(?: |$)")
#: A line with its number: ``1 x``, ``1: x``, ``1 | x``, ``  1→x``.
_NUMBERED: Final = re.compile(
    r"[ \t]{0,8}(?P<number>\d{1,5})(?:[ \t]{0,4}[|:│→](?:[ \t]|$)?|[.)][ \t]|[ \t]|$)"
)
#: Lines that a notebook does not give to Python: installing packages, and settings of the notebook.
_NOTEBOOK: Final = re.compile(
    r"[!%]{1,2}[ \t]{0,4}(?:(?:\{?sys\.executable\}?|python3?)[ \t]{1,4}-m[ \t]{1,4})?"
    r"(?:(?:pip3?|uv|conda|mamba)\b|(?:matplotlib|config|load_ext|autoreload)\b)"
)
#: Beginnings of a change to another text: hunks, files, the halves of an edit.
_CHANGE: Final = re.compile(r"(?:@@ |--- |\+\+\+ |diff --git |<{5,9} ?SEARCH)")
_ENTITY: Final = r"&(?:lt|gt|amp|quot|apos|nbsp|\#0?39|\#0?34|\#x27|\#x22);"
#: Parts of a program: entities, comments and strings, quotations in typographic marks, other odd characters.
#: A string that does not end is one up to the end of its line or of the text.
_PART: Final = re.compile(
    rf"(?P<entity>{_ENTITY})"
    r"|(?P<kept>\#[^\n]*+"
    r'|"""(?:\\.|[^"\\]|"(?!""))*+(?:""")?'
    r"|'''(?:\\.|[^'\\]|'(?!''))*+(?:''')?"
    r'|"(?:\\.|[^"\\\n])*+"?'
    r"|'(?:\\.|[^'\\\n])*+'?)"
    '|[\u201c\u201d\u201e\uff02](?P<double>[^\u201c\u201d\u201e\uff02"\\\\\n]*+)(?P<double_end>[\u201c\u201d\uff02]?)'
    "|[\u2018\u2019\u201a\uff07](?P<single>[^\u2018\u2019\u201a\uff07'\\\\\n]*+)(?P<single_end>[\u2018\u2019\uff07]?)"
    "|(?P<odd>[\u00ad\u200e\u200f\u202a-\u202e\u2066-\u2069\u2212\u3001\u3002\uff01-\uff5e])",
    re.DOTALL,
)
#: Signs of ASCII for those of East Asian keyboards, and for a minus; other characters of `odd` are left out.
_PLAIN: Final = {"\u2212": "-", "\u3001": ",", "\u3002": "."} | {
    chr(code): chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)
}

#: Tags that mark a program for agents of other kinds.
CODE_TAG: Final = re.compile(
    r"^[ \t]{0,20}(?:<pre>[ \t]{0,4})?"
    r"<(?P<tag>code|python3?|python_code|py|ipython|execute(?:_ipython|_python)?|code_interpreter)"
    r"(?:[ \t][^<>\n]{0,80})?>",
    re.IGNORECASE | re.MULTILINE,
)
#: Functions that a program may call without a method: it would be useless in a message.
USELESS_IN_WORDS: Final = frozenset({"exit", "print"})
#: Keys of the description of the program in such an object.
_THOUGHT_KEYS: Final = frozenset({"thought", "thoughts", "thinking", "reasoning", "plan"})
#: Keys of the program in a JSON object.
_CODE_KEYS: Final = ("code", "python", "python_code", "program", "script")
#: Blocks of one answer that are joined to one program, at most.
_MOST_BLOCKS: Final = 16


@dataclass(frozen=True, kw_only=True)
class TaggedProgram:
    """A program in a tag, the text around it, and whether the tag is closed."""

    code: str
    around: str
    closed: bool


def parse(text: str) -> ast.Module | None:
    """Parse a short text; None if it is no Python, or too long or too deep for this."""
    if len(text) > MOST_PARSED_CHARS or _nesting(text) > _MOST_NESTING:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(text)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return None


def is_refused(text: str) -> bool:
    """Whether Python's parser was asked and refused a text, which is short enough for it."""
    return len(text) <= MOST_PARSED_CHARS and _nesting(text) <= _MOST_NESTING and parse(text) is None


def calls_known(text: str, names: Collection[str]) -> bool:
    """Whether a text is Python that calls a known method."""
    tree = parse(text) if "(" in text else None
    return tree is not None and any(
        isinstance(node, ast.Call) and dotted_name(node.func) in names for node in ast.walk(tree)
    )


def plain_program(code: str) -> str:
    """Return a program without what only shows it; as it is if that is no Python either.

    >>> plain_program(">>> print(“a”， 1)")
    'print("a", 1)'
    """
    lines = code.split("\n")
    shapes = (strip(lines) for strip in (_without_prompts, _without_numbers, _without_signs))
    shown = next((shape for shape in shapes if shape is not None), None)
    if shown is None and not _has_entity(code) and (not _may_be_odd(code) or parse(code) is not None):
        return code
    plain = (text.strip("\n") for text in _cleaned(code if shown is None else dedent(shown)))
    return next((text for text in plain if text != code and parse(text) is not None), code)


def is_change(code: str) -> bool:
    """Whether a block is a change to another text, such as a diff: what is to run is not in it.

    >>> is_change("-old()\\n+new()")
    True
    """
    lines = [line for line in code.split("\n") if line.strip()]
    if lines and _CHANGE.match(lines[0]):
        return is_refused(code)
    return {"+", "-"} <= {line[0] for line in lines} <= {"+", "-", " "}


def joined_program(program: str, drafts: Sequence[str], known: Collection[str]) -> str:
    """Join a program with those of the blocks before it that define the names it needs.

    Args:
        drafts: the blocks before it as they were written, in their order.
        known: names that a program has without defining them.
    """
    whole = parse(program)
    missing = set() if whole is None else missing_names(whole, known)
    if not missing:
        return program
    kept = [program]
    for shown in reversed(drafts[-_MOST_BLOCKS:]):
        draft = plain_program(shown)
        tree = parse(draft)
        if tree is None or missing.isdisjoint(defined := defined_names(tree)):
            continue
        missing = (missing - defined) | missing_names(tree, known)
        kept.append(draft)
    # Without all names it would fail: what it lacks may be a variable of an earlier program, which it keeps.
    return "\n\n".join(reversed(kept))


def tagged_program(text: str, names: Collection[str]) -> TaggedProgram | None:
    """Find a program in the last tag for one that begins a line; None if there is none.

    What follows the tag's end on its line makes it part of a sentence.
    """
    last = None
    for mark in CODE_TAG.finditer(text):
        last = mark
    if last is None:
        return None
    inner = text[last.end() :]
    end = inner.lower().find(f"</{last['tag'].lower()}>")
    after = "" if end < 0 else inner[end + len(last["tag"]) + 3 :].removeprefix("</pre>")
    cut = CODE_END.search(inner[-80:].rstrip()) if end < 0 else None
    raw = inner[:end] if end >= 0 else inner[: _start(inner, cut)]
    code = plain_program(dedent(raw.strip("\n").rstrip()))
    called = names if not raw.startswith("\n") else USELESS_IN_WORDS.union(names)
    if after.partition("\n")[0].strip() or not calls_known(code, called):
        return None
    around = f"{text[: last.start()].strip()}\n{after.strip()}".strip()
    return TaggedProgram(code=code, around=around, closed=end >= 0 or cut is not None)


def program_in_json(text: str, names: Collection[str]) -> str | None:
    """Return the program that a JSON object holds, beside thoughts for example; None if it holds none."""
    if not text.startswith("{") or len(text) > MOST_PARSED_CHARS:
        return None
    try:
        value: Any = from_json(text.encode("utf-8", "replace"))
    except ValueError:
        return None
    found = [code for key in _CODE_KEYS if isinstance(code := value.get(key), str)]
    called = names if _THOUGHT_KEYS.isdisjoint(value) else USELESS_IN_WORDS.union(names)
    code = plain_program(found[0].strip("\n")) if len(found) == 1 else ""
    return code if calls_known(code, called) else None


def _start(text: str, cut: re.Match[str] | None) -> int:
    """Return where the end of a text begins that ``cut`` found in its last characters."""
    return len(text) if cut is None else len(text.rstrip()) - (len(cut.string) - cut.start())


def dotted_name(node: ast.expr) -> str:
    """Return a name with the attributes behind it, ``a.b.c``; "" if it is something else."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def _nesting(text: str) -> int:
    """Return the deepest nesting of brackets if all of them count, also those in strings."""
    depth = deepest = 0
    for character in text:
        if character in "([{":
            depth += 1
            deepest = max(deepest, depth)
        elif character in ")]}":
            depth -= 1
    return deepest


def _may_be_odd(code: str) -> bool:
    """Whether a program has marks outside of strings that Python refuses, or lines for a notebook."""
    if any(_NOTEBOOK.match(line) for line in code.split("\n")):
        return True
    return not code.isascii() and any(part.lastgroup != "kept" for part in _PART.finditer(code))


def _has_entity(code: str) -> bool:
    """Whether an HTML entity stands outside of strings, where no program has one."""
    return "&" in code and any(part.lastgroup == "entity" for part in _PART.finditer(code))


def _cleaned(code: str) -> Iterator[str]:
    """Yield a program with one kind of trouble after the other removed."""
    yield code
    steps: tuple[Callable[[str], str], ...] = (html.unescape, _without_notebook, _plain_marks)
    for step in steps:
        if step is not html.unescape or _has_entity(code):
            code = step(code)
            yield code


def _without_prompts(lines: Sequence[str]) -> str | None:
    """Return what was typed at prompts, without what the interpreter answered; None if there are none."""
    first = next((line for line in lines if line.strip()), "")
    if _FIRST_PROMPT.match(first) is None:
        return None
    return "\n".join(line[found.end() :] for line in lines if (found := _PROMPT.match(line)))


def _without_numbers(lines: Sequence[str]) -> str | None:
    """Return lines without their numbers; None unless all have one, counted up."""
    kept, numbers = [], []
    for line in lines:
        found = _NUMBERED.match(line)
        if found is None:
            if line.strip():
                return None
            continue
        numbers.append(int(found["number"]))
        kept.append(line[found.end() :])
    is_counted = len(numbers) > 1 and numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    if not is_counted or not any(line.strip() for line in kept):
        return None
    return "\n".join(kept)


def _without_signs(lines: Sequence[str]) -> str | None:
    """Return lines without the sign of added ones; None unless all have it."""
    if not any(lines) or not all(line.startswith("+") for line in lines if line):
        return None
    return "\n".join(line[1:] for line in lines)


def _without_notebook(code: str) -> str:
    return "\n".join("" if _NOTEBOOK.match(line) else line for line in code.split("\n")).strip("\n")


def _plain_marks(code: str) -> str:
    """Replace typographic and full-width marks outside of strings, and drop characters without a width."""
    return _PART.sub(_plain_mark, code)


def _plain_mark(part: re.Match[str]) -> str:
    text = part.group()
    if part.lastgroup == "odd":
        return _PLAIN.get(text, "")
    for kind, quote in (("double", '"'), ("single", "'")):
        if part[f"{kind}_end"]:
            return f"{quote}{part[kind]}{quote}"
    return text


def defined_names(tree: ast.Module) -> set[str]:
    """Return the names that a program defines, anywhere in it."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            names.add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.alias):
            names.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
            names.add(node.name)
        elif isinstance(node, ast.MatchMapping) and node.rest:
            names.add(node.rest)
        elif isinstance(node, ast.Global | ast.Nonlocal):
            names.update(node.names)
        elif type(node).__name__ in _TYPE_PARAMETERS:  # from CPython 3.12 on
            names.add(node.name)  # type: ignore[attr-defined]
    return names


def missing_names(tree: ast.Module, known: Collection[str]) -> set[str]:
    """Return the names that a program reads and nothing defines.

    Args:
        known: names that it has without defining them; built-in ones need not be among them.
    """
    read = {
        node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
    }
    return read - defined_names(tree) - set(dir(builtins)) - set(known)
