"""Budgets as settings: what one scope may use, written as ``tokens=100000,cost=0.5``."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from typing import Annotated, Final

from pydantic import BeforeValidator
from pydantic_settings import NoDecode

__all__ = ["MEASURES", "BudgetLimits"]

#: What budgets measure, with the unit that people read.
MEASURES: Final[Mapping[str, str]] = {
    "tokens": "tokens",
    "cost": "cost",
    "rounds": "rounds",
    "sandbox_seconds": "seconds of running code",
}


def _limits(value: object) -> object:
    if isinstance(value, str):
        pairs = [part.strip() for part in value.split(",") if part.strip()]
        names = [pair.partition("=")[0].strip() for pair in pairs]
        if len(set(names)) < len(names):
            raise ValueError("a measure is named twice")
        value = {name: pair.partition("=")[2].strip() for name, pair in zip(names, pairs, strict=True)}
    if not isinstance(value, Mapping):
        raise ValueError("write it as tokens=100000,cost=0.5")
    limits = {str(name): _limit(str(name), given) for name, given in value.items()}
    return {name: limits[name] for name in MEASURES if limits.get(name)}


def _limit(name: str, given: object) -> float:
    if name not in MEASURES:
        near = difflib.get_close_matches(name, MEASURES, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are: {', '.join(MEASURES)}"
        raise ValueError(f"{name!r} is not a measure; {hint}")
    try:
        number = float(str(given))
    except ValueError:
        raise ValueError(f"{name}={given} is not a number") from None
    if not math.isfinite(number) or number < 0:
        raise ValueError(f"{name}={given} must be at least 0 and finite; 0 does not limit")
    return number


#: Limits by measure, in the order of ``MEASURES``; what is missing is not limited.
BudgetLimits = Annotated[Mapping[str, float], NoDecode, BeforeValidator(_limits)]
