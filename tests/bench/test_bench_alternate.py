"""Comparison of contenders in short alternating runs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks import alternate
from benchmarks.alternate import as_text, measure, parse, ratios_of
from benchmarks.harness.figures import percentile
from benchmarks.peers import contender_named

pytestmark = pytest.mark.extended


def test_figures_are_divided_by_those_of_the_first_contender_in_the_same_round() -> None:
    found = measure(["raw-redis", "nekro-bridge"], rounds=2, calls=5)
    assert {name: [len(one) for one in rounds] for name, rounds in found.items()} == {
        "raw-redis": [5, 5],
        "nekro-bridge": [5, 5],
    }
    assert min(second for rounds in found.values() for one in rounds for second in one) > 0
    ratios = ratios_of(found, percent=50)
    assert ratios["raw-redis"] == [1, 1]
    medians = {name: [percentile(one, 50) for one in rounds] for name, rounds in found.items()}
    assert ratios["nekro-bridge"] == [
        own / other for own, other in zip(medians["nekro-bridge"], medians["raw-redis"], strict=True)
    ]
    assert "nekro-bridge" in as_text(found)


def test_a_slow_round_is_slow_for_both() -> None:
    found = {"a": [[1.0, 1.0], [4.0, 4.0]], "b": [[2.0, 2.0], [2.0, 2.0]]}
    assert ratios_of(found, percent=50)["b"] == [2.0, 0.5]


def test_a_contender_that_is_not_installed_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    absent = replace(contender_named("taskiq"), modules=("no_such_module",))
    monkeypatch.setattr(alternate, "contender_named", lambda name: absent)
    assert alternate.main(["--only", "taskiq"]) == 1
    error = capsys.readouterr().err
    assert "taskiq: not installed: no_such_module" in error and absent.install in error


@pytest.mark.parametrize(
    "words", [["--only", "nobody"], ["--rounds", "1"], ["--calls", "0"], ["--rounds", "x"]]
)
def test_invalid_arguments_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(words)
    assert caught.value.code == 2
    assert words[1] in capsys.readouterr().err
