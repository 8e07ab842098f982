"""The figures of one turn, and statistics over turns: percentiles, spreads, pairwise ratios."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate

__all__ = [
    "KINDS",
    "Better",
    "Figures",
    "Kind",
    "Spread",
    "interval",
    "percentile",
    "quantile",
    "ratios",
    "spread",
    "values_of",
]

_MEBIBYTE = float(1 << 20)
#: Fewest values of an interval, and its probability of not containing the quantile.
_FEWEST, _DOUBT = 3, 0.05


@dataclass(frozen=True, kw_only=True)
class Figures:
    """The figures of one contender in one turn; None where one could not be measured."""

    p50_seconds: float
    p95_seconds: float
    p99_seconds: float
    calls_per_second: float
    start_seconds: float
    worker_peak_bytes: int | None
    client_peak_bytes: int | None


class Better(StrEnum):
    """Whether a lower or a higher figure is better."""

    LOWER = "lower"
    HIGHER = "higher"


@dataclass(frozen=True, kw_only=True)
class Kind:
    """How one field of ``Figures`` is shown; ``scale`` converts its unit to the shown one."""

    field: str
    title: str
    scale: float
    digits: int
    better: Better


KINDS = (
    Kind(field="p50_seconds", title="p50 ms", scale=1e3, digits=3, better=Better.LOWER),
    Kind(field="p95_seconds", title="p95 ms", scale=1e3, digits=3, better=Better.LOWER),
    Kind(field="p99_seconds", title="p99 ms", scale=1e3, digits=3, better=Better.LOWER),
    Kind(field="calls_per_second", title="calls/s", scale=1, digits=0, better=Better.HIGHER),
    Kind(field="start_seconds", title="start s", scale=1, digits=2, better=Better.LOWER),
    Kind(field="worker_peak_bytes", title="worker MiB", scale=1 / _MEBIBYTE, digits=1, better=Better.LOWER),
    Kind(field="client_peak_bytes", title="client MiB", scale=1 / _MEBIBYTE, digits=1, better=Better.LOWER),
)


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Median, least and greatest of some values."""

    median: float
    low: float
    high: float


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the smallest value that at least ``percent`` of the values do not exceed (nearest rank).

    Args:
        values: at least one; any order.
        percent: above 0, up to 100.
    """
    if not values:
        raise ValueError("percentile of no values")
    if not 0 < percent <= 100:
        raise ValueError(f"percent is {percent}, not in (0, 100]")
    rank = math.ceil(len(values) * percent / 100)
    return sorted(values)[rank - 1]


def quantile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that this share of the values does not exceed; of a half the median."""
    return statistics.median(values) if share == 0.5 else percentile(values, 100 * share)


def interval(values: Sequence[float], share: float) -> tuple[float, float] | None:
    """Return the interval that contains a quantile with 95 % confidence; None of fewer than three values.

    Its ends are order statistics, so no distribution is assumed. Few values do not allow that confidence;
    then the interval ends at their least or greatest.
    """
    count, ordered = len(values), sorted(values)
    if count < _FEWEST:
        return None
    # The quantile is less than the value of a rank with the probability that no more values are below it.
    less = list(accumulate(_chance(count, rank, share) for rank in range(count)))
    low = max((rank for rank in range(count) if less[rank] <= _DOUBT / 2), default=0)
    high = min((rank for rank in range(count) if less[rank] >= 1 - _DOUBT / 2), default=count - 1)
    return ordered[low], ordered[high]


def _chance(count: int, number: int, share: float) -> float:
    """Return the probability that ``number`` of ``count`` values are below the quantile."""
    ways = math.lgamma(count + 1) - math.lgamma(number + 1) - math.lgamma(count - number + 1)
    return math.exp(ways + number * math.log(share) + (count - number) * math.log1p(-share))


def spread(values: Iterable[float]) -> Spread | None:
    """Return median, least and greatest; None without values."""
    known = list(values)
    if not known:
        return None
    return Spread(median=statistics.median(known), low=min(known), high=max(known))


def values_of(turns: Iterable[Figures | None], field: str) -> list[float | None]:
    """Return one field of each turn; None where the turn or the figure is missing."""
    return [None if turn is None else getattr(turn, field) for turn in turns]


def ratios(ours: Sequence[Figures | None], peer: Sequence[Figures | None], field: str) -> Spread | None:
    """Divide our figure by the peer's within each turn; return the spread of the ratios.

    Dividing within a turn cancels variations of the machine (frequency, other load), which a
    ratio of two medians would not. Turns that lack either figure are left out; None when no turn has both.
    """
    pairs = zip(values_of(ours, field), values_of(peer, field), strict=True)
    return spread(own / other for own, other in pairs if own is not None and other)
