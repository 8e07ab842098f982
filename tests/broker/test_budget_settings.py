"""Budgets as settings: the form, and the errors of a wrong one."""

from __future__ import annotations

from typing import Any

import pytest

from broker_config.settings import Settings
from nekro_agent.errors import SettingsError


def limits(given: Any) -> dict[str, float]:
    return dict(Settings.load(env_file=None, budgets={"chat": given}).budgets.chat)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("", {}),
        ("tokens=100000", {"tokens": 100_000}),
        (" rounds = 4 , cost=0.5,", {"cost": 0.5, "rounds": 4}),
        ("tokens=0,sandbox_seconds=60", {"sandbox_seconds": 60}),
        ({"cost": 2}, {"cost": 2}),
    ],
)
def test_limits_are_read(given: Any, expected: dict[str, float]) -> None:
    assert limits(given) == expected


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ("token=3", "'token' is not a measure; did you mean tokens?"),
        ("colour=3", "'colour' is not a measure; there are: tokens, cost, rounds, sandbox_seconds"),
        ("tokens", "tokens= is not a number"),
        ("tokens=many", "tokens=many is not a number"),
        ("cost=-1", "cost=-1 must be at least 0"),
        ("cost=nan", "cost=nan must be at least 0 and finite"),
        ("rounds=1,rounds=2", "a measure is named twice"),
        (7, "write it as tokens=100000,cost=0.5"),
    ],
)
def test_a_wrong_limit_is_explained(given: Any, error: str) -> None:
    with pytest.raises(SettingsError, match="NEKRO_BUDGETS__CHAT") as refused:
        limits(given)
    assert error in str(refused.value)
