"""What a summary of older messages spends, on the account of its chat."""

from __future__ import annotations

from dataclasses import replace

from loguru import logger

from broker_config.model_groups import group_or_default
from broker_config.settings import Settings
from nekro.agent.llm import LLMAnswer, LLMClient, LLMRequest
from nekro.app.budgets.limits import day_of
from nekro.app.budgets.model_uses import ModelUses, expected_use
from nekro.app.budgets.spending import Spending
from nekro.base.tasks import complete
from nekro.wire.invocation import new_id
from nekro_agent.errors import BudgetExceededError
from nekro_agent.shared_clock import shared_time
from storage.access.spendings import NewSpending

__all__ = ["SummaryMeter"]


class SummaryMeter:
    """Counts requests for summaries; one instance per process."""

    def __init__(self, spending: Spending, settings: Settings) -> None:
        self._spending = spending
        self._settings = settings
        #: The chats of one day whose refusal is in the log.
        self._refused_on = ""
        self._refused: set[str] = set()

    async def ask(self, client: LLMClient, request: LLMRequest, *, prompt_tokens: int) -> LLMAnswer:
        """Send a request that names a chat and a model group, and count it.

        A refusal is logged once per chat and day.

        Args:
            prompt_tokens: tokens of the request.

        Raises:
            BudgetExceededError: a budget is used up; nothing was sent.
            LLMError: as from the client.
            StorageUnavailableError: the database does not answer; nothing was sent.
        """
        entry = self._entry(request, prompt_tokens)
        is_known = self._is_refused(entry)
        try:
            reservation = await self._spending.reserve(entry, is_logged=False)
        except BudgetExceededError as exc:
            if not is_known:
                self._refused.add(request.chat_key)
                logger.bind(chat_key=request.chat_key, error=str(exc)).warning("summary_over_budget")
            raise
        uses = ModelUses()
        try:
            answer = await client.complete(replace(request, on_spent=uses.add))
            uses.complete(answer)
        finally:
            await complete(self._spending.settle_with_retries(reservation, uses.all))
        return answer

    def _is_refused(self, entry: NewSpending) -> bool:
        if self._refused_on != entry.day:
            self._refused_on = entry.day
            self._refused.clear()
        return entry.chat_key in self._refused

    def _entry(self, request: LLMRequest, prompt_tokens: int) -> NewSpending:
        group = group_or_default(self._settings, request.group)
        answer_tokens = self._settings.agent.answer_tokens
        return NewSpending(
            id=f"summary:{new_id()}",
            day=day_of(shared_time()),
            chat_key=request.chat_key,
            use=expected_use(group, prompt_tokens=prompt_tokens, answer_tokens=answer_tokens),
        )
