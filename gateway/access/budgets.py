"""Budgets of keys: what the turns that a key started today (UTC) may use."""

from __future__ import annotations

import math
from datetime import datetime, timedelta
from http import HTTPStatus

from gateway.identity import Identity
from gateway.problems import ProblemError
from nekro_agent.shared_clock import shared_time
from storage.engine import Database

__all__ = ["require_budget"]


async def require_budget(database: Database, identity: Identity) -> None:
    """Return if the key may start a turn. A turn that has begun is not stopped, so it may exceed the budget.

    Raises:
        ProblemError: 429, the budget of the day is used up.
    """
    if identity.key_id is None or (identity.cost_per_day is None and identity.tokens_per_day is None):
        return
    now = shared_time()
    today = datetime(now.year, now.month, now.day, tzinfo=now.tzinfo)
    async with database.read() as transaction:
        spent = await transaction.keys.spent(identity.key_id, since=today)
    limits = ((spent.cost, identity.cost_per_day, "cost"), (spent.tokens, identity.tokens_per_day, "tokens"))
    for used, limit, what in limits:
        if limit is not None and used >= limit:
            wait = (today + timedelta(days=1) - now).total_seconds()
            raise ProblemError(
                HTTPStatus.TOO_MANY_REQUESTS,
                "budget_exceeded",
                f"the key's {what} of the day, {limit:g}, is used up ({used:g})",
                headers={"Retry-After": str(math.ceil(wait))},
            )
