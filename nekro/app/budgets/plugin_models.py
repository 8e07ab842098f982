"""Requests of plugins to models, on the same budgets as rounds."""

from __future__ import annotations

from dataclasses import replace

from broker_config.model_groups import ModelGroup, model_groups
from broker_config.settings import Settings
from nekro.app.budgets.limits import day_of
from nekro.app.budgets.model_uses import expected_use, price_of
from nekro.app.budgets.spending import Reservation, Spending
from nekro.wire.invocation import new_id
from nekro_agent.execution.payer import Payer, current_account, current_payer
from nekro_agent.ports import ModelRequest
from nekro_agent.shared_clock import shared_time
from storage.access.spendings import NewSpending, user_scope

__all__ = ["PluginModels"]


class PluginModels:
    """Implements ``nekro_agent.ports.ModelBudget``."""

    def __init__(self, spending: Spending, settings: Settings) -> None:
        self._spending = spending
        self._answer_tokens = settings.agent.answer_tokens
        groups = model_groups(settings).values()
        self._groups = {_address(one.model, one.base_url): one for one in reversed(list(groups))}

    async def reserve(self, request: ModelRequest) -> _Charge | None:
        """See ``ModelBudget``."""
        group = self._groups.get(_address(request.model, request.base_url))
        if group is None:
            return None  # a model that the plugin brought itself
        payer = current_payer() or Payer(plugin_key="")
        answer = self._answer_tokens if request.answer_tokens is None else request.answer_tokens
        use = expected_use(group, prompt_tokens=request.prompt_tokens, answer_tokens=answer)
        entry = NewSpending(
            id=new_id(),
            day=day_of(shared_time()),
            chat_key=payer.chat_key,
            user_id=user_scope(payer.adapter_key, payer.user_id),
            turn_id=payer.turn_id,
            plugin_key=payer.plugin_key or None,
            is_of_plugin=True,
            use=use,
        )
        key = await self._spending.paying_key(payer.turn_id, payer.account_id, current_account())
        reserved = await self._spending.reserve(entry, key=key, plugin_tokens=payer.tokens_per_day)
        return _Charge(self._spending, reserved, group)


class _Charge:
    """Implements ``nekro_agent.ports.ModelCharge``."""

    def __init__(self, spending: Spending, reservation: Reservation, group: ModelGroup) -> None:
        self._spending, self._reservation, self._group = spending, reservation, group

    async def settle(
        self, *, prompt_tokens: int, answer_tokens: int, cached_tokens: int = 0, is_estimated: bool = False
    ) -> None:
        """See ``ModelCharge``."""
        use = replace(
            self._reservation.entry.use,
            requests=1,
            estimated_requests=int(is_estimated),
            prompt_tokens=prompt_tokens,
            completion_tokens=answer_tokens,
            cost=price_of(self._group, prompt_tokens, answer_tokens, cached_tokens),
        )
        await self._spending.settle_with_retries(self._reservation, [use])


def _address(model: str, base_url: str | None) -> tuple[str, str]:
    return model, (base_url or "").rstrip("/")
