"""Rounds of the LLM: one per trigger, in order per chat, one at a time per chat.

    REQUESTED ──claim_next──▶ RUNNING ──finish──▶ DONE | FAILED | CANCELLED
        │  ▲                     │
        │  ├──────take_over──────┤ (its worker lost the chat's lease; after the answer, if its program
        │  │                     │  can be run again)
        │  │                     ├──take_over──▶ FAILED (too many attempts), CANCELLED (requested)
        │  │                     └──take_over──▶ RUNNING (after the answer; the new holder ends it)
        │  └──split (the older one was cancelled)──┐
        ├──claim_next of an older one──▶ MERGED ───┘
        └──cancel──▶ CANCELLED

The worker that runs a chat's rounds holds the chat's lease; each of its writes carries the fencing token.

Waiting rounds start in the order of their ``fair_position``, whoever requested many of them: the first round
of a turn is placed one behind the last waiting round of its owner, which is the key that pays for it or else
its chat, but not before the first round of all. So the owners take turns, an owner without a waiting round is
next, and no round waits for ever (start-time fair queueing: Goyal, Vin and Cheng, 1996). Later rounds of a
turn are placed at the beginning.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from functools import cache
from typing import Any, Final

from sqlalchemy import (
    BindParameter,
    ColumnElement,
    Executable,
    Integer,
    ScalarSelect,
    Select,
    and_,
    bindparam,
    case,
    exists,
    func,
    literal,
    literal_column,
    or_,
    select,
    true,
    union_all,
    update,
)

from nekro_agent.errors import FencedError
from storage.driver.statements import FixedStatement
from storage.repositories.base import Repository, found, is_one_of, values_of
from storage.repositories.chats import ChatRepository
from storage.repositories.leases import is_free, is_held_by
from storage.repositories.round_values import (
    ClaimedRound,
    Round,
    RoundReport,
    RoundRequest,
    Standing,
    values_of_merged,
)
from storage.sql import insert, now, seconds_from_now, seconds_parameter
from storage.states import FINAL_ROUND_STATES, RoundState, TriggerKind, key_of_account
from storage.tables import CHATS, KEY_TURNS, ROUNDS

__all__ = ["ClaimedRound", "Round", "RoundReport", "RoundRepository", "RoundRequest", "Standing"]

_OPEN: Final = (RoundState.REQUESTED, RoundState.RUNNING)
#: A trigger requests one round.
_TRIGGER: Final = (ROUNDS.c.trigger_kind, ROUNDS.c.trigger_id)
#: Not parameters: the databases choose the plan, and the index, by them.
_EMPTY: Final[ColumnElement[str]] = literal_column("''")
_ONE: Final[ColumnElement[int]] = literal_column("1")


class RoundRepository(Repository):
    """Rows of rounds; see the module for the states."""

    async def request(self, request: RoundRequest) -> tuple[Round, bool]:
        """Request a round, once per trigger; returns it, and whether it is new.

        Raises:
            NotFoundError: the chat has no row.
        """
        await ChatRepository(self._connection).lock(request.chat_key)
        new = await self._one_or_none(Round, _request_statement, _values(request))
        if new is not None:
            return new, True
        return found(
            await self.find_by_trigger(request.trigger_kind, request.trigger_id), "round", request.id
        ), False

    async def request_during(self, request: RoundRequest, round_id: str) -> Round | None:
        """Request a round of a turn while a round of it runs, with one statement.

        Returns:
            None, and nothing was written, if that round does not run or was asked to stop, or if the trigger
            has a round.

        Raises:
            NotFoundError: the chat has no row.
        """
        await ChatRepository(self._connection).lock(request.chat_key)
        values = {"of_round": round_id, **_values(request)}
        return await self._one_or_none(Round, _request_during_statement, values)

    async def claim_next(
        self, chat_key: str, *, fence: int, worker: str, expected: str | None = None
    ) -> ClaimedRound | None:
        """Start the chat's oldest requested round and merge the later requested ones into it.

        As soon as one of them is due, all are merged, including those that are due later, because the
        prompt already shows their content. A round whose program is to be run again starts before them and
        alone: its prompt was answered. None when no round is due.

        Args:
            expected: the round that is probably the only requested one; if it is, one statement starts it.

        Raises:
            FencedError: the caller does not hold the chat's lease.
            ConflictError: a round of the chat is running (``take_over`` was not called).
        """
        await ChatRepository(self._connection).hold(chat_key, fence=fence)
        if expected is not None:
            values = {"of_chat": chat_key, "of_round": expected, "new_fence": fence, "new_worker": worker}
            only = await self._one_or_none(Round, _start_only_statement, values)
            if only is not None:
                merged = await self.merged_into(expected) if only.attempt > 1 else []
                return ClaimedRound(round=only, merged=tuple(merged))
        waiting = sorted(await self._rows(_waiting_statement, {"of_chat": chat_key}))
        waiting = [one for one in waiting if one[3]][:1] or waiting
        if not any(due for _, _, due, _ in waiting):
            return None
        ids = [round_id for _, round_id, _, _ in waiting]
        if ids[1:]:
            await self._count(update(ROUNDS).where(ROUNDS.c.id.in_(ids[1:])).values(values_of_merged(ids[0])))
        values = {"of_round": ids[0], "new_fence": fence, "new_worker": worker}
        started = found(await self._one_or_none(Round, _start_statement, values), "round", ids[0])
        # Read from the table: an earlier attempt, whose worker died, may have merged other rounds.
        may_have_merged = bool(ids[1:]) or started.attempt > 1
        merged = await self.merged_into(ids[0]) if may_have_merged else []
        return ClaimedRound(round=started, merged=tuple(merged))

    async def record(self, round_id: str, *, fence: int, report: RoundReport) -> Round:
        """Add the known data to a running round.

        Raises:
            FencedError: the round no longer runs under this lease.
        """
        at = None if report.answer is None else "answered_at"
        return await self._write(round_id, fence=fence, values=_known(report), at=at)

    async def finish(
        self, round_id: str, *, fence: int, state: RoundState = RoundState.DONE, report: RoundReport
    ) -> Round:
        """End a running round as DONE, FAILED or CANCELLED; always CANCELLED if that was requested.

        Raises:
            FencedError: the round no longer runs under this lease; nothing was written.
        """
        if state not in FINAL_ROUND_STATES or state is RoundState.MERGED:
            raise ValueError(f"a round does not finish as {state.value!r}")
        return await self._write(
            round_id, fence=fence, values={**_known(report), "state": state}, at="finished_at"
        )

    async def hand_on(self, round_id: str, *, fence: int) -> None:
        """Leave a running round to another worker, because this one stops: it does not count as dead."""
        statement = update(ROUNDS).where(
            ROUNDS.c.id == round_id,
            ROUNDS.c.state == RoundState.RUNNING,
            ROUNDS.c.fence == fence,
            or_(ROUNDS.c.answered_at.is_(None), ROUNDS.c.not_resumable == ""),
        )
        await self._count(statement.values(worker=None))

    async def take_over(self, chat_key: str, *, fence: int, max_attempts: int) -> list[Round]:
        """Take over running rounds whose worker lost the lease; call it after each acquisition.

        A round becomes REQUESTED again; when its worker died and it was started ``max_attempts`` times, it
        becomes FAILED. One with a requested cancellation becomes CANCELLED. One with an answer that cannot be
        run again, or was run so often, stays RUNNING under the caller's lease, and the caller must ``finish``
        it: its code may have run. Returns the current rows of all of them.

        Raises:
            FencedError: the caller does not hold the chat's lease.
        """
        await ChatRepository(self._connection).hold(chat_key, fence=fence)
        values = {"of_chat": chat_key, "of_fence": fence}
        taken = await self._all(Round, _take_over_statement(max_attempts), values)
        return sorted(taken, key=lambda item: item.sequence)

    async def cancel(self, chat_key: str, *, reason: str, turn_id: str | None = None) -> list[Round]:
        """Cancel the requested rounds and request the running one to stop; returns all of them in order.

        Args:
            turn_id: only the rounds of that turn; None means all rounds of the chat, and then also the ones
                that the running round has merged.

        Raises:
            NotFoundError: there is no such chat.
        """
        await ChatRepository(self._connection).lock(chat_key)
        waits = ROUNDS.c.state == RoundState.REQUESTED
        is_chosen = _is_open(chat_key)
        if turn_id is None:
            running = select(ROUNDS.c.id).where(_is_open(chat_key)).scalar_subquery()
            await self._count(
                update(ROUNDS).where(ROUNDS.c.merged_into.in_(running)).values(cancel_requested_at=now())
            )
        else:
            is_chosen = and_(is_chosen, ROUNDS.c.turn_id == turn_id)
        statement = (
            update(ROUNDS)
            .where(is_chosen)
            .values(
                state=case((waits, RoundState.CANCELLED), else_=ROUNDS.c.state),
                finished_at=case((waits, now()), else_=ROUNDS.c.finished_at),
                error=case((waits, reason), else_=ROUNDS.c.error),
                cancel_requested_at=func.coalesce(ROUNDS.c.cancel_requested_at, now()),
            )
            .returning(ROUNDS)
        )
        return sorted(await self._all(Round, statement), key=lambda item: item.sequence)

    async def split(self, round_id: str) -> list[Round]:
        """Request the rounds again that were merged into a cancelled one and are not cancelled themselves.

        The caller holds the chat's lock. Returns them in order.
        """
        statement = (
            update(ROUNDS)
            .where(ROUNDS.c.merged_into == round_id, ROUNDS.c.cancel_requested_at.is_(None))
            .values(state=RoundState.REQUESTED, merged_into=None, finished_at=None)
            .returning(ROUNDS)
        )
        return sorted(await self._all(Round, statement), key=lambda item: item.sequence)

    async def merge_moot(self, ended: Round, *, parked_call: str | None) -> list[Round]:
        """Merge the requested rounds that would go on with a program into one that has gone on with it.

        A wait may end before the round is recorded that began it. If the worker of that round dies then, its
        next attempt goes on with the program, and the round that the end of the wait requested must not.

        Args:
            parked_call: the call in which the program waits now; the round that goes on there is kept.
        """
        is_moot = and_(
            _is_open(ended.chat_key),
            ROUNDS.c.state == RoundState.REQUESTED,
            ROUNDS.c.program_id == (ended.program_id or ended.id),
        )
        if parked_call is not None:
            is_moot = and_(is_moot, ROUNDS.c.trigger_id != parked_call)
        moot = update(ROUNDS).where(is_moot).values(values_of_merged(ended.id))
        return await self._all(Round, moot.returning(ROUNDS))

    async def open_turns(self, chat_key: str) -> set[str]:
        """Return the chat's turns that have an open round, or one that is merged into an open one."""
        return set((await self._rows(_open_turns_statement, {"of_chat": chat_key})).scalars())

    async def standing(self, round_id: str | None) -> Standing:
        """Return how the round of a call stands; neither running nor stopping for a call of no round."""
        row = None
        if round_id is not None:
            row = (await self._rows(_standing_statement, {"of_round": round_id})).first()
        return Standing(*map(bool, row or (False, False)))

    async def cancel_requested(self, round_ids: Collection[str]) -> set[str]:
        """Return the ids of the rounds whose cancellation was requested."""
        values = {f"round_{number}": round_id for number, round_id in enumerate(round_ids)}
        return set((await self._rows(_cancelled_statement(len(values)), values)).scalars())

    async def due_chats(self, *, limit: int, waiting_seconds: float = 0) -> list[str]:
        """List chats that need a worker, ordered by their oldest open round.

        A chat needs a worker when its lease is free and a requested round has been due for at least
        ``waiting_seconds`` (0: is due), or one of its rounds is RUNNING.
        """
        needs = or_(
            and_(
                ROUNDS.c.state == RoundState.REQUESTED,
                ROUNDS.c.not_before <= seconds_from_now(-waiting_seconds),
            ),
            ROUNDS.c.state == RoundState.RUNNING,
        )
        statement = (
            select(ROUNDS.c.chat_key)
            .join(CHATS, CHATS.c.chat_key == ROUNDS.c.chat_key)
            .where(is_one_of(ROUNDS.c.state, *_OPEN), needs, is_free(CHATS.c.lease_until))
            .group_by(ROUNDS.c.chat_key)
            .order_by(func.min(ROUNDS.c.sequence))
            .limit(limit)
        )
        return (await self._connection.execute(statement)).scalars()

    async def seconds_until_due(self, chat_key: str) -> float | None:
        """Return the seconds until the chat's next requested round is due, 0 if one is; None without one."""
        due, time = (await self._rows(_due_statement, {"of_chat": chat_key})).one()
        return None if due is None else max(0.0, float((due - time).total_seconds()))

    async def seconds_until_orphaned(self) -> float | None:
        """Return the seconds until the first lease of a running round expires unless it is renewed.

        None when no round runs under a valid lease.
        """
        statement = (
            select(func.min(CHATS.c.lease_until), now())
            .join(ROUNDS, CHATS.c.chat_key == ROUNDS.c.chat_key)
            .where(
                is_one_of(ROUNDS.c.state, *_OPEN),
                ROUNDS.c.state == RoundState.RUNNING,
                CHATS.c.lease_until > now(),
            )
        )
        until, time = (await self._connection.execute(statement)).one()
        return None if until is None else float((until - time).total_seconds())

    async def find(self, round_id: str) -> Round | None:
        """Return the round, or None."""
        return await self._one_or_none(Round, _find_statement, {"of_round": round_id})

    async def get(self, round_id: str) -> Round:
        """Return the round.

        Raises:
            NotFoundError: there is none.
        """
        return found(await self.find(round_id), "round", round_id)

    async def find_by_trigger(self, kind: TriggerKind, trigger_id: str) -> Round | None:
        """Return the round that a trigger caused, or None."""
        statement = select(ROUNDS).where(ROUNDS.c.trigger_kind == kind, ROUNDS.c.trigger_id == trigger_id)
        return await self._one_or_none(Round, statement)

    async def has_open(self, chat_key: str) -> bool:
        """Whether a round of the chat is requested or running."""
        return bool(await self._scalar(select(exists().where(_is_open(chat_key)))))

    async def find_running(self, chat_key: str) -> Round | None:
        """Return the chat's running round, or None."""
        statement = select(ROUNDS).where(_is_open(chat_key), ROUNDS.c.state == RoundState.RUNNING)
        return await self._one_or_none(Round, statement)

    async def merged_into(self, round_id: str) -> list[Round]:
        """List the rounds that were merged into a round, in order."""
        return await self._all(Round, _merged_statement, {"of_round": round_id})

    async def rounds_of_turns(self, *turn_ids: str) -> list[Round]:
        """List the rounds of turns of one chat, and the merged rounds of other turns, in order."""
        rounds = await self._all(Round, _turns_statement(), {"turns": turn_ids})
        # A round that was merged into one of its own turn is returned twice.
        return sorted({item.id: item for item in rounds}.values(), key=lambda item: item.sequence)

    async def newest(self, chat_key: str, *, limit: int, before: int | None = None) -> list[Round]:
        """List the newest rounds of a chat, the oldest of them first.

        Args:
            before: only rounds with a smaller sequence, for paging; None does not limit.
        """
        statement = select(ROUNDS).where(ROUNDS.c.chat_key == chat_key)
        if before is not None:
            statement = statement.where(ROUNDS.c.sequence < before)
        newest = await self._all(Round, statement.order_by(ROUNDS.c.sequence.desc()).limit(limit))
        return newest[::-1]

    async def _write(self, round_id: str, *, fence: int, values: dict[str, Any], at: str | None) -> Round:
        """Run one guarded UPDATE under the lock of a chat whose lease the caller still holds.

        Args:
            at: column that is set to the database's time, or None.
        """
        chats = ChatRepository(self._connection)
        if self._dialect != "sqlite":
            await chats.hold_of_round(round_id, fence=fence)
        statement = _write_statement(tuple(sorted(values)), at)
        given = {f"new_{name}": value for name, value in values.items()}
        written = await self._one_or_none(
            Round, statement, {"of_round": round_id, "of_fence": fence, **given}
        )
        if written is None:
            await chats.hold_of_round(round_id, fence=fence)  # raises if the chat is not held
            raise FencedError(f"round {round_id} does not run under lease {fence}; nothing was written")
        self._connection.locked_chats[written.chat_key] = fence
        return written


