"""What requests to models spend: those of rounds, of summaries and of plugins, on the same budgets.

A round is admitted before the model is asked, and settled with its row. A summary is on the account of its
chat.
"""

from __future__ import annotations

import json
import time
from dataclasses import replace

from loguru import logger

from broker_config.model_groups import ModelGroup, group_or_default, model_groups
from broker_config.settings import Settings
from nekro.agent.llm import LLMAnswer, LLMClient, LLMRequest, ModelSpent
from nekro.agent.llm.port import cost_of
from nekro.app.budgets import day_of
from nekro.app.spending import Meter, Spending, with_plugin
from nekro.base.tasks import complete
from nekro.sandbox.models import RunResult
from nekro.wire.invocation import new_id
from nekro_agent.errors import BudgetExceededError
from nekro_agent.execution.current import Payer, current_account, current_payer
from nekro_agent.ports import ChatInfo, ModelRequest
from nekro_agent.shared_clock import shared_time
from storage.accounts.spendings import ModelUse, NewSpending, PayingKey, plugin_of, user_scope
from storage.accounts.stored_bytes import ROW_BYTES, size_of
from storage.repositories.rounds import ClaimedRound, Round
from storage.states import StoredKind, TriggerKind, account_of_key
from storage.transaction import Transaction

__all__ = [
    "PluginModels",
    "RoundBudgets",
    "RoundMeter",
    "SummaryMeter",
    "ask_admitted",
    "chat_entry",
    "expected_use",
    "price_of",
]


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

    async def settle_interrupted(self, transaction: Transaction, orphan: Round) -> None:
        """Count what a round used if its worker died after the answer and has not counted it.

        How long its code ran is not known, so its longest time is counted.
        """
        claimed = ClaimedRound(round=orphan, merged=tuple(await transaction.rounds.merged_into(orphan.id)))
        chat = await transaction.chats.get(orphan.chat_key)
        key = await transaction.spendings.key_of_rounds(claimed.triggers)
        entry = round_entry(claimed, chat, sandbox_seconds=self._settings.sandbox.wall_seconds)
        entry = replace(entry, key_id=None if key is None else key.id)
        waking_call = orphan.trigger_id if orphan.trigger_kind is TriggerKind.CALL else None
        use = ModelUse(
            group=group_or_default(self._settings, chat.model_group).name,
            model=orphan.model or "",
            requests=1,
            estimated_requests=int(orphan.tokens_estimated or False),
            prompt_tokens=orphan.prompt_tokens or 0,
            completion_tokens=orphan.completion_tokens or 0,
            cost=orphan.cost or 0.0,
        )
        if not _was_asked(orphan):
            entry, use = replace(entry, rounds=0), _no_use(use.group, orphan)
        entry = await with_plugin(transaction, entry, waking_call)
        totals = await transaction.spendings.settle_interrupted(entry, use)
        await self._spending.warn(transaction, totals, key, orphan.chat_key, turn_goes_on=False)


def _no_use(group: str, round_: Round) -> ModelUse:
    """Return the use of an attempt that asks no model, beside those of its round's model."""
    return ModelUse(group=group, model=round_.model or "")


def _was_asked(orphan: Round) -> bool:
    """Whether the round's last attempt asked the model; else it ran the program of an earlier one again."""
    started, answered = orphan.started_at, orphan.answered_at
    return started is None or answered is None or started <= answered


