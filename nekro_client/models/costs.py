"""Costs, budgets and figures over time."""

from __future__ import annotations

from datetime import datetime
from typing import Literal

from nekro_client.models.base import Answer, Page

__all__ = [
    "BudgetUse",
    "Cost",
    "CostGroup",
    "Costs",
    "Series",
    "SeriesPoint",
]

#: What ``GET /costs`` can group by.
CostGroup = Literal["day", "chat", "user", "key", "plugin", "model"]


class Cost(Answer):
    """What one group used."""

    #: Day (UTC), chat, user (``adapter:id``), id of the key, plugin or model; "" for what belongs to none.
    key: str
    rounds: int
    #: Requests that were sent to models, also failed ones.
    requests: int
    #: Requests whose tokens and cost are an estimate: the endpoint reported no possible number of tokens, or
    #: they are running, or their worker died. The last two are not among ``requests``.
    estimated_requests: int = 0
    prompt_tokens: int
    completion_tokens: int
    #: By the prices in the settings.
    cost: float
    sandbox_seconds: float


class BudgetUse(Answer):
    """How much of one limit is used, estimates of running work included."""

    #: ``turn``, ``chat``, ``user``, ``key`` or ``day`` (the whole system).
    scope: str
    #: "" for the whole system.
    id: str
    #: ``tokens``, ``cost``, ``rounds``, ``sandbox_seconds``, or ``stored_bytes`` of a key.
    measure: str
    #: ``turn``, or the day (UTC); "" for ``stored_bytes``.
    period: str
    limit: float
    used: float
    #: As in ``Cost``; 0 where ``used`` is neither tokens nor cost.
    estimated_requests: int = 0
    #: When it begins anew; None for a turn, and for ``stored_bytes``.
    renews_at: datetime | None
    #: ``ok``, ``warned`` or ``exhausted``.
    state: str


class Costs(Page[Cost]):
    """One page of sums, and the budgets that were used today."""

    #: On the first page only.
    budgets: list[BudgetUse] = []


class SeriesPoint(Answer):
    """Figures of one interval."""

    begins_at: datetime
    #: Turns that ended, whatever their state; one that another turn answers is not counted.
    turns: int = 0
    failed: int = 0
    cancelled: int = 0
    #: How long half of these turns, and 95 % of them, took at most, from the request to the end; None: none
    #: ended.
    turn_p50_ms: int | None = None
    turn_p95_ms: int | None = None
    #: Requests that were sent to models, also failed ones.
    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    #: By the prices in the settings.
    cost: float = 0.0


class Series(Answer):
    """Figures over time, in intervals of one length without gaps."""

    #: An hour for a range of up to three days, else a day (UTC).
    interval: Literal["hour", "day"]
    #: Begin of the first interval, and end of the range.
    since: datetime
    until: datetime
    #: From when the figures are complete, if the range has too many rows to count all; None: from the begin.
    complete_since: datetime | None = None
    points: list[SeriesPoint]
