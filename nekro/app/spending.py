"""Counts what is spent, also by code outside of rounds, refuses what exceeds a budget, and warns chats.

A reservation is one transaction: the totals of all scopes grow by the estimate, and if one had reached its
limit before, everything is undone. Totals count the estimates of running work, so however many rounds begin
at once, of those that the limit does not permit none is admitted, and a budget is exceeded at most by what
was in flight. An estimate of a worker that died stays: what it asked for was probably spent."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from loguru import logger

from broker_config.settings import BudgetSettings
from nekro.app.budgets import Budget, day_of, key_limits, limits_of_settings, measures_of
from nekro.app.chats.publisher import EventPublisher
from nekro.app.chats.writer import append_message
from nekro.app.retried_writes import write_with_retries
from nekro.base.metrics import metrics
from nekro.base.tasks import complete
from nekro_agent.errors import BudgetExceededError, OutcomeUnknownError, SandboxError, StorageUnavailableError
from nekro_agent.ports import ChatInfo, MessageKind
from nekro_agent.shared_clock import shared_time
from storage.accounts.spendings import ModelUse, NewSpending, PayingKey, ScopeKey, Total, user_scope
from storage.engine import Database
from storage.repositories.messages import NewMessage
from storage.states import BudgetScope
from storage.transaction import Transaction

__all__ = [
    "Reservation",
    "RunMeter",
    "RunTime",
    "Spending",
]


@dataclass(frozen=True, kw_only=True)
class Reservation:
    """An entry that was admitted, and the key whose limits apply to it."""

    entry: NewSpending
    key: PayingKey | None


class Spending:
    """The one way to spend; one instance per process."""

    def __init__(self, database: Database, publisher: EventPublisher, settings: BudgetSettings) -> None:
        self._database = database
        self._publisher = publisher
        self._settings = settings
        self._limits = limits_of_settings(settings)

    async def paying_key(self, *account_ids: str | None) -> PayingKey | None:
        """Return the key that pays for the first of these accounts for which one pays; None: no key does."""
        known = [account_id for account_id in account_ids if account_id is not None]
        if not known:
            return None
        async with self._database.read() as transaction:
            return await transaction.spendings.paying_key(known)

    async def reserve(
        self,
        entry: NewSpending,
        *,
        key: PayingKey | None = None,
        waking_call: str | None = None,
        plugin_tokens: int | None = None,
        is_logged: bool = True,
    ) -> Reservation:
        """Count what is expected to be used.

        Args:
            entry: without a key.
            key: as of ``paying_key``.
            waking_call: the call whose plugin the entry names; None leaves the entry's.
            plugin_tokens: most tokens per day of the entry's plugin, which the estimate must not exceed
                either; None does not limit them.
            is_logged: whether a refusal is logged here; metrics count it in any case.

        Raises:
            BudgetExceededError: a budget is used up; nothing was counted.
            StorageUnavailableError: the database does not answer.
        """
        entry = replace(entry, key_id=None if key is None else key.id)
        try:
            async with self._database.begin() as transaction:
                if waking_call is not None:
                    plugin_key = await transaction.spendings.plugin_of_call(waking_call)
                    entry = replace(entry, plugin_key=plugin_key)
                totals = await transaction.spendings.add(entry)
                self._check(entry, totals, key, plugin_tokens)
        except _RefusedError as refused:
            raise self._refusal(refused.budget, entry, is_logged=is_logged) from None
        return Reservation(entry=entry, key=key)

    async def settle(
        self,
        transaction: Transaction,
        reservation: Reservation,
        uses: Sequence[ModelUse],
        *,
        sandbox_seconds: float | None,
        is_last: bool,
        turn_goes_on: bool = False,
        settled_uses: Sequence[ModelUse] | None = None,
    ) -> None:
        """Replace the estimate, and warn the chat of budgets that are nearly used up; idempotent.

        The transaction has locked the chat, or writes to no chat.

        Args:
            sandbox_seconds: None: the estimate stays.
            is_last: nothing more will be used; metrics count it now.
            turn_goes_on: whether the chat is warned of the budget of the turn too.
            settled_uses: of an earlier settlement with the estimate of the sandbox's time; None without one.
        """
        entry, totals = reservation.entry, None
        if sandbox_seconds is not None and settled_uses == uses:
            totals = await transaction.spendings.settle_sandbox(entry, seconds=sandbox_seconds)
        if totals is None:
            totals = await transaction.spendings.settle(
                entry.id, uses, sandbox_seconds=sandbox_seconds, is_of_plugin=entry.is_of_plugin
            )
        if entry.chat_key is not None:
            warned_of = [total for total in totals if turn_goes_on or total.scope != BudgetScope.TURN]
            await self._warn(transaction, warned_of, reservation.key, entry.chat_key)
        if is_last:

            async def count() -> None:
                _count(uses, sandbox_seconds or 0.0)

            transaction.after_commit(count)

    async def settle_with_retries(
        self, reservation: Reservation, uses: Sequence[ModelUse], *, sandbox_seconds: float | None = None
    ) -> None:
        """Settle in a transaction of its own; if the database does not answer, the estimate stays."""
        entry = reservation.entry

        async def write(transaction: Transaction) -> None:
            if entry.chat_key is not None:
                await transaction.chats.lock(entry.chat_key, create=True)
            await self.settle(transaction, reservation, uses, sandbox_seconds=sandbox_seconds, is_last=True)

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

    async def _warn(
        self, transaction: Transaction, totals: Sequence[Total], key: PayingKey | None, chat_key: str
    ) -> None:
        if self._settings.warn_at >= 1:
            return
        for total in totals:
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


def _count(uses: Sequence[ModelUse], sandbox_seconds: float) -> None:
    figures = metrics()
    for use in uses:
        figures.model_requests.labels(use.group, use.model).inc(use.requests)
        figures.model_tokens.labels(use.group, use.model, "prompt").inc(use.prompt_tokens)
        figures.model_tokens.labels(use.group, use.model, "answer").inc(use.completion_tokens)
        figures.model_cost.labels(use.group, use.model).inc(use.cost)
    if sandbox_seconds:
        figures.sandbox_seconds.inc(sandbox_seconds)


@dataclass(kw_only=True)
class RunTime:
    """How long code ran; None: it was stopped before that was known."""

    seconds: float | None = None


class RunMeter:
    """Counts runs of code; one instance per process.

    Args:
        wall_seconds: longest run.
    """

    def __init__(self, spending: Spending, *, wall_seconds: float) -> None:
        self._spending = spending
        self._wall_seconds = wall_seconds

    @asynccontextmanager
    async def running(self, run_id: str, *, chat: ChatInfo, user_id: str | None) -> AsyncIterator[RunTime]:
        """Count the time of the block, which runs code and sets ``seconds``; the key that started it pays.

        Raises:
            BudgetExceededError: a budget is used up; nothing runs.
        """
        entry = NewSpending(
            id=f"run:{run_id}",
            day=day_of(shared_time()),
            chat_key=chat.chat_key,
            user_id=user_scope(chat.adapter_key, user_id),
            sandbox_seconds=self._wall_seconds,
        )
        key = await self._spending.paying_key(run_id)
        reservation = await self._spending.reserve(entry, key=key)
        began = time.monotonic()
        measured = RunTime()
        try:
            yield measured
        except SandboxError:
            measured.seconds = 0.0  # it did not run
            raise
        finally:
            seconds = time.monotonic() - began if measured.seconds is None else measured.seconds
            await complete(self._spending.settle_with_retries(reservation, [], sandbox_seconds=seconds))
