"""Ids that a command gets by their beginning."""

from __future__ import annotations

import pytest

from nekro.cli.command import chosen_id
from nekro_agent.errors import NotFoundError, UsageError


def chosen(beginning: str) -> str:
    return chosen_id(["ab", "abc", "abd", "x1"], beginning, noun="timer", listing="nekro timers")


@pytest.mark.parametrize(("beginning", "found"), [("x", "x1"), ("abc", "abc"), ("ab", "ab")])
def test_an_id_is_found_by_its_beginning_and_a_whole_id_before_longer_ones(
    beginning: str, found: str
) -> None:
    assert chosen(beginning) == found


def test_no_id_and_several_ids_are_different_errors() -> None:
    with pytest.raises(NotFoundError, match="no timer has the id y; `nekro timers` lists them"):
        chosen("y")
    with pytest.raises(UsageError, match="several ids begin with a; write more"):
        chosen("a")
