"""Foreign text is escaped, never dropped, and readable text is unchanged."""

from __future__ import annotations

import functools
import json
import re
import unicodedata

import pytest

from nekro_agent.tools.visible_text import (
    IGNORABLE,
    all_visible,
    shortened,
    visible,
    visible_json,
    visible_lines,
    visible_text,
    without_invisible,
)

JOINERS = "[\u180b-\u180d\u180f\u200c\u200d\ufe00-\ufe0f]"

#: Visible characters of Arabic, Syriac and Kaithi in Unicode's category of format characters.
SEEN_FORMATS = {*range(0x600, 0x606), 0x6DD, 0x70F, 0x890, 0x891, 0x8E2, 0x110BD, 0x110CD}


@functools.cache
def every_character() -> list[str]:
    """All characters; of unassigned and private ones, the ends of each run and every 64th.

    Those are nine of ten characters and alike, and cost a minute of processor time in all tests together.
    """
    category = [unicodedata.category(chr(code)) for code in range(0x110000)]
    return [
        chr(code)
        for code, own in enumerate(category)
        if own not in ("Co", "Cn") or code % 64 == 0 or {own} != set(category[code - 1 : code + 2])
    ]


def is_hidden(char: str) -> bool:
    return unicodedata.category(char) in ("Cc", "Cf", "Cs", "Zl", "Zp") and ord(char) not in SEEN_FORMATS


def test_every_control_format_surrogate_and_separator_is_escaped() -> None:
    hidden = [char for char in every_character() if is_hidden(char)]
    assert not set(visible("".join(f"a{char}b" for char in hidden))) & set(hidden)


def test_invisible_characters_of_other_categories_are_escaped_too() -> None:
    for code in (0x034F, 0x115F, 0x17B4, 0x3164, 0xFFA0, 0xE0100, 0xE01EF, 0xFFFE, 0x2065):
        assert chr(code) not in visible(f"a{chr(code)}b")


def test_an_escape_names_the_character() -> None:
    text = "\x00\x1b\r\n\t\x7f\x85\u2028\u202e\ud800\U000e0041"
    assert visible(text) == r"\x00\x1b\r\n\t\x7f\x85\u2028\u202e\ud800\U000e0041"


@pytest.mark.parametrize(
    "text",
    [
        "plain",
        "a\\nb",
        "こんにちは 你好",
        "❤️‍🔥 👨‍👩‍👧 1️⃣ 🇯🇵",
        "می‌خواهم",
        "e\u0301",
        "क्‍ष",
        "[red]x[/red] {0} <b>",
    ],
)
def test_readable_text_of_every_script_is_unchanged(text: str) -> None:
    assert visible(text) == text
    assert visible_lines(text) == [text]


@pytest.mark.parametrize(
    "text", ["ad\u200dmin", "a\ufe0fb", "猫\u200d\u200d\u200c\u200d", "猫\ufe00\ufe01\ufe0f", "\u200dx"]
)
def test_joiners_and_selectors_that_hide_data_are_escaped(text: str) -> None:
    assert visible(text).isascii() or not set(visible(text)) & set("\u200c\u200d\ufe00\ufe01\ufe0f")


def test_escaping_is_idempotent() -> None:
    text = "".join(every_character())
    assert visible(visible(text)) == visible(text)


def test_only_line_feeds_end_a_line() -> None:
    text = "a\tb\r\nc\rd\x0be\x0cf\x1cg\x85h\u2028i\n"
    assert visible_lines(text) == ["a\tb", r"c\rd\x0be\x0cf\x1cg\x85h\u2028i", ""]
    assert visible_text(text).count("\n") == 2


def test_json_keeps_its_values_and_shows_no_control() -> None:
    value = {"text": "".join(every_character()[:0x3000]) + "\ud800 \U000e0041 \U0001f600"}
    for indent in (None, 2):
        shown = visible_json(json.dumps(value, ensure_ascii=False, indent=indent))
        assert json.loads(shown) == value
        assert not [char for char in shown if is_hidden(char) and char not in "\n\u200c\u200d"]


@pytest.mark.parametrize("size", [0, 1, 50, 51, 100_000])
def test_a_shortened_text_names_the_omitted_length(size: int) -> None:
    shown = visible("x" * size, limit=50)
    assert shown == ("x" * size if size <= 50 else f"{'x' * 50}… ({size - 50} more characters)")
    assert len(visible("\U000e0041" * size, limit=50)) <= 90
    assert shortened("abc", 3) == "abc"


def is_invisible(char: str) -> bool:
    """By the properties of the running version of Python, and by that which it lacks."""
    category = unicodedata.category(char)
    return (
        category in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")
        or re.match(f"[{IGNORABLE}]", char) is not None
        or char in "\u115f\u1160\u2800\u3164\uffa0"
    )


def test_the_ignorable_code_points_are_those_of_the_standard() -> None:
    regex = pytest.importorskip("regex", reason="pip install regex")
    text = "".join(chr(code) for code in range(0x110000) if not 0xD800 <= code <= 0xDFFF)
    wanted = set(regex.findall(r"\p{Default_Ignorable_Code_Point}", text))
    assert len(wanted) == 4174
    assert set(re.findall(f"[{IGNORABLE}]", text)) == wanted


def test_what_a_person_must_read_exactly_has_every_invisible_character_escaped() -> None:
    hidden = [char for char in every_character() if is_invisible(char) and char != "\n"]
    for before in ("a", "猫", "❤"):
        assert not set(all_visible("".join(f"{before}{char}b" for char in hidden))) & set(hidden)
    assert all_visible("pay(\n    'é 猫',\n)") == "pay(\n    'é 猫',\n)"
    assert all_visible("❤️") == "❤\\ufe0f"
    text = "".join(every_character())
    assert all_visible(all_visible(text)) == all_visible(text)


def test_terminals_get_no_unassigned_and_no_private_character() -> None:
    hidden = [char for char in every_character() if unicodedata.category(char) in ("Co", "Cn")]
    assert not set(visible("".join(f"猫{char}b" for char in hidden))) & set(hidden)


def test_prompts_lose_every_invisible_character() -> None:
    text = "".join(f"猫{char}" for char in every_character() if is_invisible(char) and char not in "\t\n")
    assert set(without_invisible(text, joiners=False)) == {"猫", " "}
    # With joiners, one may follow a letter, as in words of Persian; emoji of the future stay too.
    kept = set(without_invisible(text)) - {"猫", " "}
    assert not {char for char in kept if char.isprintable() and not re.match(JOINERS, char)}
    assert without_invisible("a\u200b\u2060b\ufe0f\ufe0f\U000e0041\tc\n") == "ab\tc\n"


@pytest.mark.parametrize("text", ["plain", "❤️‍🔥 👨‍👩‍👧 1️⃣ 🇯🇵", "می‌خواهم", "क्‍ष", "一\u3000二", "a\u00a0b"])
def test_words_of_chats_are_the_same_in_prompts(text: str) -> None:
    assert without_invisible(text) == text