def round_entry(
    claimed: ClaimedRound,
    chat: ChatInfo,
    *,
    sandbox_seconds: float,
    plugin_key: str | None = None,
    use: ModelUse | None = None,
) -> NewSpending:
    """Return the entry of an attempt at a round, which an attempt after its recovery does not share."""
    round_ = claimed.round
    return NewSpending(
        id=f"{round_.id}:{round_.attempt}",
        day=day_of(shared_time()),
        chat_key=round_.chat_key,
        user_id=user_scope(chat.adapter_key, claimed.user_id),
        turn_id=round_.turn_id,
        plugin_key=plugin_key,
        rounds=1,
        sandbox_seconds=sandbox_seconds,
        use=use or ModelUse(),
    )


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
            waking_method: see ``RoundBudgets.meter``.
        """
        self._spending = spending
        self._claimed = claimed
        self._chat = chat
        self._group = group
        self._key = key
        self._waking_method = waking_method
        #: None before it has reserved.
        self._meter: Meter | None = None
        #: When its code began to run, by ``time.monotonic``.
        self._ran_at: float | None = None

    async def reserve(self, *, prompt_tokens: int, answer_tokens: int, sandbox_seconds: float) -> None:
        """See ``RoundBudget``."""
        round_, method = self._claimed.round, self._waking_method
        entry = round_entry(
            self._claimed,
            self._chat,
            sandbox_seconds=sandbox_seconds,
            plugin_key=None if method is None else plugin_of(method),
            use=expected_use(self._group, prompt_tokens=prompt_tokens, answer_tokens=answer_tokens),
        )
        is_call = round_.trigger_kind is TriggerKind.CALL and method is None
        meter = self._spending.meter(entry, key=self._key, waking_call=round_.trigger_id if is_call else None)
        await meter.admit()
        self._meter = meter

    async def reserve_run(self, *, sandbox_seconds: float) -> None:
        """See ``RoundBudget``."""
        use = _no_use(self._group.name, self._claimed.round)
        entry = round_entry(self._claimed, self._chat, sandbox_seconds=sandbox_seconds, use=use)
        meter = self._spending.meter(replace(entry, rounds=0), key=self._key)
        await meter.admit()
        meter.add(use)
        self._meter, self._ran_at = meter, time.monotonic()

    def spent(self, spent: ModelSpent) -> None:
        """See ``RoundBudget``."""
        if self._meter is not None:
            self._meter.spent(spent)

    def answered(self, llm: LLMAnswer) -> None:
        """Note that the code begins to run."""
        self._ran_at = time.monotonic()
        if self._meter is not None:
            self._meter.answered(llm)

    async def interrupted(self) -> None:
        """Count what was asked before the answer, because this worker stops; an estimate stays instead.

        Who ends the round counts it if it was answered.
        """
        meter = self._meter
        if meter is not None and meter.has_uses and not meter.is_estimated and self._ran_at is None:
            await meter.settle_alone()

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
        seconds = 0.0
        if run is not None:
            seconds = run.duration_seconds
        elif self._ran_at is not None:  # it was stopped while its code ran
            seconds = time.monotonic() - self._ran_at
        if self._meter is not None:
            if llm is not None:
                self._meter.answered(llm)
            await self._meter.settle(transaction, sandbox_seconds=seconds, turn_goes_on=turn_goes_on)
        if self._key is not None:
            account_id = account_of_key(self._key.id)
            transaction.stored_bytes.add(account_id, StoredKind.ROUNDS, _stored_size(ended), refuses=False)
            await transaction.stored_bytes.add_calls(account_id, ended.id)


def _stored_size(ended: Round) -> int:
    """Return what a round takes: its texts are in its row and in its events."""
    texts = size_of(ended.answer, ended.code, ended.output, ended.error)
    return ROW_BYTES + 2 * (texts + size_of(json.dumps(ended.calls or [])))


def chat_entry(settings: Settings, request: LLMRequest, *, kind: str, prompt_tokens: int) -> NewSpending:
    """Return the entry of a request that is on the account of its chat, and of no round.

    Args:
        request: names a chat and a model group.
        kind: begins the id of the entry.
        prompt_tokens: tokens of the request.
    """
    group = group_or_default(settings, request.group)
    answer_tokens = settings.agent.answer_tokens
    return NewSpending(
        id=f"{kind}:{new_id()}",
        day=day_of(shared_time()),
        chat_key=request.chat_key,
        use=expected_use(group, prompt_tokens=prompt_tokens, answer_tokens=answer_tokens),
    )


async def ask_admitted(meter: Meter, client: LLMClient, request: LLMRequest) -> LLMAnswer:
    """Send a request that its meter has admitted, and count it.

    Raises:
        LLMError: as from the client.
    """
    try:
        answer = await client.complete(replace(request, on_spent=meter.spent))
        meter.answered(answer)
    finally:
        await complete(meter.settle_alone())
    return answer


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
        entry = chat_entry(self._settings, request, kind="summary", prompt_tokens=prompt_tokens)
        is_known = self._is_refused(entry)
        meter = self._spending.meter(entry)
        try:
            await meter.admit(is_logged=False)
        except BudgetExceededError as exc:
            if not is_known:
                self._refused.add(request.chat_key)
                logger.bind(chat_key=request.chat_key, error=str(exc)).warning("summary_over_budget")
            raise
        return await ask_admitted(meter, client, request)

    def _is_refused(self, entry: NewSpending) -> bool:
        if self._refused_on != entry.day:
            self._refused_on = entry.day
            self._refused.clear()
        return entry.chat_key in self._refused


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
        meter = self._spending.meter(entry, key=key, plugin_tokens=payer.tokens_per_day)
        await meter.admit(always=True)
        return _Charge(meter, group)


class _Charge:
    """Implements ``nekro_agent.ports.ModelCharge``."""

    def __init__(self, meter: Meter, group: ModelGroup) -> None:
        self._meter, self._group = meter, group

    async def settle(
        self, *, prompt_tokens: int, answer_tokens: int, cached_tokens: int = 0, is_estimated: bool = False
    ) -> None:
        """See ``ModelCharge``."""
        use = replace(
            self._meter.entry.use,
            requests=1,
            estimated_requests=int(is_estimated),
            prompt_tokens=prompt_tokens,
            completion_tokens=answer_tokens,
            cost=price_of(self._group, prompt_tokens, answer_tokens, cached_tokens),
        )
        self._meter.add(use)
        await self._meter.settle_alone()


def _address(model: str, base_url: str | None) -> tuple[str, str]:
    return model, (base_url or "").rstrip("/")
