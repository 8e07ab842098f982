"""Programs in another form than plain Python, and what is left as it is."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from waiting import cpu_limit

from nekro.agent.answers.programs import (
    MOST_PARSED_CHARS,
    calls_known,
    is_change,
    joined_program,
    parse,
    plain_program,
    program_in_json,
    tagged_program,
)

NAMES = frozenset({"send", "a.web.search"})


@pytest.mark.parametrize(
    ("shown", "meant"),
    [
        (">>> x = 1\n>>> x\n1", "x = 1\nx"),
        (">>> if x:\n...     send(x)\n...\n>>> send(1)", "if x:\n    send(x)\n\nsend(1)"),
        ("1  if x:\n2      send(x)", "if x:\n    send(x)"),
        ("8→x = 1\n9→\n10→send(x)", "x = 1\n\nsend(x)"),
        ("1. x = 1\n2. send(x)", "x = 1\nsend(x)"),
        ("1 | >>> x", "1 | >>> x"),
        ("+if x:\n+    send(x)\n\n+send(1)", "if x:\n    send(x)\n\nsend(1)"),
        ("x = a &lt; b", "x = a < b"),
        ("send(&#39;a &amp;amp; b&#39;)", "send('a &amp; b')"),
        ("%matplotlib inline\nsend(1)", "send(1)"),
        ("%pip install -q x\nsend(“a”)", 'send("a")'),
        ("send(‘a’，［1］)", "send('a',[1])"),
        ("send(1 − 2)", "send(1 - 2)"),
        ("send(\u202aa\u202c)", "send(a)"),
        (">>> send(“a”)", 'send("a")'),
    ],
)
def test_a_program_is_restored(shown: str, meant: str) -> None:
    assert plain_program(shown) == meant


@pytest.mark.parametrize(
    "code",
    [
        "",
        "x = 1",
        "print('&lt;', \"&quot;\")  # &gt;",
        "print('“a”，')",
        '"""\n>>> send(1)\n“\n"""',
        "1\n3",
        "1\n2\n3",
        "x = (a\n% b)",
        "x &= lt",
        "if 1 &lt; 2",
        "send(“a)",
        'send(“a"”)',
        "!ls",
        "名 = '（'",
        "def f(:\n    “x”",
    ],
)
def test_other_text_is_left_as_it_is(code: str) -> None:
    assert plain_program(code) == code


PIECES = st.sampled_from(
    [">>> ", "... ", "\n", "1 ", "2 ", "+", "-", "&lt;", "&#x27;", "“", "”", "‘", "’", "（", "）", "x", "=",
     "'", '"', '"""', "#", "!pip install x", "\u00ad", "\\", " "]
)  # fmt: skip


@given(st.lists(PIECES, max_size=30).map("".join))
@settings(max_examples=300)
def test_what_is_changed_is_python(code: str) -> None:
    plain = plain_program(code)
    assert plain == code or parse(plain) is not None
    # Signs before `++...` can be taken away twice, as each rest is Python. It ends: nothing comes and goes.
    seen = [plain]
    while (plain := plain_program(plain)) != seen[-1]:
        assert plain not in seen and parse(plain) is not None
        seen.append(plain)


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("-old()\n+new()", True),
        (" x = 1\n-old()\n+new()", True),
        ("--- a.py\n+++ b.py\n@@ -1 +1 @@\n-old()\n+new()", True),
        ("<<<<<<< SEARCH\na\n=======\nb\n>>>>>>> REPLACE", True),
        ("-x", False),
        ("x = 1\n-x\n+x", False),
        ('"""\n--- a\n+++ b\n"""', False),
        ("", False),
    ],
)
def test_a_diff_is_no_program(code: str, expected: bool) -> None:
    assert is_change(code) is expected


