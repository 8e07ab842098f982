"""Requests for approval of calls, and the decisions on them."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from typing import Any, Final

from sqlalchemy import ColumnElement, Executable, and_, bindparam, func, or_, select, update

from storage.repositories.base import Repository, chosen_once, found, is_one_of, values_of
from storage.repositories.calls import Call
from storage.sql import insert, now
from storage.states import ApprovalScope, ApprovalState, TriggerKind
from storage.tables import APPROVALS, ROUNDS

__all__ = ["Approval", "ApprovalRepository", "Decision", "NewApproval"]

#: The number of a request; a whole id of digits only is longer.
_NUMBER: Final = re.compile(r"#?[1-9][0-9]{0,14}")
_LEAST_ID_CHARS: Final = 4
_GRANTING: Final = (ApprovalScope.TURN, ApprovalScope.CHAT)


@dataclass(frozen=True, kw_only=True)
class NewApproval:
    """A call that a person is asked to approve."""

    id: str
    call_id: str
    chat_key: str
    turn_id: str | None
    round_id: str | None
    root_turn_id: str | None
    user_id: str | None
    #: ``author.module.function``.
    method: str
    lane: str
    #: Tagged text.
    arguments: str
    digest: str
    expires_at: datetime


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What was decided on a call."""

    state: ApprovalState
    decided_by: str
    reason: str | None = None
    #: The following are those of an approval.
    scope: ApprovalScope | None = None
    edited_arguments: str | None = None
    #: Of what runs.
    digest: str | None = None
    grant_until: datetime | None = None
    seal: str | None = None


@dataclass(frozen=True, kw_only=True)
class Approval(NewApproval):
    """A request for approval and the decision on it; the fields of a decision are None without one."""

    sequence: int
    requested_at: datetime
    state: ApprovalState
    edited_arguments: str | None
    scope: ApprovalScope | None
    grant_until: datetime | None
    revoked_at: datetime | None
    decided_by: str | None
    decided_at: datetime | None
    reason: str | None
    seal: str | None

    @property
    def number(self) -> int:
        """By which people name it. A number is never used again."""
        return self.sequence

    @property
    def running_arguments(self) -> str:
        """Arguments of the call when it runs, as tagged text."""
        return self.arguments if self.edited_arguments is None else self.edited_arguments


