"""Functions of a shared event loop that read texts of others: their work grows with the text's length."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from steps import steps
from waiting import cpu_limit

from nekro.extensions.mcp.declarations import referenced, without_references
from nekro_agent.tools.at_markup import neutralize_at_all_markup
from nekro_agent.tools.common_util import calculate_text_similarity
from nekro_agent.tools.message_id import normalize_ref_msg_id
from nekro_agent.tools.visible_text import visible_text

pytestmark = pytest.mark.one_python

#: Ten times the longest that others can send: linear work takes a second at most, quadratic work minutes.
SIZE = 640 << 10


@pytest.mark.parametrize(
    ("read", "begin", "part", "end"),
    [
        (normalize_ref_msg_id, "", "CQ:reply,", ""),
        (normalize_ref_msg_id, "", "msg_id:", "1"),
        (normalize_ref_msg_id, 'id="', "(", '"'),
        (referenced, "", "${A:-", ""),
        (without_references, "", "${A:-", ""),
        (neutralize_at_all_markup, "", "[@id:all;nickname:", ""),
        (neutralize_at_all_markup, "", "[CQ:at,qq=all,", ""),
        (visible_text, "", "\u200d", ""),
    ],
)
def test_a_text_is_read_in_time_that_grows_with_its_length(
    read: Callable[[str], object], begin: str, part: str, end: str
) -> None:
    with cpu_limit(10):
        read(begin + part * (SIZE // len(part)) + end)


@pytest.mark.parametrize("kinds", [1, 2, 100, 5000])
def test_two_texts_are_compared_in_steps_that_grow_with_their_length(kinds: int) -> None:
    def compare(size: int) -> Callable[[], object]:
        chance = random.Random(size)
        text = "".join(chr(0x4E00 + number % kinds) for number in range(size))
        other = "".join(chance.sample(text, size))
        return lambda: calculate_text_similarity(text, "".join(sorted(other)))

    steps(compare(64 << 10), most=30 * 2 * steps(compare(2 << 10)))


@pytest.mark.parametrize("length", [12, 150, 1100, 20_000])
def test_the_similarity_of_texts_tells_an_edited_text_from_another_one(length: int) -> None:
    chance = random.Random(length)
    words = [f"word{chance.randrange(5000)}" for _ in range(length)]
    text = " ".join(words)[:length]
    edited = text[: length // 2] + "!" + text[length // 2 :]
    other = "".join(chr(0x4E00 + chance.randrange(5000)) for _ in range(length))
    assert calculate_text_similarity(text, text) == 1.0
    assert 0.8 < calculate_text_similarity(text, edited) < 1.0
    assert calculate_text_similarity(text, other) < 0.4
    assert calculate_text_similarity(text, "") == 0.0
