"""What one attempt at a round spends: reserved before the model is asked, settled with the round's row."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence

from broker_config.model_groups import ModelGroup, group_or_default
from broker_config.settings import Settings
from nekro.agent.llm import LLMAnswer, ModelSpent
from nekro.agent.rounds import RoundAnswer
from nekro.app.budgets.limits import day_of
from nekro.app.budgets.model_uses import ModelUses, expected_use
from nekro.app.budgets.spending import Reservation, Spending
from nekro.sandbox.models import RunResult
from nekro_agent.ports import ChatInfo
from nekro_agent.shared_clock import shared_time
from storage.access.keys import account_of_key
from storage.access.spendings import ModelUse, NewSpending, PayingKey, plugin_of, user_scope
from storage.access.stored_bytes import ROW_BYTES, size_of
from storage.repositories.rounds import ClaimedRound, Round
from storage.states import StoredKind, TriggerKind
from storage.transaction import Transaction

__all__ = ["RoundBudgets", "RoundMeter"]


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