@pytest.mark.parametrize(
    ("program", "drafts", "joined"),
    [
        ("send(x)", ["x = 1"], "x = 1\n\nsend(x)"),
        ("send(x)", ["y = 1", "x = y", "z = 1"], "y = 1\n\nx = y\n\nsend(x)"),
        ("send(f(1))", ["def f(a):\n    return a", "print(f(2))"], "def f(a):\n    return a\n\nsend(f(1))"),
        ("send(np.e)", ["import numpy as np", "send(1)"], "import numpy as np\n\nsend(np.e)"),
        ("send(x)", [">>> x = 1"], "x = 1\n\nsend(x)"),
        ("send(x)", ["x = 1", "x = 2"], "x = 2\n\nsend(x)"),
        ("x = 2\nsend(x)", ["x = 1\nsend(x)"], "x = 2\nsend(x)"),
        ("send([x for x in y])", ["x = 1"], "send([x for x in y])"),
        ("send(x)", ["x = (", "y = 1"], "send(x)"),
        ("send(", ["x = 1"], "send("),
        ("print(len('a'))", ["len = 1"], "print(len('a'))"),
        ("send(1)", ["def send(x): pass"], "send(1)"),
    ],
)
def test_a_program_gets_the_blocks_that_it_needs(program: str, drafts: list[str], joined: str) -> None:
    assert joined_program(program, drafts, NAMES) == joined


@pytest.mark.parametrize(
    ("text", "code", "around", "closed"),
    [
        ("<code>\nsend(1)\n</code>", "send(1)", "", True),
        ("I send.\n<execute>send(1)</execute>\nDone.", "send(1)", "I send.\nDone.", True),
        ("<python>\n  send(1)\n  print(2)\n</PYTHON>", "send(1)\nprint(2)", "", True),
        ("<code>\nprint(1)\n</code>", "print(1)", "", True),
        ("<code>\na.web.search('x')\n</cod", None, "", True),
        ("<code>\na.web.search('x')\n</code", "a.web.search('x')", "", True),
        ("<code>\nsend(1)", "send(1)", "", False),
    ],
)
def test_a_program_in_a_tag_is_found(text: str, code: str | None, around: str, closed: bool) -> None:
    found = tagged_program(text, NAMES)
    if code is None:
        assert found is None
    else:
        assert found is not None
        assert (found.code, found.around, found.closed) == (code, around, closed)


@pytest.mark.parametrize(
    "text",
    [
        "Use <code>send(1)</code> to send.",
        "<code>send(1)</code> sends.",
        "<code>print(1)</code>",
        "<code>\nx = 1\n</code>",
        "<code>\nHello\n</code>",
        "<b>\nsend(1)\n</b>",
    ],
)
def test_a_tag_for_people_is_no_program(text: str) -> None:
    assert tagged_program(text, NAMES) is None


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ('{"code": "send(1)"}', "send(1)"),
        ('{"thoughts": "I look.", "code": "print(1)\\nexit(9)"}', "print(1)\nexit(9)"),
        ('{"code": "print(1)"}', None),
        ('{"code": "EUR", "rate": 1}', None),
        ('{"code": "send(1)", "python": "send(2)"}', None),
        ('{"code": 1}', None),
        ('["send(1)"]', None),
        ('{"code": "send(1)"', None),
    ],
)
def test_a_program_in_json_is_found(text: str, code: str | None) -> None:
    assert program_in_json(text, NAMES) == code


def test_only_names_are_known_methods() -> None:
    assert calls_known("x = [a.web.search(1)]", NAMES)
    assert not calls_known("f().send(1)", NAMES)
    assert not calls_known("b.a.web.search(1)", NAMES)


@pytest.mark.one_python
@pytest.mark.parametrize(
    "unit", ["().b", "“", '"""', "'''", '\\"', "&lt;", "\n>>> ", "\n1 ", "\n+", "（", "\n!pip "]
)
def test_programs_of_any_pattern_are_read(unit: str) -> None:
    """Quadratic time exceeds the time limit."""
    with cpu_limit(10):
        for chars in (MOST_PARSED_CHARS, 200_000):
            code = "send" + unit * ((chars - 4) // len(unit))
            plain_program(code)
            is_change(code)
            calls_known(code, NAMES)
            joined_program("send(x)", [code] * 2, NAMES)
            tagged_program(f"<code>{code}</code>", NAMES)
