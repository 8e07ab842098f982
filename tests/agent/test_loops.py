"""Turns that are stuck in a loop."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from nekro.agent.loops import error_of, makes_no_progress, repeats_of_code, repeats_of_error
from nekro.agent.model import Observation, TurnRound
from nekro.sandbox.models import StopType
from nekro_agent.methods import SandboxMethodType

TRACE = 'Traceback (most recent call last):\n  File "<code>", line 1\n    f()\n'


def ended(stop: StopType = StopType.MANUAL, **fields: Any) -> TurnRound:
    return TurnRound(
        number=1, asked_at=datetime(2026, 1, 1, tzinfo=UTC), answer="x", stop_type=stop, **fields
    )


def seen(text: str) -> Observation:
    return Observation(method="look", type=SandboxMethodType.AGENT, text=text, call_id=text)


def test_a_program_repeats_if_its_results_are_the_same() -> None:
    runs = [ended(code="look(1)\n\nlook(2)", output="1"), ended(code=" look(1)\nlook(2)", output="1")]
    assert repeats_of_code("look(1)\nlook(2)\n", runs) == 2
    assert repeats_of_code("look(1)\nlook(2)\n", [*runs, ended(code="look(1) look(2)", output="2")]) == 0
    assert repeats_of_code("look(3)", runs) == 0
    assert repeats_of_code(" ", [ended(code=""), ended(code=None)]) == 0


def test_rounds_whose_worker_died_do_not_count() -> None:
    died = [ended(StopType.ERROR, code="a", reason="The host went down.", is_interrupted=True)] * 3
    assert repeats_of_code("a", died) == repeats_of_error(died[0], died) == 0
    assert not makes_no_progress(died[0], died)


def test_what_is_repeated_because_a_worker_died_does_not_count() -> None:
    died = ended(StopType.ERROR, code="b", reason="The host went down.", is_interrupted=True)
    runs = [ended(code="a", output="1"), died, ended(code="a", output="1")]
    assert repeats_of_code("a", runs) == 1
    assert repeats_of_code("a", [*runs, runs[0]]) == 2
    assert repeats_of_code("a", [*runs, died]) == 0
    fails = ended(StopType.ERROR, code="c", output=f"{TRACE}KeyError: 1")
    assert repeats_of_error(fails, [fails, died, fails]) == 1
    assert not makes_no_progress(runs[2], runs[:2])


def test_results_of_calls_count_as_results() -> None:
    same = [ended(StopType.AGENT, code="a", observations=(seen("50 %"),)) for _ in range(2)]
    assert repeats_of_code("a", same) == 2
    other = [ended(StopType.AGENT, code="a", observations=(seen(text),)) for text in ("50 %", "60 %")]
    assert repeats_of_code("a", other) == 0


@pytest.mark.parametrize(
    ("item", "error"),
    [
        (ended(StopType.ERROR, output=f"12\n{TRACE}KeyError: 1\n"), "KeyError: 1"),
        (ended(StopType.ERROR, output=f"{TRACE}E: 1\n\nDuring …:\n\n{TRACE}F: 2\nmore\n"), "F: 2"),
        (ended(StopType.ERROR, reason="x", output="  File 1\n  ^\nSyntaxError: no\n"), "SyntaxError: no"),
        (ended(StopType.ERROR, reason="It exited."), "It exited."),
        (ended(StopType.ERROR, reason="It exited.", output="no file\n"), "It exited. no file"),
        (ended(StopType.TIMEOUT, reason="longer than 3 seconds"), "TIMEOUT"),
        (ended(StopType.SECURITY), "SECURITY"),
        (ended(StopType.MANUAL, output=f"{TRACE}KeyError: 1"), ""),
        (ended(StopType.NORMAL), ""),
    ],
)
def test_an_error_is_one_line(item: TurnRound, error: str) -> None:
    assert error_of(item) == error
    assert repeats_of_error(item, [item, ended(StopType.ERROR, reason="other")]) == bool(error)


def failed(output: str, *methods: str) -> TurnRound:
    return ended(StopType.ERROR, code=output, output=output, methods=methods)


def test_the_same_kind_of_error_with_nothing_new_is_no_progress() -> None:
    first = failed(f"a\n{TRACE}KeyError: 1", "m.look")
    assert makes_no_progress(failed(f"{TRACE}KeyError: 2", "m.look"), [first])
    assert not makes_no_progress(failed(f"{TRACE}KeyError: 2", "m.tell"), [first])
    assert not makes_no_progress(failed(f"b\n{TRACE}KeyError: 2"), [first])
    assert not makes_no_progress(failed(f"{TRACE}ValueError: 2"), [first])
    assert not makes_no_progress(first, [])


def test_a_repeated_program_is_no_progress() -> None:
    assert makes_no_progress(ended(code="a", output="1"), [ended(code="a", output="1")])
    assert not makes_no_progress(ended(code="a", output="2"), [ended(code="a", output="1")])