def _is_open(chat_key: str | BindParameter[str]) -> ColumnElement[bool]:
    """SQL: an open round of the chat; there are few of them and a partial index covers them."""
    return and_(ROUNDS.c.chat_key == chat_key, is_one_of(ROUNDS.c.state, *_OPEN))


@FixedStatement
def _waiting_statement(_dialect: str) -> Executable:
    # Without an order: for one by sequence SQLite would take the index that has it, and read all rounds of
    # the chat. The state is not a parameter: SQLite compiles a statement again for each value that a partial
    # index may depend on.
    resumes = or_(ROUNDS.c.answered_at.is_not(None), ROUNDS.c.program_id.is_not(None))
    return select(ROUNDS.c.sequence, ROUNDS.c.id, ROUNDS.c.not_before <= now(), resumes).where(
        _is_open(bindparam("of_chat")), is_one_of(ROUNDS.c.state, RoundState.REQUESTED)
    )


def _start(*conditions: ColumnElement[bool]) -> Executable:
    return (
        update(ROUNDS)
        .where(ROUNDS.c.id == bindparam("of_round"), *conditions)
        .values(
            state=RoundState.RUNNING,
            attempt=ROUNDS.c.attempt + 1,
            fence=bindparam("new_fence"),
            worker=bindparam("new_worker"),
            started_at=now(),
        )
        .returning(ROUNDS)
    )


