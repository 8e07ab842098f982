"""What rounds and plugins spend: one entry per attempt or request, and totals per scope and period.

The entry of work that a budget limits is added with an estimate before it begins, and settled with what was
used; other entries are added when the work has ended. Totals change in the same transaction by the same
amounts, so a check reads a few rows by key, however much was spent. The rows of totals are written in one
order everywhere, so transactions that share some do not lock each other out; a transaction that also writes
to a chat locks the chat first.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import Executable, bindparam, func, or_, select, tuple_, update

from storage.driver.statements import FixedStatement
from storage.repositories.base import Repository
from storage.sql import insert, now
from storage.states import BudgetScope, key_of_account
from storage.tables import API_KEYS, CALLS, KEY_TURNS, SPENDING_TOTALS, SPENDINGS

if TYPE_CHECKING:
    from storage.repositories.round_values import Round

__all__ = [
    "Amounts",
    "ModelUse",
    "NewSpending",
    "PayingKey",
    "ScopeKey",
    "SpendingRepository",
    "Total",
    "plugin_of",
    "user_scope",
]

#: Longest id of a person in a scope; a longer one is shortened and made unique by its digest.
_USER_CHARS: Final = 200


def user_scope(adapter_key: str | None, user_id: str | None) -> str | None:
    """Return the scope that counts a person's spending; None for no person."""
    if not user_id:
        return None
    name = f"{adapter_key}:{user_id}" if adapter_key else user_id
    if len(name) <= _USER_CHARS:
        return name
    digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()
    return f"{name[: _USER_CHARS // 2]}…{digest}"


def plugin_of(method: str) -> str | None:
    """Return the key of a method's plugin; None for a method without one."""
    return method.rpartition(".")[0] or None


@dataclass(frozen=True, kw_only=True)
class Amounts:
    """What was used, or a difference of it."""

    tokens: int = 0
    cost: float = 0.0
    rounds: int = 0
    sandbox_seconds: float = 0.0
    estimated_requests: int = 0

    def of(self, measure: str) -> float:
        """Return one measure."""
        return float(getattr(self, measure))

    def __sub__(self, other: Amounts) -> Amounts:
        return Amounts(
            tokens=self.tokens - other.tokens,
            cost=self.cost - other.cost,
            rounds=self.rounds - other.rounds,
            sandbox_seconds=self.sandbox_seconds - other.sandbox_seconds,
            estimated_requests=self.estimated_requests - other.estimated_requests,
        )


@dataclass(frozen=True, kw_only=True)
class ModelUse:
    """What requests to one model used; ``cost`` is in the currency of the prices in the settings."""

    group: str = ""
    model: str = ""
    requests: int = 0
    #: Requests whose tokens and cost are an estimate.
    estimated_requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost: float = 0.0


@dataclass(frozen=True, kw_only=True)
class NewSpending:
    """An entry to add, with what it is expected to use; None where there is no such scope."""

    #: A second one with the same id changes nothing.
    id: str
    #: ISO date (UTC).
    day: str
    chat_key: str | None = None
    #: See ``user_scope``.
    user_id: str | None = None
    key_id: str | None = None
    turn_id: str | None = None
    plugin_key: str | None = None
    #: Whether the plugin's own total counts it: it asked the model itself.
    is_of_plugin: bool = False
    rounds: int = 0
    sandbox_seconds: float = 0.0
    #: What the model is expected to use; its ``requests`` are counted only when they are sent.
    use: ModelUse = ModelUse()

    @property
    def amounts(self) -> Amounts:
        """What the totals count."""
        return Amounts(
            tokens=self.use.prompt_tokens + self.use.completion_tokens,
            cost=self.use.cost,
            rounds=self.rounds,
            sandbox_seconds=self.sandbox_seconds,
            estimated_requests=self.use.estimated_requests,
        )

    @property
    def scopes(self) -> list[ScopeKey]:
        """The totals that count it."""
        named = {
            BudgetScope.TURN: self.turn_id,
            BudgetScope.CHAT: self.chat_key,
            BudgetScope.USER: self.user_id,
            BudgetScope.KEY: self.key_id,
            BudgetScope.PLUGIN: self.plugin_key if self.is_of_plugin else None,
        }
        keys = [ScopeKey.of(scope, name, day=self.day) for scope, name in named.items() if name]
        return [*keys, ScopeKey.of(BudgetScope.DAY, "", day=self.day)]


