"""What was spent, and what is left of budgets."""

from __future__ import annotations

from datetime import date
from typing import Annotated

from fastapi import APIRouter, Query

from nekro.app.budgets.limits import day_of
from nekro.app.budgets.report import read_budgets, read_costs
from nekro.gateway.dependencies import IdentityDep, ServicesDep
from nekro.gateway.identity import Identity, Scope
from nekro.gateway.routing import KeyedRoute
from nekro.gateway.views import budget_answer, cost_answer
from nekro.gateway.web.paging import Cursor, Limit, cursor_of, text_of
from nekro_agent.shared_clock import shared_time
from nekro_client.models import CostGroup, Costs
from storage.states import BudgetScope

__all__ = ["paying_key", "router"]

router = APIRouter(route_class=KeyedRoute, tags=["operations"])


@router.get("/costs")
async def get_costs(
    services: ServicesDep,
    identity: IdentityDep,
    by: Annotated[CostGroup, Query(description="what the sums are grouped by")] = "day",
    since: Annotated[date | None, Query(description="first day (UTC)")] = None,
    until: Annotated[date | None, Query(description="last day (UTC)")] = None,
    limit: Limit = 50,
    cursor: Cursor = None,
) -> Costs:
    """Sum up what rounds, runs of code and plugins' requests to models used, ordered by the group.

    The first page also has the budgets of today, those with the least left first. Sums include estimates of
    what is running. A key without the scope `admin` sees what it pays for, and its own budgets.
    """
    own = paying_key(identity)
    after = None if cursor is None else text_of(cursor)
    settings = services.settings.budgets
    async with services.database.read() as transaction:
        page = await read_costs(
            transaction, by, since=since, until=until, after=after, limit=limit, key_id=own
        )
        budgets = []
        if cursor is None:
            budgets = await read_budgets(transaction, settings, day=day_of(shared_time()))
            if own is not None:
                budgets = [one for one in budgets if (one.scope, one.id) == (BudgetScope.KEY, own)]
    return Costs(
        items=[cost_answer(one) for one in page.sums],
        budgets=[budget_answer(one, warn_at=settings.warn_at) for one in budgets],
        next_cursor=None if page.after is None else cursor_of(page.after),
    )


def paying_key(identity: Identity) -> str | None:
    """Return the key whose spending an identity may see; None: all spending."""
    if Scope.ADMIN in identity.scopes:
        identity.require_all(Scope.ADMIN)
        return None
    identity.require(Scope.READ)
    return identity.key_id
