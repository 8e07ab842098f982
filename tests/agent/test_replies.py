"""What an answer is: a program, words, a call in another notation, or nothing."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from waiting import cpu_limit

from nekro.agent.answers.replies import Reply, ReplyKind, read_reply
from nekro.agent.llm import LLMAnswer

FENCE = "```"
NAMES = frozenset({"send_msg_text", "get_weather", "a.web.search"})


def reply_to(text: str, **fields: Any) -> Reply:
    values: dict[str, Any] = {
        "model": "m", "prompt_tokens": 1, "answer_tokens": 1, "finish_reason": "stop", "tries": 1, "cost": 0,
    }  # fmt: skip
    return read_reply(LLMAnswer(text=text, **(values | fields)), NAMES)


@pytest.mark.parametrize(
    "text",
    [
        "Hello!",
        "import taxes are high this year.",
        "from here on it is easy.",
        "# Title\n\nSome text.",
        "send_msg_text(chat, text) is the method that sends messages.",
        "print(1) shows a number, in Python.",
        "send_mail('x')",
        "x = 5",
        "Use `print(1)`.",
        "[a link](https://example.com)",
        '{"name": "Ada", "age": 36}',
        "In XML: <tool_call> is a tag.",
        f"Look:\n{FENCE}html\n<tool_call>\n{FENCE}",
        f"Look:\n{FENCE}json\n{{}}\n{FENCE}",
        f"{FENCE}bash\nls\n{FENCE}",
        f"~~~js\nimport x\n~~~\n{FENCE}",
    ],
)
def test_text_without_a_program_is_an_answer_in_words(text: str) -> None:
    found = reply_to(f"<think>hm</think>\n{text}\n")
    assert (found.kind, found.words, found.reasoning, found.extracted) == (ReplyKind.WORDS, text, "hm", None)


@pytest.mark.parametrize(
    "text",
    [
        "import json",
        "import os.path as p, sys",
        "from json import (\n    loads,\n)",
        "from plugins import send_msg_text\nsend_msg_text(_ck, 'x')",
        "# greet\n\nsend_msg_text(_ck, 'x')",
        'send_msg_text(_ck, """Dear\nAda""")',
        "send_msg_text(\n    _ck, 'x')",
        "await send_msg_text(_ck, 'x')  # now",
        "w = get_weather('Paris')",
        "w, x = get_weather('Paris'), 1,",
        "w: dict[str,int] = get_weather('Paris')",
        "a.web.search('x')",
        "print(1 + 1)\nexit(9)",
        "exit(9)",
    ],
)
def test_a_program_without_a_fence_is_a_program(text: str) -> None:
    found = reply_to(f"<think>hm</think>\n{text}")
    assert found.kind is ReplyKind.PROGRAM and found.extracted is not None
    assert found.extracted.code == text.removeprefix("from plugins import send_msg_text\n")


def test_text_around_a_program_is_reasoning() -> None:
    found = reply_to(f"<think>a</think>b\n{FENCE}html\n<b>\n{FENCE}\nc\n{FENCE}py\nd()\n{FENCE}\ne")
    assert found.extracted is not None and found.extracted.code == "d()"
    assert (found.reasoning, found.words) == ("a\nb\nc\ne", "")


def test_a_program_counts_more_than_a_call_beside_it() -> None:
    assert reply_to(f"{FENCE}py\nd()\n{FENCE}", tool_calls=("f",)).kind is ReplyKind.PROGRAM


@pytest.mark.parametrize(
    "text",
    [
        "I look.\n<tool_call>\n{}",
        "<tool_calls>",
        "<function_calls>\n<invoke name='f'>",
        "<x:function_calls>",
        '<function=f>{"a": 1}</function>',
        "<|tool_call_begin|>f",
        "<\uff5ctool\u2581calls\u2581begin\uff5c>",
        "<|python_tag|>f()",
        "[TOOL_CALLS] []",
        '{"name": "f", "arguments": {"a": 1}}',
        '{"name": "f", "parameters": {}}',
        '[{"name": "f", "arguments": "{}"}, {"name": "g", "arguments": "{}"}]',
        '{"tool_calls": [{"type": "function", "function": {"name": "f", "arguments": "{}"}}]}',
        '{"name": "f", "arguments": {"a": "cut off',
        "{'name': 'f', 'arguments': {}}",
        f'{FENCE}json\n{{"name": "f", "arguments": {{}}}}\n{FENCE}',
        f"{FENCE}tool_code\nf()\n{FENCE}",
    ],
)
def test_a_call_in_another_notation_is_neither_run_nor_sent(text: str) -> None:
    found = reply_to(text)
    assert (found.kind, found.words, found.extracted) == (ReplyKind.TOOL_CALL, "", None)


def test_words_beside_a_call_of_the_protocol_are_a_call() -> None:
    assert reply_to("I look it up.", tool_calls=("f",)).kind is ReplyKind.TOOL_CALL
    assert reply_to("I look it up.", finish_reason="tool_calls").kind is ReplyKind.TOOL_CALL


def test_a_refusal_is_words_whatever_it_holds() -> None:
    assert reply_to("import json", is_refusal=True).words == "import json"


@pytest.mark.parametrize("text", ["", " \n", "<think>hm</think>", "<think>cut off"])
def test_an_answer_without_text_beyond_reasoning_is_nothing(text: str) -> None:
    assert reply_to(text).kind is ReplyKind.NOTHING


PIECES = st.sampled_from(
    ["<think>", "</think>", FENCE, f"{FENCE}python", f"{FENCE}html", "\n", "import x", "get_weather(", ")",
     " = ", "<tool_call>", '{"name": "f", "arguments": ', "{", "}", "[", "]", "\ud800", "\x00", "\u2028", ","]
)  # fmt: skip


@given(st.lists(PIECES, max_size=40).map("".join))
@settings(max_examples=200)
def test_every_answer_is_exactly_one_of_them(text: str) -> None:
    found = reply_to(text)
    assert (found.extracted is not None) is (found.kind is ReplyKind.PROGRAM)
    assert bool(found.words) is (found.kind is ReplyKind.WORDS)
    # Reasoning between two parts of the words is left out; nothing but line feeds is added.
    rest = iter(text)
    assert all(character in rest for character in found.words if character != "\n")


@pytest.mark.one_python
@pytest.mark.parametrize(
    "unit",
    ["[", "{", '{"a":', " ", "a, ", "a: ", "import a, ", "from a import a ", "<", "<tool", f"{FENCE}x\n",
     "get_weather(", '{"name": "f", "arguments": ', "\n<x:", "1", "(", "a."],
)  # fmt: skip
def test_two_megabytes_of_any_pattern_are_judged(unit: str) -> None:
    """Quadratic time exceeds the time limit."""
    with cpu_limit(20):
        reply_to(unit * (2_000_000 // len(unit)))
        reply_to(unit * (190_000 // len(unit)))