@dataclass(frozen=True, kw_only=True, order=True)
class ScopeKey:
    """Names one total."""

    scope: str
    #: ISO date (UTC); "" for a turn.
    period: str
    id: str

    @classmethod
    def of(cls, scope: BudgetScope, name: str, *, day: str) -> ScopeKey:
        """Return the key of a scope on a day."""
        return cls(scope=scope.value, period="" if scope is BudgetScope.TURN else day, id=name)


@dataclass(frozen=True, kw_only=True)
class Total:
    """One total, estimates of running work included."""

    scope: str
    period: str
    id: str
    tokens: int
    cost: float
    rounds: int
    sandbox_seconds: float
    #: Requests with estimated tokens and cost; running requests are among them.
    estimated_requests: int
    #: Measures that a chat was warned about, comma-separated.
    warned: str
    updated_at: datetime


@dataclass(frozen=True, kw_only=True)
class PayingKey:
    """The key of the API that started a turn, and its own limits per day; None: no limit of its own."""

    id: str
    cost_per_day: float | None
    tokens_per_day: int | None


@dataclass(frozen=True, kw_only=True)
class _Entry:
    id: str
    part: int
    day: str
    chat_key: str | None
    user_id: str | None
    key_id: str | None
    turn_id: str | None
    plugin_key: str | None
    rounds: int
    requests: int
    estimated_requests: int
    prompt_tokens: int
    completion_tokens: int
    cost: float
    sandbox_seconds: float
    settled_at: datetime | None