@FixedStatement
def _start_statement(_dialect: str) -> Executable:
    return _start()


@FixedStatement
def _start_only_statement(_dialect: str) -> Executable:
    """Start a requested round if it is due and its chat has no other requested one."""
    other = ROUNDS.alias()
    others = select(other.c.id).where(
        other.c.chat_key == bindparam("of_chat"),
        is_one_of(other.c.state, *_OPEN),  # as the partial index has it
        is_one_of(other.c.state, RoundState.REQUESTED),
        other.c.id != bindparam("of_round"),
    )
    return _start(
        ROUNDS.c.chat_key == bindparam("of_chat"),
        ROUNDS.c.state == RoundState.REQUESTED,
        ROUNDS.c.not_before <= now(),
        ~others.exists(),
    )


@FixedStatement
def _due_statement(_dialect: str) -> Executable:
    return select(func.min(ROUNDS.c.not_before), now()).where(
        _is_open(bindparam("of_chat")), is_one_of(ROUNDS.c.state, RoundState.REQUESTED)
    )


@cache
def _take_over_statement(max_attempts: int) -> FixedStatement:
    fence = bindparam("of_fence", type_=Integer)
    stopping = ROUNDS.c.cancel_requested_at.is_not(None)
    answered = ROUNDS.c.answered_at.is_not(None)
    is_last = and_(ROUNDS.c.attempt >= max_attempts, ROUNDS.c.worker.is_not(None))
    ends = and_(answered, or_(is_last, func.coalesce(ROUNDS.c.not_resumable, "unknown") != ""))
    state = case(
        (stopping, RoundState.CANCELLED),
        (ends, RoundState.RUNNING),
        (is_last, RoundState.FAILED),
        else_=RoundState.REQUESTED,
    )
    error = case(
        (stopping, "stopped on request; its worker had died"),
        (answered, ROUNDS.c.error),
        (is_last, f"its worker died, and it was started {max_attempts} times; not started again"),
        else_=ROUNDS.c.error,
    )
    statement = (
        update(ROUNDS)
        .where(
            _is_open(bindparam("of_chat")),
            is_one_of(ROUNDS.c.state, RoundState.RUNNING),
            ROUNDS.c.fence < fence,
        )
        .values(
            state=state,
            error=error,
            finished_at=case((stopping, now()), (answered, None), (is_last, now()), else_=None),
            fence=case((ends, fence), else_=ROUNDS.c.fence),
        )
        .returning(ROUNDS)
    )
    return FixedStatement(lambda _dialect: statement)


