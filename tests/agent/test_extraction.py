"""Extraction of the code from a model's answer."""

from __future__ import annotations

import re
from os.path import commonprefix

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from waiting import cpu_limit

from nekro.agent.answers.extraction import (
    ExtractedCode,
    extract_code,
    text_beside_code,
)
from nekro.agent.text import check_word_of, reveals_check_word

FENCE = "```"


def code_of(text: str) -> str:
    return extract_code(text).code


def test_the_fenced_block_is_the_code() -> None:
    found = extract_code(f"Sure, here it is.\n\n{FENCE}python\nprint(1)\n{FENCE}\n")
    assert found == ExtractedCode(reasoning="", code="print(1)", fenced=True, closed=True)


def test_an_answer_without_fence_is_code() -> None:
    assert extract_code("x = 1\nprint(x)") == ExtractedCode(
        reasoning="", code="x = 1\nprint(x)", fenced=False, closed=True
    )


@pytest.mark.parametrize("label", ["python", "py", "Python", "python3", "", " python "])
def test_a_fence_labelled_python_or_unlabelled_opens_the_code(label: str) -> None:
    assert code_of(f"{FENCE}{label}\nprint(1)\n{FENCE}") == "print(1)"


def test_reasoning_is_removed_with_the_code_it_drafts() -> None:
    found = extract_code(
        f"<think>\n{FENCE}python\ndraft()\n{FENCE}\nno, better:</think>\n{FENCE}\nreal()\n{FENCE}"
    )
    assert found.code == "real()"
    assert "draft()" in found.reasoning


def test_several_parts_of_reasoning_are_joined() -> None:
    found = extract_code(f"<think>one</think>\n<think>two</think>\n{FENCE}\nreal()\n{FENCE}")
    assert (found.reasoning, found.code) == ("one\ntwo", "real()")


def test_reasoning_without_an_opening_tag_is_still_reasoning() -> None:
    found = extract_code(f"let me see\n</think>\n\n{FENCE}python\nreal()\n{FENCE}")
    assert (found.reasoning, found.code) == ("let me see", "real()")


def test_an_answer_cut_off_in_its_reasoning_has_no_code() -> None:
    found = extract_code("<think>I could call the method and")
    assert found.reasoning == "I could call the method and"
    assert found.is_empty


def test_think_tags_inside_the_code_are_code() -> None:
    text = f'{FENCE}python\nprint("""\n<think>a</think>\n""")\n{FENCE}'
    assert code_of(text) == 'print("""\n<think>a</think>\n""")'


@pytest.mark.parametrize("inner", [f"{FENCE}\nls -l\n{FENCE}", f"{FENCE}bash\nls -l\n{FENCE}", FENCE])
@pytest.mark.parametrize("quote", ['"""', "'''"])
def test_fences_inside_a_string_of_the_code_stay_inside(inner: str, quote: str) -> None:
    code = f"text = {quote}\n{inner}\n{quote}\nsend(text)"
    assert code_of(f"Words.\n{FENCE}python\n{code}\n{FENCE}") == code


def test_quotes_in_comments_and_short_strings_open_no_long_string() -> None:
    code = '# don\'t say """\nx = \'it\'\'s\' + "\\"" + \'"""\'\nprint(x)'
    assert code_of(f"{FENCE}python\n{code}\n{FENCE}\nWords.\n{FENCE}\noutput\n{FENCE}") == code


def test_an_unterminated_string_keeps_the_code_whole() -> None:
    code = f'x = """\n{FENCE}\nmore'
    assert code_of(f"{FENCE}python\n{code}\n{FENCE}") == code


def test_the_last_of_two_blocks_is_the_code() -> None:
    assert (
        code_of(f"{FENCE}python\nfirst()\n{FENCE}\nor rather\n{FENCE}python\nsecond()\n{FENCE}") == "second()"
    )


def test_a_sample_of_the_expected_output_does_not_hide_the_code() -> None:
    assert code_of(f"{FENCE}python\nreal()\n{FENCE}\nIt prints:\n{FENCE}\n42\n{FENCE}") == "real()"


def test_text_after_the_block_is_ignored() -> None:
    assert code_of(f"{FENCE}python\nreal()\n{FENCE}\nI hope this helps!") == "real()"


def test_a_longer_fence_holds_a_shorter_one() -> None:
    assert code_of(f"````python\nx = 1\n{FENCE}\n````") == f"x = 1\n{FENCE}"


def test_a_closing_fence_may_follow_the_last_line_directly() -> None:
    assert code_of(f"{FENCE}python\nprint(1){FENCE}") == "print(1)"


def test_an_unclosed_block_is_reported_as_cut() -> None:
    found = extract_code(f"{FENCE}python\nprint(1)\nsend_msg_te")
    assert (found.code, found.closed) == ("print(1)\nsend_msg_te", False)


def test_a_lone_closing_fence_is_no_code() -> None:
    assert code_of(f"print(1)\n{FENCE}") == "print(1)"


def test_windows_line_ends_are_read() -> None:
    assert code_of(f"{FENCE}python\r\nprint(1)\r\nprint(2)\r\n{FENCE}\r\n") == "print(1)\nprint(2)"


