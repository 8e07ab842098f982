"""Words of an answer that are shown while it arrives."""

from __future__ import annotations

import pytest
from answer_corpus import ANSWERS, NAMES, Case, F

from nekro.agent.answers import live_words
from nekro.agent.answers.live_words import LiveWords, ends_unopened_reasoning
from nekro.agent.answers.replies import ReplyKind, read_reply
from nekro.agent.llm import LLMAnswer

CHECK_WORD = "cw-0123456789abcdef01"


def shown(text: str, *, size: int = 1, waits: bool = False) -> list[str]:
    """Return the words that each piece of an answer makes certain, without those that make none."""
    words = LiveWords(NAMES, check_word=CHECK_WORD, most_bytes=100_000, waits_for_end=waits)
    pieces = (text[begin : begin + size] for begin in range(0, len(text), size))
    return [found for piece in pieces if (found := words.add(piece))]


def words_of(text: str) -> str | None:
    """Return what people read of a whole answer; None: it is no message."""
    answer = LLMAnswer(
        text=text, model="m", prompt_tokens=1, answer_tokens=1, finish_reason="stop", tries=1, cost=0
    )
    reply = read_reply(answer, NAMES)
    return reply.words if reply.kind is ReplyKind.WORDS else None


@pytest.mark.parametrize("size", [1, 3, 20])
@pytest.mark.parametrize("case", ANSWERS, ids=lambda case: case.name)
def test_what_is_shown_of_an_answer_is_the_beginning_of_its_words(case: Case, size: int) -> None:
    waits = ends_unopened_reasoning(case.answer)
    found = "".join(shown(case.answer, size=size, waits=waits))
    words = words_of(case.answer)
    if case.name == "answer in a tag behind its reasoning":  # known by its end only
        assert found in ("", "I add.")
    elif words is not None:
        assert words.startswith(found)
    for secret in ("Secret", "draft()", "save_note", "send_msg_text", "<|", "[TOOL", '"name"', "print("):
        assert secret not in found or (words is not None and secret in words)


@pytest.mark.parametrize(
    "text",
    [
        "Hello Ada, the answer is 391 and nothing else. Bye.",
        "It's 391, I'm sure of that today.",
        "你好！今天的答案是391，没有别的。再见，朋友们。",
        "1. First do this\n2. Then do that\n\n- or else *this*, with a [link](https://example.org)\n",
        "# A heading\n\nSome text under the heading, **bold** and `code` here.\n\nMore of it.",
        '"Hello," she said to him, "how are you on this fine day?"',
        "Use this:\n\n```bash\ncd /tmp\nls -la\n```\n\nand then look at the list of files.",
        'The file is\n```json\n{"a": 1}\n```\nand it has one entry, which is the number one.',
        "| a | b |\n|---|---|\n| 1 | 2 |\n\nThat was the table that you wanted.",
        "👍 Sure, that works for me as well.",
        "    Indented first, then more words of the same kind.",
        "<answer>The sum of both numbers is 391.</answer>",
    ],
)
def test_words_are_shown_as_they_come(text: str) -> None:
    pieces = shown(text)
    words = words_of(text)
    assert words is not None
    assert words.startswith("".join(pieces))
    assert len("".join(pieces)) >= len(words) - 12
    assert len(pieces) > len(words) / 10


@pytest.mark.parametrize(
    "text",
    [
        f"{F}python\nsend_msg_text('k', 'Hello dear Ada')\n{F}",
        f"{F}\nsend_msg_text('k', 'Hello dear Ada')\n{F}",
        "send_msg_text('k', 'Hello dear Ada')\nprint('some more words')",
        "# say it to them\nsend_msg_text('k', 'Hello dear Ada')",
        "import math\nprint(math.pi)",
        "from math import pi\nx = 'some words here'\nprint(pi)",
        "text = 'Hello dear Ada'\nsend_msg_text('k', text)",
        'text = """Hello dear Ada,\nhow are you?\n"""\nsend_msg_text("k", text)',
        "send_msg_text('k', 'x')I have said it to them.",
        "for name in ['ada']:\n    send_msg_text('k', f'Hello {name}')",
        "value = (1 if 2 > 1 else 3) or not None\nsend_msg_text('k', value)",
        "`send_msg_text('k', 'Hello dear Ada')`",
        '{"name": "save_note", "arguments": {"text": "Hello dear Ada"}}',
        "<tool_call>\n{\"name\": \"save_note\"}\n</tool_call>",
        "<think>I should say hello to them first.",
        "<think>They mention <think> and </think> in what they say, so I am careful",
        "analysisWe should answer this.assistantfinal",
        "x", "Hello", "1", "",
    ],
)  # fmt: skip
@pytest.mark.parametrize("size", [1, 5])
def test_nothing_is_shown_of_what_may_be_no_words(text: str, size: int) -> None:
    assert shown(text, size=size) == []


@pytest.mark.parametrize(
    ("text", "preface"),
    [
        (f"I look it up for you.\n{F}python\nprint(1)\n{F}", "I look it up for you."),
        (f"I look it up: {F}python\nprint(1)\n{F}", "I look it up:"),
        (f"Two steps are needed.\n\n1. {F}python\nprint(1)\n{F}", "Two steps are needed."),
        ("I save it now.\n<tool_call>\n{}\n</tool_call> words", "I save it now."),
        (f"My word is {CHECK_WORD} and so on", "My word is"),
        ("I said it.\nAction: save_note\nAction Input: {}", "I said it."),
    ],
)
def test_text_before_a_program_is_a_preface_without_its_fence(text: str, preface: str) -> None:
    assert "".join(shown(text)).rstrip() == preface


def test_a_model_that_reasons_without_a_beginning_is_waited_for() -> None:
    answer = "They want a sum, which is easy.\n</think>\nThe sum of both is 391."
    assert ends_unopened_reasoning(answer)
    assert "".join(shown(answer, waits=True)).startswith("The sum of both is")
    assert not ends_unopened_reasoning("The tag `</think>` ends it.<think>x</think>")


def test_words_end_before_a_message_would_be_too_long() -> None:
    words = LiveWords(NAMES, check_word=CHECK_WORD, most_bytes=50)
    assert len("".join(words.add("word ") for _ in range(100))) <= 50


@pytest.mark.one_python
@pytest.mark.parametrize(
    "text",
    [
        "Some words of a line.\n" * 4_000,
        "Some words without an end of the line. " * 2_000,
        "Look at this:\n```html\n" + "<p>a line of a page</p>\n" * 4_000 + "```\nThat was it.",
        f"Look at this:\n{F}python\n" + "value = 1\n" * 8_000,
        "<think>" + "I think of something.\n" * 4_000,
        "`" * 80_000,
        "<" * 80_000,
    ],
)
def test_reading_an_answer_while_it_arrives_is_linear(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read = 0
    split = live_words.split_answer

    def counting(part: str) -> live_words.AnswerParts:
        nonlocal read
        read += len(part)
        return split(part)

    monkeypatch.setattr(live_words, "split_answer", counting)
    shown(text, size=4)
    assert read <= 40 * len(text)