@cache
def _write_statement(names: tuple[str, ...], at: str | None) -> FixedStatement:
    """UPDATE of a running round; if cancellation was requested, the new state is always CANCELLED."""
    values: dict[str, Any] = {name: bindparam(f"new_{name}", type_=ROUNDS.c[name].type) for name in names}
    if "state" in values:
        asked = ROUNDS.c.cancel_requested_at.is_not(None)
        values["state"] = case((asked, RoundState.CANCELLED), else_=values["state"])
    if at is not None:
        values[at] = now()
    if "state" in values and "answer" in values:  # an answer that was not recorded before the end
        values["answered_at"] = func.coalesce(ROUNDS.c.answered_at, now())
    statement = (
        update(ROUNDS)
        .where(
            ROUNDS.c.id == bindparam("of_round"),
            ROUNDS.c.state == RoundState.RUNNING,
            ROUNDS.c.fence == bindparam("of_fence"),
        )
        .values(values)
        .returning(ROUNDS)
    )
    # SQLite has no row locks: its write transactions exclude each other, so the UPDATE can check the lease.
    held = select(CHATS.c.chat_key).where(
        CHATS.c.chat_key == ROUNDS.c.chat_key, is_held_by(CHATS, bindparam("of_fence", type_=Integer))
    )
    return FixedStatement(
        lambda dialect: statement.where(held.exists()) if dialect == "sqlite" else statement
    )