class ApprovalRepository(Repository):
    """Rows of ``approvals``. A decision is one compare-and-set on PENDING, so there is at most one."""

    async def add(self, new: NewApproval, decision: Decision | None = None) -> bool:
        """Record a request, decided at once or not; False when its call has one."""
        values = {**values_of(new, NewApproval), "requested_at": now(), "state": ApprovalState.PENDING}
        if decision is not None:
            values |= _decided(decision, digest=new.digest)
        statement = insert(self._dialect, APPROVALS).values(**values)
        statement = statement.on_conflict_do_nothing(index_elements=[APPROVALS.c.call_id])
        return await self._scalar(statement.returning(APPROVALS.c.id)) is not None

    async def decide(self, approval_id: str, decision: Decision, *, digest: str) -> Approval | None:
        """Record a decision; None if there is one already, or the request has expired.

        Args:
            digest: of the arguments as requested.
        """
        statement = (
            update(APPROVALS)
            .where(
                APPROVALS.c.id == approval_id,
                APPROVALS.c.state == ApprovalState.PENDING,
                APPROVALS.c.expires_at > now(),
            )
            .values(**_decided(decision, digest=digest))
        )
        return await self._one_or_none(Approval, statement.returning(APPROVALS))

    async def overdue_chats(self, *, limit: int) -> list[str]:
        """List chats with requests that are expired and not decided."""
        statement = (
            select(APPROVALS.c.chat_key)
            .where(is_one_of(APPROVALS.c.state, ApprovalState.PENDING), APPROVALS.c.expires_at <= now())
            .group_by(APPROVALS.c.chat_key)
            .order_by(func.min(APPROVALS.c.expires_at))
            .limit(limit)
        )
        return [chat_key for (chat_key,) in await self._rows(statement)]

    async def expire(self, chat_key: str, *, limit: int) -> list[Approval]:
        """End expired requests of a chat; returns them in order."""
        chosen = (
            select(APPROVALS.c.sequence)
            .where(
                APPROVALS.c.chat_key == chat_key,
                is_one_of(APPROVALS.c.state, ApprovalState.PENDING),
                APPROVALS.c.expires_at <= now(),
            )
            .order_by(APPROVALS.c.sequence)
            .limit(limit)
        )
        statement = (
            update(APPROVALS)
            .where(APPROVALS.c.sequence.in_(chosen_once(chosen)), APPROVALS.c.state == ApprovalState.PENDING)
            .values(state=ApprovalState.EXPIRED, decided_at=now())
        )
        expired = await self._all(Approval, statement.returning(APPROVALS))
        return sorted(expired, key=lambda item: item.sequence)

    async def seconds_until_overdue(self) -> float | None:
        """Return the seconds until the next pending request expires; None if none is pending."""
        statement = select(func.min(APPROVALS.c.expires_at), now()).where(
            is_one_of(APPROVALS.c.state, ApprovalState.PENDING)
        )
        first, at = next(iter(await self._rows(statement)))
        return None if first is None else (first - at).total_seconds()

    async def cancel(
        self,
        chat_key: str,
        *,
        reason: str,
        turn_id: str | None = None,
        round_id: str | None = None,
    ) -> list[Approval]:
        """Withdraw the pending requests of a chat; returns them in order.

        Args:
            turn_id, round_id: only those of one turn or round; None does not limit.
        """
        given = {"turn_id": turn_id, "round_id": round_id}
        chosen = [APPROVALS.c[name] == value for name, value in given.items() if value is not None]
        statement = (
            update(APPROVALS)
            .where(APPROVALS.c.chat_key == chat_key, APPROVALS.c.state == ApprovalState.PENDING, *chosen)
            .values(state=ApprovalState.CANCELLED, decided_at=now(), reason=reason)
        )
        cancelled = await self._all(Approval, statement.returning(APPROVALS))
        return sorted(cancelled, key=lambda item: item.sequence)

    async def revoke(self, chat_key: str, *, approval_id: str | None = None) -> int:
        """End what approvals of a chat permit besides their own calls; returns how many did.

        Args:
            approval_id: only that one; None means all.
        """
        statement = update(APPROVALS).where(APPROVALS.c.chat_key == chat_key, _permits())
        if approval_id is not None:
            statement = statement.where(APPROVALS.c.id == approval_id)
        return await self._count(statement.values(revoked_at=now()))

    async def grants(self, chat_key: str, method: str, *, turn_id: str | None) -> list[Approval]:
        """List the approvals that permit further calls of a method, the newest first."""
        is_wide = APPROVALS.c.scope == ApprovalScope.CHAT
        if turn_id is not None:
            is_wide = or_(is_wide, APPROVALS.c.root_turn_id == await self.root_of(turn_id))
        statement = select(APPROVALS).where(
            APPROVALS.c.chat_key == chat_key, APPROVALS.c.method == method, _permits(), is_wide
        )
        return await self._all(Approval, statement.order_by(APPROVALS.c.sequence.desc()))

    async def root_of(self, turn_id: str) -> str:
        """Return the turn that began the work of a turn: itself, unless an approved call began it."""
        began = (ROUNDS.c.id == turn_id) & (ROUNDS.c.trigger_kind == TriggerKind.CALL)
        statement = select(APPROVALS.c.root_turn_id).where(began, ROUNDS.c.trigger_id == APPROVALS.c.call_id)
        return await self._scalar(statement) or turn_id

    async def turns_before(self, call_id: str) -> list[str]:
        """List the turns that led to a call that was approved or refused, the first at the beginning."""
        root = select(APPROVALS.c.root_turn_id).where(APPROVALS.c.call_id == call_id).scalar_subquery()
        statement = (
            select(APPROVALS.c.turn_id)
            .where(APPROVALS.c.root_turn_id == root)
            .group_by(APPROVALS.c.turn_id)
            .order_by(func.min(APPROVALS.c.sequence))
        )
        return [turn_id for (turn_id,) in await self._rows(statement)]

    async def newest(
        self,
        *,
        limit: int,
        chat_key: str | None = None,
        state: ApprovalState | None = None,
        name: str | None = None,
        before: int | None = None,
    ) -> list[Approval]:
        """List requests, the newest first.

        Args:
            name: only the one of this number, else those whose ids begin with it, with at least four
                characters; None does not limit.
            before: only those with a smaller sequence; None does not limit.
        """
        statement = select(APPROVALS).order_by(APPROVALS.c.sequence.desc()).limit(limit)
        if chat_key is not None:
            statement = statement.where(APPROVALS.c.chat_key == chat_key)
        if state is not None:
            statement = statement.where(is_one_of(APPROVALS.c.state, state))
        if before is not None:
            statement = statement.where(APPROVALS.c.sequence < before)
        if name is None:
            return await self._all(Approval, statement)
        if _NUMBER.fullmatch(name):
            numbered = await self._all(
                Approval, statement.where(APPROVALS.c.sequence == int(name.removeprefix("#")))
            )
            if numbered:
                return numbered
        if len(name) < _LEAST_ID_CHARS:  # a mistyped number must name no call by the chance of its id
            return []
        return await self._all(Approval, statement.where(APPROVALS.c.id.startswith(name, autoescape=True)))

    async def of_calls(self, calls: Iterable[Call]) -> dict[str, str]:
        """Return the ids of the requests for some calls, by call id."""
        ids = [call.id for call in calls]
        if not ids:
            return {}
        found = await self._rows(_of_calls_statement(), {"calls": ids})
        return {call_id: approval_id for call_id, approval_id in found}

    async def pending_of_turn(self, chat_key: str, turn_id: str) -> list[str]:
        """List the ids of the requests of a turn of that chat that are not decided, in order."""
        statement = (
            select(APPROVALS.c.id)
            .where(
                APPROVALS.c.chat_key == chat_key,
                is_one_of(APPROVALS.c.state, ApprovalState.PENDING),
                APPROVALS.c.turn_id == turn_id,
            )
            .order_by(APPROVALS.c.sequence)
        )
        return [approval_id for (approval_id,) in await self._rows(statement)]

    async def states(self, approval_ids: Collection[str]) -> dict[str, ApprovalState]:
        """Return the states of requests by their ids; those that do not exist are left out."""
        if not approval_ids:
            return {}
        statement = select(APPROVALS.c.id, APPROVALS.c.state).where(APPROVALS.c.id.in_(approval_ids))
        return {approval_id: ApprovalState(state) for approval_id, state in await self._rows(statement)}

    async def of_call(self, call_id: str) -> Approval | None:
        """Return the request for a call, or None."""
        return await self._one_or_none(Approval, select(APPROVALS).where(APPROVALS.c.call_id == call_id))

    async def get(self, approval_id: str) -> Approval:
        """Return a request.

        Raises:
            NotFoundError: there is none.
        """
        statement = select(APPROVALS).where(APPROVALS.c.id == approval_id)
        return found(await self._one_or_none(Approval, statement), "approval", approval_id)


@cache
def _of_calls_statement() -> Executable:
    is_chosen = APPROVALS.c.call_id.in_(bindparam("calls", expanding=True))
    return select(APPROVALS.c.call_id, APPROVALS.c.id).where(is_chosen)


def _permits() -> ColumnElement[bool]:
    return and_(
        is_one_of(APPROVALS.c.state, ApprovalState.APPROVED),
        is_one_of(APPROVALS.c.scope, *_GRANTING),
        APPROVALS.c.grant_until > now(),
        APPROVALS.c.revoked_at.is_(None),
    )


def _decided(decision: Decision, *, digest: str) -> dict[str, Any]:
    values = values_of(decision, Decision)
    return {**values, "digest": decision.digest or digest, "decided_at": now()}