class SpendingRepository(Repository):
    """Entries and totals."""

    async def paying_key(self, account_ids: Sequence[str]) -> PayingKey | None:
        """Return the key of the first of these accounts that has one; None: no key pays."""
        values = {f"turn_{number}": account_id for number, account_id in enumerate(account_ids)}
        rows = await self._rows(_paying_key_statement(len(account_ids)), values)
        found = {row[0]: row[1:] for row in rows}
        for account_id in account_ids:
            named = key_of_account(account_id)
            if named is not None:
                for row in await self._rows(_key_statement, {"of_key": named}):
                    found[account_id] = row
            if account_id in found:
                key_id, cost, tokens = found[account_id]
                return PayingKey(id=key_id, cost_per_day=cost, tokens_per_day=tokens)
        return None

    async def key_of_rounds(self, rounds: Sequence[Round]) -> PayingKey | None:
        """Return the key of the first of these rounds that has one; None: no key pays."""
        if any(one.key_id is None for one in rounds):
            return await self.paying_key(list(dict.fromkeys(one.turn_id for one in rounds)))
        key_id = next((one.key_id for one in rounds if one.key_id), None)
        if key_id is None:
            return None
        return await self._one_or_none(PayingKey, _key_statement, {"of_key": key_id})

    async def plugin_of_call(self, call_id: str) -> str | None:
        """Return the plugin whose method a call named; None without a row of the call."""
        method = await self._scalar(_method_statement, {"of_call": call_id})
        return None if method is None else plugin_of(method)

    async def add(self, new: NewSpending) -> list[Total]:
        """Add an entry and count its estimate; returns the totals of its scopes, with it."""
        estimate = replace(new.use, requests=0)
        values = _values_of(new, 0, estimate, rounds=new.rounds, sandbox_seconds=new.sandbox_seconds)
        is_new = await self._scalar(_add_statement, values) is not None
        return await self._count_amounts(new.scopes, new.amounts if is_new else Amounts())

    async def enter(
        self, new: NewSpending, uses: Sequence[ModelUse], *, sandbox_seconds: float
    ) -> list[Total]:
        """Add an entry that was not estimated, with what was used; idempotent. Returns as ``settle``."""
        is_new = True
        for number, use in enumerate(uses or [ModelUse()]):
            rounds, seconds = (new.rounds, sandbox_seconds) if number == 0 else (0, 0.0)
            values = _values_of(new, number, use, rounds=rounds, sandbox_seconds=seconds)
            is_new = await self._scalar(_enter_statement, values) is not None and is_new
        used = _used(uses, rounds=new.rounds, sandbox_seconds=sandbox_seconds)
        return await self._count_amounts(new.scopes, used if is_new else Amounts())

    async def settle(
        self,
        entry_id: str,
        uses: Sequence[ModelUse],
        *,
        sandbox_seconds: float | None,
        is_of_plugin: bool = False,
    ) -> list[Total]:
        """Replace the estimate of an entry; idempotent. Returns the totals of its scopes.

        Args:
            uses: what was used, by model; each model once.
            sandbox_seconds: None: the estimate stays.
            is_of_plugin: as in the entry.
        """
        parts = await self._all(_Entry, _parts_statement, {"of_entry": entry_id})
        if not parts:
            return []  # deleted because of its age
        first = parts[0]
        before = Amounts(
            tokens=sum(part.prompt_tokens + part.completion_tokens for part in parts),
            cost=sum(part.cost for part in parts),
            rounds=first.rounds,
            sandbox_seconds=first.sandbox_seconds,
            estimated_requests=sum(part.estimated_requests for part in parts),
        )
        entry = NewSpending(**{name: getattr(first, name) for name in _NAMES}, is_of_plugin=is_of_plugin)
        most_seconds = first.sandbox_seconds if sandbox_seconds is None else sandbox_seconds
        for number, use in enumerate(uses or [ModelUse()]):
            rounds, seconds = (first.rounds, most_seconds) if number == 0 else (0, 0.0)
            values = _values_of(entry, number, use, rounds=rounds, sandbox_seconds=seconds)
            await self._rows(_settle_statement, values)
        after = _used(uses, rounds=first.rounds, sandbox_seconds=most_seconds)
        return await self._count_amounts(entry.scopes, after - before)

    async def settle_interrupted(self, new: NewSpending, use: ModelUse) -> list[Total]:
        """Count what an attempt used whose worker died after the answer; an estimate of its time stays.

        Args:
            new: its entry, if its worker added none, with the longest time of its code.

        Returns:
            As ``settle``; nothing if its worker had settled it.
        """
        parts = await self._all(_Entry, _parts_statement, {"of_entry": new.id})
        if not parts:
            return await self.enter(new, [use], sandbox_seconds=new.sandbox_seconds)
        return [] if parts[0].settled_at else await self.settle(new.id, [use], sandbox_seconds=None)

    async def totals(self, keys: Sequence[ScopeKey]) -> list[Total]:
        """Return the totals of these keys; one that nothing was spent for is missing."""
        wanted = [(key.scope, key.period, key.id) for key in keys]
        columns = (SPENDING_TOTALS.c.scope, SPENDING_TOTALS.c.period, SPENDING_TOTALS.c.id)
        return await self._all(Total, select(SPENDING_TOTALS).where(tuple_(*columns).in_(wanted)))

    async def warn(self, total: Total, warned: str) -> bool:
        """Record the measures that a chat was warned about; False if another process did so meanwhile."""
        statement = (
            update(SPENDING_TOTALS)
            .where(
                SPENDING_TOTALS.c.scope == total.scope,
                SPENDING_TOTALS.c.period == total.period,
                SPENDING_TOTALS.c.id == total.id,
                SPENDING_TOTALS.c.warned == total.warned,
            )
            .values(warned=warned)
        )
        return await self._count(statement) > 0

    async def most_used(
        self, scope: BudgetScope, measure: str, *, period: str, least: float, limit: int
    ) -> list[Total]:
        """List the totals of a scope with the largest of one measure, the largest first.

        Args:
            period: ISO date; for turns the date of the last spending.
            least: only those that used as much.
        """
        column = SPENDING_TOTALS.c[measure]
        statement = select(SPENDING_TOTALS).where(SPENDING_TOTALS.c.scope == scope.value, column >= least)
        if scope is BudgetScope.TURN:
            statement = statement.where(
                SPENDING_TOTALS.c.updated_at >= datetime.fromisoformat(f"{period}T00:00:00+00:00")
            )
        else:
            statement = statement.where(SPENDING_TOTALS.c.period == period)
        return await self._all(Total, statement.order_by(column.desc(), SPENDING_TOTALS.c.id).limit(limit))

    async def exhausted(self, scope: BudgetScope, limits: Mapping[str, float], *, period: str) -> int:
        """Count the totals of a day that have reached one of the limits of their scope."""
        reached = [SPENDING_TOTALS.c[name] >= limit for name, limit in limits.items()]
        statement = select(func.count()).where(
            SPENDING_TOTALS.c.scope == scope.value, SPENDING_TOTALS.c.period == period, or_(*reached)
        )
        return int(await self._scalar(statement))

    async def _count_amounts(self, keys: Sequence[ScopeKey], amounts: Amounts) -> list[Total]:
        values: dict[str, Any] = {"new_" + name: value for name, value in vars(amounts).items()}
        for number, key in enumerate(sorted(keys)):
            values |= {f"{name}_{number}": value for name, value in vars(key).items()}
        return await self._all(Total, _count_statement(len(keys)), values)


_NAMES: Final = ("id", "day", "chat_key", "user_id", "key_id", "turn_id", "plugin_key")
#: What an entry states of a model's use.
_FIGURES: Final = (
    "model_group", "model", "rounds", "requests", "estimated_requests", "prompt_tokens",
    "completion_tokens", "cost", "sandbox_seconds",
)  # fmt: skip
_AMOUNTS: Final = tuple(field.name for field in dataclasses.fields(Amounts))