@FixedStatement
def _standing_statement(_dialect: str) -> Executable:
    runs = ROUNDS.c.state == RoundState.RUNNING
    return select(runs, ROUNDS.c.cancel_requested_at.is_not(None)).where(ROUNDS.c.id == bindparam("of_round"))


@cache
def _cancelled_statement(rounds: int) -> FixedStatement:
    """Select those of so many rounds whose cancellation was requested; a worker runs few at once."""
    asked = [bindparam(f"round_{number}", type_=ROUNDS.c.id.type) for number in range(rounds)]
    statement = select(ROUNDS.c.id).where(ROUNDS.c.id.in_(asked), ROUNDS.c.cancel_requested_at.is_not(None))
    return FixedStatement(lambda _dialect: statement)


@FixedStatement
def _open_turns_statement(_dialect: str) -> Executable:
    taker = ROUNDS.alias()
    merged = (
        select(ROUNDS.c.turn_id)
        .join(taker, ROUNDS.c.merged_into == taker.c.id)
        .where(taker.c.chat_key == bindparam("of_chat"), is_one_of(taker.c.state, *_OPEN))
    )
    return union_all(select(ROUNDS.c.turn_id).where(_is_open(bindparam("of_chat"))), merged)


@FixedStatement
def _merged_statement(_dialect: str) -> Executable:
    return select(ROUNDS).where(ROUNDS.c.merged_into == bindparam("of_round")).order_by(ROUNDS.c.sequence)