@pytest.mark.parametrize(
    "module",
    ["plugins", "plugins.basic", "predefined_methods", "predefined_plugins", "core.api", "plugin_manager"],
)
def test_imports_of_invented_modules_are_deleted(module: str) -> None:
    assert code_of(f"import json\nfrom {module} import send\nsend()") == "import json\nsend()"


def test_imports_of_real_modules_with_similar_names_stay() -> None:
    code = "from plugins_common import x\nfrom core.apis import y\nfrom collections import z"
    assert code_of(code) == code


def test_an_invented_import_over_several_lines_is_deleted_completely() -> None:
    assert code_of("from plugins import (\n    a,  # )\n    b,\n)\na()") == "a()"
    assert code_of("from plugins import a, \\\n    b\na()") == "a()"


def test_an_unterminated_invented_import_deletes_nothing_else() -> None:
    assert code_of("from plugins import (\na()") == "a()"


def test_deleting_an_invented_import_leaves_its_block_a_statement() -> None:
    code = "try:\n    from plugins import a\nexcept ImportError:\n    a = None"
    assert code_of(code) == "try:\n    pass\nexcept ImportError:\n    a = None"


@pytest.mark.parametrize(
    "text", ["", "   \n", f"{FENCE}python\n{FENCE}", f"{FENCE}\n# nothing to do\n\n{FENCE}"]
)
def test_code_that_does_nothing_is_empty(text: str) -> None:
    assert extract_code(text).is_empty


def test_a_check_word_follows_from_its_seed_and_is_found_in_any_case() -> None:
    word = check_word_of("ab" * 32)
    assert word == check_word_of("ab" * 32) != check_word_of("cd" * 32)
    assert reveals_check_word(word, f"print({word.upper()!r})")
    assert reveals_check_word(word, b"\x80\x04" + word.encode())
    assert not reveals_check_word(word, "print('cw-')")


PIECES = st.sampled_from(
    [FENCE, f"{FENCE}python", f"    {FENCE}", "~~~", "\n", '"""', "'''", "'", "\\", "#", " ", "x = 1",
     "from plugins import (", ")", "\r", "\u2028", "\x00", "é"]
)  # fmt: skip


@given(st.lists(PIECES, max_size=60).map("".join))
@settings(max_examples=300)
def test_extracted_code_is_part_of_the_text(text: str) -> None:
    found = extract_code(text)
    lines = set(text.replace("\r", "\n").split("\n"))
    pieces = " ".join(lines)
    for line in found.code.split("\n"):
        assert line.strip() in pieces or line.strip() == "pass"


ODD = re.compile("[\u00a0\u2000-\u200d\u202f\u205f\u2060\u3000\ufeff]")


def margin(text: str) -> str:
    """Return the indentation that all lines of a text share."""
    leads = [line[: len(line) - len(line.lstrip(" \t"))] for line in text.split("\n") if line.strip()]
    return commonprefix(leads)  # noqa: RUF071 - no paths


@given(st.text(max_size=200).filter(lambda t: "`" not in t and "~" not in t and "\r" not in t))
@settings(max_examples=200)
def test_a_fenced_block_survives_unchanged(body: str) -> None:
    if "from" in body or "think>" in body:
        return
    # Characters that no program has outside of its strings, and the indentation of all lines, may go.
    body = ODD.sub("", body)
    found = code_of(f"Words.\n{FENCE}python\n{body}\n{FENCE}")
    assert found.split("\n") == [line.removeprefix(margin(body)) for line in body.strip("\n").split("\n")]


@pytest.mark.extended
@pytest.mark.parametrize(
    "unit",
    ["<think>", "</think>", "</think>\n", "</think>x", "<think></think>", "<think>\n</think>", "`",
     f"{FENCE}\n", f"{FENCE}python\n", '"""\n', "\\", "from plugins import (\n", " ", "```" + " " * 50,
     "\n<think> \t", "~~~x", ".assistantfinal",
     "\nThought: a\nFinal Answer:", "\n<answer>", "<|begin_of_box|>", "\\boxed{"],
)  # fmt: skip
def test_two_megabytes_of_any_pattern_are_parsed(unit: str) -> None:
    """Quadratic time exceeds the time limit."""
    with cpu_limit(20):
        extract_code(unit * (2_000_000 // len(unit)))


@pytest.mark.one_python
def test_blocks_with_strings_that_never_end_cost_no_pass_each() -> None:
    """No later fence is long enough to close the block of an earlier one, whose string hides its own."""
    fences = ["`" * length for length in range(500, 3, -1)]
    blocks = "".join(f"{fence}\n'''\n{fence}\n" for fence in fences)
    with cpu_limit(10):
        extracted = extract_code(f"{blocks}{FENCE}\nlast()\n{FENCE}" + "\n" * 200_000 + "Done.")
    assert extracted.code == "last()"


@pytest.mark.parametrize(
    ("answer", "beside"),
    [
        ("I look.\n```python\nprint(1)\n```\nDone.", "I look.\nDone."),
        ("<think>easy</think>\nHere:\n```python\nprint(1)\n```", "easy\nHere:"),
        ("```python\nprint(1)\n```", ""),
        ("print(1)", ""),
        ("<think>easy</think>print(1)", "easy"),
        ("```text\nA\n```\nb\n```python\nprint(1)\n```", "b"),
    ],
)
def test_the_text_beside_code_has_no_block(answer: str, beside: str) -> None:
    assert text_beside_code(answer) == beside
