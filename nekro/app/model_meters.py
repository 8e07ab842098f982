"""What requests to models spend: those of rounds, of summaries and of plugins, on the same budgets.

A round reserves before the model is asked, and settles with its row. A summary is on the account of its
chat."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import replace

from loguru import logger

from broker_config.model_groups import ModelGroup, group_or_default, model_groups
from broker_config.settings import Settings
from nekro.agent.llm import LLMAnswer, LLMClient, LLMRequest, ModelSpent
from nekro.agent.llm.port import cost_of
from nekro.agent.rounds import RoundAnswer
from nekro.app.budgets import day_of
from nekro.app.spending import Reservation, Spending
from nekro.base.tasks import complete
from nekro.sandbox.models import RunResult
from nekro.wire.invocation import new_id
from nekro_agent.errors import BudgetExceededError
from nekro_agent.execution.current import Payer, current_account, current_payer
from nekro_agent.ports import ChatInfo, ModelRequest
from nekro_agent.shared_clock import shared_time
from storage.accounts.keys import account_of_key
from storage.accounts.spendings import ModelUse, NewSpending, PayingKey, plugin_of, user_scope
from storage.accounts.stored_bytes import ROW_BYTES, size_of
from storage.repositories.rounds import ClaimedRound, Round
from storage.states import StoredKind, TriggerKind
from storage.transaction import Transaction

__all__ = [
    "ModelUses",
    "PluginModels",
    "RoundBudgets",
    "RoundMeter",
    "SummaryMeter",
    "expected_use",
    "price_of",
]


class ModelUses:
    """Adds up requests to models."""

    def __init__(self) -> None:
        self._uses: dict[tuple[str, str], ModelUse] = {}

    def add(self, spent: ModelSpent) -> None:
        """Count one request."""
        known = self._uses.get((spent.group, spent.model), ModelUse(group=spent.group, model=spent.model))
        self._uses[spent.group, spent.model] = replace(
            known,
            requests=known.requests + 1,
            estimated_requests=known.estimated_requests + spent.is_estimated,
            prompt_tokens=known.prompt_tokens + spent.prompt_tokens,
            completion_tokens=known.completion_tokens + spent.answer_tokens,
            cost=known.cost + spent.cost,
        )

    def complete(self, llm: LLMAnswer) -> None:
        """Add the figures of an answer whose client did not report its requests."""
        if not self._uses:
            self._uses[llm.group, llm.model] = ModelUse(
                group=llm.group,
                model=llm.model,
                requests=llm.tries,
                estimated_requests=int(llm.is_estimated),
                prompt_tokens=llm.prompt_tokens or 0,
                completion_tokens=llm.answer_tokens or 0,
                cost=llm.cost,
            )

    @property
    def all(self) -> list[ModelUse]:
        """Each model once."""
        return list(self._uses.values())


def expected_use(group: ModelGroup, *, prompt_tokens: int, answer_tokens: int) -> ModelUse:
    """Return what one request that is about to be sent is expected to use."""
    return ModelUse(
        group=group.name,
        model=group.model,
        estimated_requests=1,
        prompt_tokens=prompt_tokens,
        completion_tokens=answer_tokens,
        cost=price_of(group, prompt_tokens, answer_tokens),
    )


def price_of(group: ModelGroup, prompt_tokens: int, answer_tokens: int, cached_tokens: int = 0) -> float:
    """Return what tokens of a model group cost; ``cached_tokens`` are a part of the prompt."""
    return cost_of(
        prompt_tokens,
        answer_tokens,
        cached_tokens,
        input_price=group.input_price,
        output_price=group.output_price,
        cached_input_price=group.cached_input_price,
    )


class RoundBudgets:
    """Makes the meters of attempts; one instance per rounds worker."""

    def __init__(self, spending: Spending, settings: Settings) -> None:
        self._spending = spending
        self._settings = settings

    def meter(
        self,
        claimed: ClaimedRound,
        chat: ChatInfo,
        *,
        key: PayingKey | None,
        waking_method: str | None = None,
    ) -> RoundMeter:
        """Return the meter of an attempt that was just started.

        Args:
            key: pays; None: no key does.
            waking_method: the method whose call requested the round; None reads it, if a call did.
        """
        group = group_or_default(self._settings, chat.model_group)
        return RoundMeter(self._spending, claimed, chat, group, key, waking_method=waking_method)


class RoundMeter:
    """Implements ``nekro.agent.rounds.RoundBudget`` for one attempt."""

    def __init__(
        self,
        spending: Spending,
        claimed: ClaimedRound,
        chat: ChatInfo,
        group: ModelGroup,
        key: PayingKey | None,
        *,
        waking_method: str | None = None,
    ) -> None:
        """Create it.

        Args:
            group: the model group that is asked first, whose prices the estimate uses.
            key: None: no key pays.
            waking_method: as of ``RoundBudgets.meter``.
        """
        self._spending = spending
        self._claimed = claimed
        self._chat = chat
        self._group = group
        self._key = key
        self._waking_method = waking_method
        self._reservation: Reservation | None = None
        self._uses = ModelUses()
        #: What is settled since the answer; None before it.
        self._settled_uses: Sequence[ModelUse] | None = None
        #: When its code began to run, by ``time.monotonic``.
        self._ran_at: float | None = None

    async def reserve(self, *, prompt_tokens: int, answer_tokens: int, sandbox_seconds: float) -> None:
        """See ``RoundBudget``."""
        round_ = self._claimed.round
        entry = NewSpending(
            # A recovered attempt is an entry of its own: what the one before asked for was spent too.
            id=f"{round_.id}:{round_.attempt}",
            day=day_of(shared_time()),
            chat_key=round_.chat_key,
            user_id=user_scope(self._chat.adapter_key, self._claimed.user_id),
            turn_id=round_.turn_id,
            plugin_key=None if self._waking_method is None else plugin_of(self._waking_method),
            rounds=1,
            sandbox_seconds=sandbox_seconds,
            use=expected_use(self._group, prompt_tokens=prompt_tokens, answer_tokens=answer_tokens),
        )
        waking_call = None
        if round_.trigger_kind is TriggerKind.CALL and self._waking_method is None:
            waking_call = round_.trigger_id
        self._reservation = await self._spending.reserve(entry, key=self._key, waking_call=waking_call)

    def spent(self, spent: ModelSpent) -> None:
        """See ``RoundBudget``."""
        self._uses.add(spent)

    async def answered(self, transaction: Transaction, answer: RoundAnswer) -> None:
        """Settle what the model used, before the code runs; the estimate of its time stays."""
        self._ran_at = time.monotonic()
        self._uses.complete(answer.llm)
        await self._settle(transaction, None, is_last=False)
        self._settled_uses = self._uses.all

    async def ended(
        self,
        transaction: Transaction,
        ended: Round,
        *,
        llm: LLMAnswer | None = None,
        run: RunResult | None = None,
        turn_goes_on: bool = False,
    ) -> None:
        """Settle everything, in the transaction that ends the attempt."""
        if llm is not None:
            self._uses.complete(llm)
        seconds = 0.0
        if run is not None:
            seconds = run.duration_seconds
        elif self._ran_at is not None:  # it was stopped while its code ran
            seconds = time.monotonic() - self._ran_at
        await self._settle(transaction, seconds, is_last=True, turn_goes_on=turn_goes_on)
        if self._key is not None:
            account_id = account_of_key(self._key.id)
            transaction.stored_bytes.add(account_id, StoredKind.ROUNDS, _stored_size(ended), refuses=False)
            await transaction.stored_bytes.add_calls(account_id, ended.id)

    async def _settle(
        self,
        transaction: Transaction,
        seconds: float | None,
        *,
        is_last: bool,
        turn_goes_on: bool = False,
    ) -> None:
        if self._reservation is not None:
            await self._spending.settle(
                transaction,
                self._reservation,
                self._uses.all,
                sandbox_seconds=seconds,
                is_last=is_last,
                turn_goes_on=turn_goes_on,
                settled_uses=self._settled_uses,
            )


def _stored_size(ended: Round) -> int:
    """Return what a round takes: its texts are in its row and in its events."""
    texts = size_of(ended.answer, ended.code, ended.output, ended.error)
    return ROW_BYTES + 2 * (texts + size_of(json.dumps(ended.calls or [])))


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