@FixedStatement
def _find_statement(_dialect: str) -> Executable:
    return select(ROUNDS).where(ROUNDS.c.id == bindparam("of_round"))


@cache
def _turns_statement() -> Executable:
    # A union of two queries, because neither database uses indexes for "of the turn or merged into it".
    taker = ROUNDS.alias()
    turns: BindParameter[Any] = bindparam("turns", expanding=True)
    merged = select(ROUNDS).join(taker, ROUNDS.c.merged_into == taker.c.id)
    return union_all(
        select(ROUNDS).where(ROUNDS.c.turn_id.in_(turns)), merged.where(taker.c.turn_id.in_(turns))
    )


def _values(request: RoundRequest) -> dict[str, Any]:
    values = values_of(request, RoundRequest)
    values["turn_id"] = request.turn_id or request.id
    values["cause_turn_id"] = request.turn_id or request.cause_turn_id
    # A round of a turn that goes on is paid as the turn's first one.
    values["account_id"] = None if request.turn_id else request.account_id
    named = (
        key_of_account(account) for account in (values["cause_turn_id"], values["account_id"]) if account
    )
    values["named_key"] = next(filter(None, named), None)
    return values


def _requested(dialect: str) -> tuple[dict[str, Any], Select[Any]]:
    """Return the values of a requested round, and the SELECT that computes them."""
    columns = ROUNDS.c
    given: dict[str, Any] = {
        item.name: bindparam(item.name, type_=columns[item.name].type)
        for item in dataclasses.fields(RoundRequest)
        if item.name in columns
    }
    cause = bindparam("cause_turn_id", type_=ROUNDS.c.turn_id.type)
    first = ROUNDS.alias()
    root = select(first.c.root_turn_id).where(first.c.id == cause).scalar_subquery()
    paid = select(first.c.key_id).where(first.c.id == bindparam("turn_id", type_=ROUNDS.c.turn_id.type))
    payers = [
        paid.scalar_subquery(),
        _payer(cause),
        bindparam("named_key", type_=ROUNDS.c.key_id.type),
        _payer(bindparam("account_id", type_=ROUNDS.c.turn_id.type)),
    ]
    payer = select(func.coalesce(*payers, _EMPTY).label("key_id")).subquery("payer")
    values = {
        **given,
        "requested_at": now(),
        "not_before": seconds_from_now(seconds_parameter("delay_seconds")),
        "state": literal(RoundState.REQUESTED, ROUNDS.c.state.type),
        # The turn itself if its first round has none, or has expired.
        "root_turn_id": func.coalesce(root, cause),
        "key_id": payer.c.key_id,
        "fair_position": _fair_position(payer.c.key_id, dialect),
    }
    return values, select(*values.values()).select_from(payer)


