"""What in a program is certain to fail, and what is not."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence

import pytest

from nekro.agent.program_check import findings_of
from nekro.sandbox.models import StubMethod
from nekro_agent.methods import SandboxMethodType


def draw(text: str, width: int, *, title: str | None = None, ratio: float = 1.0) -> str: ...


def note(text: str, tags: list[str] | None = None, **more: str) -> None: ...


def anything(*args: object) -> None: ...


FUNCTIONS: dict[str, Callable[..., object]] = {"m0": draw, "m1": note, "m2": anything}
DRAW = "draw(text: str, width: int, *, title: str | None = None, ratio: float = 1.0) -> str"
NOTE = "note(text: str, tags: list[str] | None = None, **more: str) -> None"
METHODS = [
    StubMethod(
        token=token,
        name=function.__name__,
        path=f"a.art.{function.__name__}",
        signature=str(inspect.signature(function)).replace("'", ""),
        doc=None,
        type=SandboxMethodType.TOOL,
        timeout_seconds=None,
    )
    for token, function in FUNCTIONS.items()
]


def misfit(token: str, count: int, names: Sequence[str]) -> str | None:
    try:
        inspect.signature(FUNCTIONS[token]).bind(*range(count), **dict.fromkeys(names))
    except TypeError as exc:
        return f"{FUNCTIONS[token].__name__}: {exc}"
    return None


def found(code: str, *, kept: Sequence[str] = ()) -> list[tuple[int, str]]:
    return [(one.line, one.text) for one in findings_of(code, METHODS, kept=kept, misfit=misfit)]


def test_all_that_cannot_work_is_found_at_once() -> None:
    code = """note("start")
picture = draw("sun")
a.art.draw("sun", 3, colour="red")
note(picture, tags=3)
print(titel)
draw({"a": 1}, "wide", ratio=[1])
"""
    assert found(code) == [
        (2, "draw: missing a required argument: 'width'"),
        (3, "draw: got an unexpected keyword argument 'colour'"),
        (4, f"{NOTE}: tags is 3, but must be list[str] | None"),
        (5, "name 'titel' is not defined"),
        (6, f"{DRAW}: ratio is a list, but must be float"),
        (6, f"{DRAW}: text is a dict, but must be str"),
        (6, f"{DRAW}: width is 'wide', but must be int"),
    ]


@pytest.mark.parametrize(
    "code",
    [
        "draw('sun', 3, title='x', ratio=2)",
        "draw('sun', width='3')",
        "draw('sun', None)",
        "draw(*parts) if (parts := ['a', 1]) else None",
        "more = {'width': 3}\ndraw('sun', **more)",
        "note(1, other='x')",
        "note('x', None); note('x', [1]); note('x', tags='one')",
        "anything(1, [2], {3: 4})",
        # Expected failures.
        "try:\n    draw('sun')\n    print(unknown)\nexcept Exception as exc:\n    print(exc)",
        "try:\n    draw('sun')\nexcept:\n    pass",
        "try:\n    draw('sun')\nexcept (KeyError, TypeError):\n    pass",
        "try:\n    draw('sun')\nexcept errors()[0]:\n    pass\ndef errors(): ...",
        "from contextlib import suppress\nwith suppress(Exception):\n    draw('sun')",
        "import contextlib\nwith contextlib.suppress(TypeError), open('x'):\n    draw('sun')",
        # Names that are defined in other ways.
        "print(rows) if 'rows' in dir() else None",
        "size: int = 3\nprint(__annotations__)\nclass A:\n    def b(self): return __class__\nprint(A().b())",
        "exec('x = 1')\nprint(x)",
        "globals()['x'] = 1\nprint(x)",
        "from math import *\nprint(pi)",
        "import sys\nsys.modules['__main__'].x = 1\nprint(x)",
        "def draw(): ...\ndraw()",
        "draw = print\ndraw()",
        "import numpy as draw\ndraw()",
        "print(__name__, _ck, MethodError, dynamic_importer, a.art, __doc__)",
        "for i in range(3): pass\nprint(i, [n for n in 'ab'], {k: v for k, v in []}, lambda q: q)",
        "class A:\n    b = 1\n    def c(self): return self.b\nprint(A, A().c())",
        "match 1:\n    case [one, *rest]: print(one, rest)\n    case {'k': v, **others}: print(v, others)",
        "with open('x') as file: print(file)\ndel file",
        "global later\nlater = 1\nprint(later)",
        # Nothing uses it.
        "def helper():\n    return unknown + draw()\nprint(1)",
        # Left to Python.
        "draw('sun'",
        "x = 1\n" * 3000 + "draw()",
    ],
)
def test_what_may_work_is_no_finding(code: str) -> None:
    assert found(code) == []


def test_a_function_that_is_used_is_checked() -> None:
    assert found("def helper():\n    return unknown\nprint(helper())") == [
        (2, "name 'unknown' is not defined")
    ]
    assert found("rows = [draw(row) for row in []]") == [(1, "draw: missing a required argument: 'width'")]
    code = "try:\n    draw('sun')\nexcept KeyError:\n    pass\nelse:\n    draw()"
    assert [line for line, _ in found(code)] == [2, 6]


def test_variables_of_the_turn_s_last_program_are_defined() -> None:
    assert found("print(rows)") == [(1, "name 'rows' is not defined")]
    assert found("print(rows)", kept=["rows"]) == []


def test_the_number_of_findings_is_bounded() -> None:
    assert len(found("\n".join(f"print(x{number})" for number in range(500)))) == 12


@pytest.mark.parametrize(
    "code",
    [
        "(" * 300 + ")" * 300,
        "-" * 9000 + "1",
        "\0",
        "draw('\ud800', 1)",
        "a" + ".b" * 4000,
        "try:\n" + "  x\n" * 2400 + "except Exception: pass",
    ],
)
def test_hostile_programs_are_left_to_the_sandbox(code: str) -> None:
    assert found(code) == []
