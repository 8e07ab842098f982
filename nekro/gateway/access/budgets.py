"""Budgets of keys: what the turns that a key started may use in a day (UTC).

A round checks all budgets before it asks the model, so that the chat reads why it does not. A key whose own
budget is used up gets that as the answer to its request instead, and nothing is recorded.
"""

from __future__ import annotations

import math
from http import HTTPStatus

from nekro.app.budgets.limits import day_of
from nekro.app.composition import Services
from nekro.gateway.identity import Identity
from nekro.gateway.problems import ProblemError
from nekro_agent.shared_clock import shared_time
from storage.access.spendings import PayingKey
from storage.access.stored_bytes import ROW_BYTES, size_of
from storage.states import StoredKind

__all__ = ["begin_paying", "require_budget"]


async def require_budget(services: Services, identity: Identity) -> None:
    """Return if the key may start a turn.

    Raises:
        ProblemError: 429, a budget of the day is used up.
    """
    if identity.key_id is None:
        return
    key = PayingKey(
        id=identity.key_id, cost_per_day=identity.cost_per_day, tokens_per_day=identity.tokens_per_day
    )
    now = shared_time()
    for budget in await services.spending.key_budgets(key, day=day_of(now)):
        if budget.is_exhausted and budget.renews_at is not None:
            raise ProblemError(
                HTTPStatus.TOO_MANY_REQUESTS,
                "budget_exceeded",
                budget.used_up,
                headers={"Retry-After": str(math.ceil((budget.renews_at - now).total_seconds()))},
            )


async def begin_paying(services: Services, identity: Identity, account_id: str, *texts: str) -> None:
    """Let the key pay for a run or call, and for the turns that follow from it.

    Args:
        account_id: as ``Invocation.account_id``.
        texts: code or arguments, which are stored with it.

    Raises:
        ProblemError: as from ``require_budget``.
        StorageQuotaError: the key may not store more.
    """
    await require_budget(services, identity)
    if identity.key_id is not None:
        async with services.database.begin() as transaction:
            await transaction.keys.add_turn(identity.key_id, account_id)
            size = ROW_BYTES + size_of(*texts)
            transaction.stored_bytes.add(identity.account_id, StoredKind.CALLS, size)