def _fair_position(key_id: ColumnElement[str], dialect: str) -> ColumnElement[int]:
    """SQL: where a new round waits; see the module, and ``storage.tables`` for the conditions."""
    waiting = ROUNDS.alias()
    position = waiting.c.fair_position
    waits = is_one_of(waiting.c.state, RoundState.REQUESTED)
    first = (
        select(position)
        .where(waits, position >= literal_column("0"))
        .order_by(position, waiting.c.sequence)
        .limit(_ONE)
    )
    begin = func.coalesce(first.scalar_subquery(), 0)
    chat_key = bindparam("chat_key", type_=ROUNDS.c.chat_key.type)
    is_of_owner = _owner(waiting.c.key_id, waiting.c.chat_key) == _owner(key_id, chat_key)
    last = (
        select(position + 1)
        .where(waits, position > literal_column("-1"), is_of_owner)
        .order_by(position.desc())
        .limit(_ONE)
    )
    larger = func.max if dialect == "sqlite" else func.greatest
    goes_on = bindparam("number", type_=ROUNDS.c.number.type) > 1
    return case((goes_on, begin), else_=larger(begin, func.coalesce(last.scalar_subquery(), 0)))


def _owner(key_id: ColumnElement[str], chat_key: ColumnElement[str]) -> ColumnElement[str]:
    """SQL: as the index has it, so without parameters."""
    return func.coalesce(func.nullif(key_id, _EMPTY), chat_key)


def _payer(account: BindParameter[str]) -> ScalarSelect[Any]:
    """SQL: the key that pays for an account, if a row names it."""
    return select(KEY_TURNS.c.key_id).where(KEY_TURNS.c.turn_id == account).scalar_subquery()


@FixedStatement
def _request_statement(dialect: str) -> Executable:
    values, chosen = _requested(dialect)
    # A condition, because SQLite would read ON CONFLICT after FROM as that of a join.
    new = insert(dialect, ROUNDS).from_select(list(values), chosen.where(true()))
    return new.on_conflict_do_nothing(index_elements=_TRIGGER).returning(ROUNDS)


@FixedStatement
def _request_during_statement(dialect: str) -> Executable:
    caller = ROUNDS.alias()
    values, chosen = _requested(dialect)
    chosen = chosen.join(caller, true()).where(
        caller.c.id == bindparam("of_round"),
        caller.c.state == RoundState.RUNNING,
        caller.c.cancel_requested_at.is_(None),
    )
    new = insert(dialect, ROUNDS).from_select(list(values), chosen)
    return new.on_conflict_do_nothing(index_elements=_TRIGGER).returning(ROUNDS)


def _known(report: RoundReport) -> dict[str, Any]:
    values = values_of(report, RoundReport)
    return {name: value for name, value in values.items() if value is not None}