def _values_of(
    entry: NewSpending, part: int, use: ModelUse, *, rounds: int, sandbox_seconds: float
) -> dict[str, Any]:
    """Return the row of a model's use."""
    return {
        **{name: getattr(entry, name) for name in _NAMES},
        "part": part,
        "model_group": use.group,
        "model": use.model,
        "rounds": rounds,
        "requests": use.requests,
        "estimated_requests": use.estimated_requests,
        "prompt_tokens": use.prompt_tokens,
        "completion_tokens": use.completion_tokens,
        "cost": use.cost,
        "sandbox_seconds": sandbox_seconds,
    }


def _used(uses: Sequence[ModelUse], *, rounds: int, sandbox_seconds: float) -> Amounts:
    return Amounts(
        tokens=sum(use.prompt_tokens + use.completion_tokens for use in uses),
        cost=sum(use.cost for use in uses),
        rounds=rounds,
        sandbox_seconds=sandbox_seconds,
        estimated_requests=sum(use.estimated_requests for use in uses),
    )


def _entry_values() -> dict[str, Any]:
    given: dict[str, Any] = {name: bindparam(name) for name in (*_NAMES, "part", *_FIGURES)}
    return {**given, "created_at": now()}


@FixedStatement
def _add_statement(dialect: str) -> Executable:
    new = insert(dialect, SPENDINGS).values(_entry_values())
    return new.on_conflict_do_nothing().returning(SPENDINGS.c.id)


@FixedStatement
def _enter_statement(dialect: str) -> Executable:
    new = insert(dialect, SPENDINGS).values({**_entry_values(), "settled_at": now()})
    return new.on_conflict_do_nothing().returning(SPENDINGS.c.id)


@FixedStatement
def _settle_statement(dialect: str) -> Executable:
    new = insert(dialect, SPENDINGS).values({**_entry_values(), "settled_at": now()})
    return new.on_conflict_do_update(
        index_elements=[SPENDINGS.c.id, SPENDINGS.c.part],
        set_={**{name: new.excluded[name] for name in _FIGURES}, "settled_at": new.excluded.settled_at},
    )


@cache
def _paying_key_statement(turns: int) -> FixedStatement:
    """Select the keys of so many accounts; nearly always one, more when triggers were merged."""
    wanted = [bindparam(f"turn_{number}", type_=KEY_TURNS.c.turn_id.type) for number in range(turns)]
    statement = (
        select(KEY_TURNS.c.turn_id, API_KEYS.c.id, API_KEYS.c.cost_per_day, API_KEYS.c.tokens_per_day)
        .join(API_KEYS, API_KEYS.c.id == KEY_TURNS.c.key_id)
        .where(KEY_TURNS.c.turn_id.in_(wanted))
    )
    return FixedStatement(lambda _dialect: statement)


@FixedStatement
def _key_statement(_dialect: str) -> Executable:
    columns = (API_KEYS.c.id, API_KEYS.c.cost_per_day, API_KEYS.c.tokens_per_day)
    return select(*columns).where(API_KEYS.c.id == bindparam("of_key"))


@FixedStatement
def _method_statement(_dialect: str) -> Executable:
    return select(CALLS.c.method).where(CALLS.c.id == bindparam("of_call"))


@FixedStatement
def _parts_statement(_dialect: str) -> Executable:
    statement = select(SPENDINGS).where(SPENDINGS.c.id == bindparam("of_entry"))
    return statement.order_by(SPENDINGS.c.part).with_for_update()


@cache
def _count_statement(count: int) -> FixedStatement:
    """Add the same amounts to several totals, which are locked in the order of the values."""

    def build(dialect: str) -> Executable:
        rows = [
            {
                **{name: bindparam(f"{name}_{number}") for name in ("scope", "period", "id")},
                **{name: bindparam(f"new_{name}", type_=SPENDING_TOTALS.c[name].type) for name in _AMOUNTS},
                "warned": "",
                "updated_at": now(),
            }
            for number in range(count)
        ]
        new = insert(dialect, SPENDING_TOTALS).values(rows)
        added = {name: SPENDING_TOTALS.c[name] + new.excluded[name] for name in _AMOUNTS}
        keys = [SPENDING_TOTALS.c.scope, SPENDING_TOTALS.c.period, SPENDING_TOTALS.c.id]
        return new.on_conflict_do_update(
            index_elements=keys, set_={**added, "updated_at": new.excluded.updated_at}
        ).returning(SPENDING_TOTALS)

    return FixedStatement(build)
