"""Calls that nobody waits for any more: their results go to the chat.

Caller and worker meet in one row, by one statement each. Whoever comes second sees the other: the
caller that the call has ended, or the worker that its result is to go to the chat.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Final

from sqlalchemy import func

from storage.calls import Call, CallRequest
from storage.clock import now, seconds_from_now
from storage.models import CallRow
from storage.repository import Repository, found, is_one_of
from storage.states import CallState
from storage.upsert import insert

__all__ = ["DetachedCallRepository"]

_OPEN: Final = (CallState.QUEUED, CallState.RUNNING)


class DetachedCallRepository(Repository):
    """Rows of ``calls`` that were detached, or may be."""

    async def detach(self, request: CallRequest, *, runs_seconds: float | None = None) -> Call:
        """Say that nobody waits for the result; returns the call as it is now, which may be ended.

        Args:
            request: with ``invocation``, which says whom to tell; it becomes a row if it is none.
            runs_seconds: for a call that no worker claims: how long it may run.
        """
        claimless = runs_seconds is not None
        new = insert(self._dialect, CallRow).values(
            **_values(request),
            state=CallState.RUNNING if claimless else CallState.QUEUED,
            lease_until=seconds_from_now(runs_seconds) if runs_seconds is not None else None,
            requested_at=now(),
            published_at=now(),
            detached_at=now(),
        )
        statement = new.on_conflict_do_update(
            index_elements=[CallRow.id],
            set_={
                "detached_at": func.coalesce(CallRow.detached_at, now()),
                # A recorded call holds its whole message, which the sweep sends again.
                "invocation": func.coalesce(CallRow.invocation, new.excluded.invocation),
            },
            where=is_one_of(CallRow.state, *_OPEN),
        ).returning(CallRow)
        return await self._one_or_none(Call, statement) or found(
            await self._one_or_none(Call, CallRow.__table__.select().where(CallRow.id == request.id)),
            "call",
            request.id,
        )

    async def end(
        self,
        request: CallRequest,
        *,
        state: CallState,
        outcome: dict[str, Any] | None = None,
        error_type: str | None = None,
        error_message: str | None = None,
    ) -> Call | None:
        """Record the end of a call that no worker claims and that may be detached; None if it has ended."""
        values = {
            "state": state,
            "outcome": outcome,
            "error_type": error_type,
            "error_message": error_message,
            "finished_at": now(),
            "lease_until": None,
        }
        new = insert(self._dialect, CallRow).values(**_values(request), **values, requested_at=now())
        statement = new.on_conflict_do_update(
            index_elements=[CallRow.id], set_=values, where=is_one_of(CallRow.state, *_OPEN)
        ).returning(CallRow)
        return await self._one_or_none(Call, statement)


def _values(request: CallRequest) -> dict[str, Any]:
    return {item.name: getattr(request, item.name) for item in dataclasses.fields(CallRequest)}
