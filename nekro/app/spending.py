"""Counts what is spent, refuses what exceeds a budget, and warns chats.

Each piece of work has a ``Meter``. If a limit of the settings, of the key that pays or of the plugin applies
to it, the work is admitted in one transaction: the totals of all scopes grow by the estimate, and if one had
reached its limit before, everything is undone. Totals count the estimates of running work, so however many
rounds begin at once, of those that the limit does not permit none is admitted, and a budget is exceeded at
most by what was in flight. An estimate of a worker that died stays: what it asked for was probably spent.

Without a limit nothing is written before the work has ended. Totals count what was used in any case, so a
limit that is set at noon counts the morning.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from loguru import logger

from broker_config.settings import BudgetSettings
from nekro.app.budgets import Budget, key_limits, limits_of_settings, measures_of
from nekro.app.chats.writer import append_message
from nekro.app.retried_writes import write_with_retries
from nekro.base.metrics import metrics
from nekro_agent.errors import BudgetExceededError, OutcomeUnknownError, StorageUnavailableError
from nekro_agent.ports import MessageKind
from storage.accounts.spendings import ModelUse, NewSpending, PayingKey, ScopeKey, Total
from storage.engine import Database
from storage.repositories.messages import NewMessage
from storage.states import BudgetScope
from storage.transaction import Transaction

if TYPE_CHECKING:
    from nekro.agent.llm import LLMAnswer, ModelSpent
    from nekro.app.chats.publisher import EventPublisher

__all__ = [
    "Meter",
    "Spending",
]


class Spending:
    """The one way to spend; one instance per process."""

    def __init__(self, database: Database, publisher: EventPublisher, settings: BudgetSettings) -> None:
        self._database = database
        self._publisher = publisher
        self._settings = settings
        self._limits = limits_of_settings(settings)

    async def paying_key(self, *account_ids: str | None) -> PayingKey | None:
        """Return the key of the first of these accounts that has one; None: no key pays."""
        known = [account_id for account_id in account_ids if account_id is not None]
        if not known:
            return None
        async with self._database.read() as transaction:
            return await transaction.spendings.paying_key(known)

    def meter(
        self,
        entry: NewSpending,
        *,
        key: PayingKey | None = None,
        waking_call: str | None = None,
        plugin_tokens: int | None = None,
    ) -> Meter:
        """Return the meter of a piece of work.

        Args:
            entry: with what the work is expected to use, without a key.
            key: see ``paying_key``.
            waking_call: the call whose plugin the entry names; None leaves the entry's.
            plugin_tokens: most tokens per day of the entry's plugin, which the estimate must not exceed
                either; None does not limit them.
        """
        entry = replace(entry, key_id=None if key is None else key.id)
        return Meter(self, entry, key=key, waking_call=waking_call, plugin_tokens=plugin_tokens)

    def is_limited(self, entry: NewSpending, key: PayingKey | None) -> bool:
        """Whether a scope of an entry has a limit."""
        return any(self._limits_of(one.scope, key) for one in entry.scopes)

    async def reserve(
        self,
        entry: NewSpending,
        *,
        key: PayingKey | None,
        waking_call: str | None,
        plugin_tokens: int | None,
        is_logged: bool,
    ) -> NewSpending:
        """Count the estimate of an entry; returns the entry with its plugin. For ``Meter.admit``."""
        try:
            async with self._database.begin() as transaction:
                entry = await with_plugin(transaction, entry, waking_call)
                totals = await transaction.spendings.add(entry)
                self._check(entry, totals, key, plugin_tokens)
        except _RefusedError as refused:
            raise self._refusal(refused.budget, entry, is_logged=is_logged) from None
        return entry

    async def settle_alone(self, meter: Meter, *, sandbox_seconds: float) -> None:
        """Settle in a transaction of its own; if the database does not answer, an estimate stays."""
        entry = meter.entry

        async def write(transaction: Transaction) -> None:
            if entry.chat_key is not None:
                await transaction.chats.lock(entry.chat_key, create=True)
            await meter.settle(transaction, sandbox_seconds=sandbox_seconds)

        unknown = f"spending {entry.id} may or may not be settled"
        try:
            await write_with_retries(self._database.begin, write, unknown=unknown)
        except (StorageUnavailableError, OutcomeUnknownError) as exc:
            logger.bind(error=str(exc), spending=entry.id).warning("spending_not_settled")

    async def key_budgets(self, key: PayingKey, *, day: str) -> list[Budget]:
        """Return the budgets of a key, in the order of ``MEASURES``."""
        limits = key_limits(self._settings, key)
        if not limits:
            return []
        named = ScopeKey.of(BudgetScope.KEY, key.id, day=day)
        async with self._database.read() as transaction:
            total = next(iter(await transaction.spendings.totals([named])), named)
        return [Budget.of(total, measure, limit) for measure, limit in measures_of(limits)]

    def _check(
        self,
        entry: NewSpending,
        totals: Sequence[Total],
        key: PayingKey | None,
        plugin_tokens: int | None,
    ) -> None:
        for budget in self._budgets(totals, key):
            before = replace(budget, used=budget.used - entry.amounts.of(budget.measure))
            if before.is_exhausted:
                raise _RefusedError(before)
        if plugin_tokens is None:
            return
        for total in totals:
            if total.scope == BudgetScope.PLUGIN and total.tokens > plugin_tokens:
                raise _RefusedError(Budget.of(total, "tokens", plugin_tokens))

    def _budgets(self, totals: Sequence[Total], key: PayingKey | None) -> list[Budget]:
        return [
            Budget.of(total, measure, limit)
            for total in totals
            for measure, limit in measures_of(self._limits_of(total.scope, key))
        ]

    def _limits_of(self, scope: str, key: PayingKey | None) -> Mapping[str, float]:
        if scope == BudgetScope.KEY:
            return key_limits(self._settings, key)
        return self._limits.get(BudgetScope(scope), {})

    def _refusal(self, budget: Budget, entry: NewSpending, *, is_logged: bool) -> BudgetExceededError:
        metrics().budget_refusals.labels(budget.scope, budget.measure).inc()
        if is_logged:
            logger.bind(
                scope=budget.scope,
                scope_id=budget.id,
                measure=budget.measure,
                used=budget.used,
                limit=budget.limit,
                chat_key=entry.chat_key,
                turn_id=entry.turn_id,
            ).warning("budget_exhausted")
        if budget.scope == BudgetScope.PLUGIN:
            return BudgetExceededError(
                f"the request needs about {entry.amounts.tokens} tokens, more than are left of the "
                f"{budget.limit:.0f} that its declaration allows per day"
            )
        return BudgetExceededError(budget.used_up)

    async def warn(
        self,
        transaction: Transaction,
        totals: Sequence[Total],
        key: PayingKey | None,
        chat_key: str,
        *,
        turn_goes_on: bool,
    ) -> None:
        """Warn a chat of budgets that are nearly used up; the transaction has locked the chat.

        Args:
            turn_goes_on: whether it is warned of the budget of the turn too.
        """
        if self._settings.warn_at >= 1:
            return
        for total in totals:
            if total.scope == BudgetScope.TURN and not turn_goes_on:
                continue
            known = total.warned.split(",") if total.warned else []
            near = [
                budget
                for budget in self._budgets([total], key)
                if budget.share >= self._settings.warn_at and budget.measure not in known
            ]
            warned = ",".join([*known, *(budget.measure for budget in near)])
            if near and await transaction.spendings.warn(total, warned):
                await self._send_warning(transaction, near, chat_key)

    async def _send_warning(self, transaction: Transaction, near: Sequence[Budget], chat_key: str) -> None:
        text = "\n".join(budget.warning for budget in near)
        message = NewMessage(chat_key=chat_key, kind=MessageKind.ASSISTANT, text=text)
        await append_message(transaction, self._publisher, message)

        async def note() -> None:
            for budget in near:
                metrics().budget_warnings.labels(budget.scope, budget.measure).inc()
                logger.bind(
                    scope=budget.scope,
                    scope_id=budget.id,
                    measure=budget.measure,
                    used=budget.used,
                    limit=budget.limit,
                ).warning("budget_nearly_used_up")

        transaction.after_commit(note)


class _RefusedError(Exception):
    """Undoes a reservation; never leaves this module."""

    def __init__(self, budget: Budget) -> None:
        super().__init__(budget.used_up)
        self.budget = budget


class Meter:
    """What one piece of work spends: admitted before it begins, settled once when it has ended."""

    def __init__(
        self,
        spending: Spending,
        entry: NewSpending,
        *,
        key: PayingKey | None,
        waking_call: str | None,
        plugin_tokens: int | None,
    ) -> None:
        """Create it; see ``Spending.meter``."""
        self.entry = entry
        #: Whether the estimate is counted.
        self.is_estimated = False
        self._spending = spending
        self._key = key
        self._waking_call = waking_call
        self._plugin_tokens = plugin_tokens
        self._uses: dict[tuple[str, str], ModelUse] = {}

    async def admit(self, *, always: bool = False, is_logged: bool = True) -> None:
        """Count what is expected to be used, if something limits it.

        Args:
            always: count it in any case, because work that is abandoned is not settled.
            is_logged: whether a refusal is logged here; metrics count it in any case.

        Raises:
            BudgetExceededError: a budget is used up; nothing was counted.
            StorageUnavailableError: the database does not answer.
        """
        is_limited = self._plugin_tokens is not None or self._spending.is_limited(self.entry, self._key)
        if not is_limited and not always:
            return
        self.entry = await self._spending.reserve(
            self.entry,
            key=self._key,
            waking_call=self._waking_call,
            plugin_tokens=self._plugin_tokens,
            is_logged=is_logged,
        )
        self.is_estimated = True

    @property
    def has_uses(self) -> bool:
        """Whether a request to a model is known."""
        return bool(self._uses)

    def spent(self, spent: ModelSpent) -> None:
        """Count one request to a model."""
        self.add(
            ModelUse(
                group=spent.group,
                model=spent.model,
                requests=1,
                estimated_requests=int(spent.is_estimated),
                prompt_tokens=spent.prompt_tokens,
                completion_tokens=spent.answer_tokens,
                cost=spent.cost,
            )
        )

    def answered(self, llm: LLMAnswer) -> None:
        """Count the figures of an answer whose client did not report its requests."""
        if not self._uses:
            self.add(
                ModelUse(
                    group=llm.group,
                    model=llm.model,
                    requests=llm.tries,
                    estimated_requests=int(llm.is_estimated),
                    prompt_tokens=llm.prompt_tokens or 0,
                    completion_tokens=llm.answer_tokens or 0,
                    cost=llm.cost,
                )
            )

    def add(self, use: ModelUse) -> None:
        """Add what requests to a model used."""
        known = self._uses.get((use.group, use.model), ModelUse(group=use.group, model=use.model))
        self._uses[use.group, use.model] = replace(
            known,
            requests=known.requests + use.requests,
            estimated_requests=known.estimated_requests + use.estimated_requests,
            prompt_tokens=known.prompt_tokens + use.prompt_tokens,
            completion_tokens=known.completion_tokens + use.completion_tokens,
            cost=known.cost + use.cost,
        )

    async def settle(
        self, transaction: Transaction, *, sandbox_seconds: float, turn_goes_on: bool = False
    ) -> None:
        """Count what was used instead of an estimate, and warn the chat of budgets; idempotent.

        The transaction has locked the chat, or writes to no chat.

        Args:
            turn_goes_on: whether the chat is warned of the budget of the turn too.
        """
        entry, uses = self.entry, list(self._uses.values())
        if self.is_estimated:
            totals = await transaction.spendings.settle(
                entry.id, uses, sandbox_seconds=sandbox_seconds, is_of_plugin=entry.is_of_plugin
            )
        else:
            entry = await with_plugin(transaction, entry, self._waking_call)
            totals = await transaction.spendings.enter(entry, uses, sandbox_seconds=sandbox_seconds)
        if entry.chat_key is not None:
            await self._spending.warn(
                transaction, totals, self._key, entry.chat_key, turn_goes_on=turn_goes_on
            )

        async def count() -> None:
            _count(uses, sandbox_seconds)

        transaction.after_commit(count)

    async def settle_alone(self, *, sandbox_seconds: float = 0.0) -> None:
        """Settle in a transaction of its own; if the database does not answer, an estimate stays."""
        await self._spending.settle_alone(self, sandbox_seconds=sandbox_seconds)


async def with_plugin(transaction: Transaction, entry: NewSpending, call_id: str | None) -> NewSpending:
    """Return an entry that names the plugin of a call; None leaves it as it is."""
    if call_id is None:
        return entry
    return replace(entry, plugin_key=await transaction.spendings.plugin_of_call(call_id))


def _count(uses: Sequence[ModelUse], sandbox_seconds: float) -> None:
    figures = metrics()
    for use in uses:
        figures.model_requests.labels(use.group, use.model).inc(use.requests)
        figures.model_tokens.labels(use.group, use.model, "prompt").inc(use.prompt_tokens)
        figures.model_tokens.labels(use.group, use.model, "answer").inc(use.completion_tokens)
        figures.model_cost.labels(use.group, use.model).inc(use.cost)
    if sandbox_seconds:
        figures.sandbox_seconds.inc(sandbox_seconds)
