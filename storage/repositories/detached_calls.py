"""Detached calls: their callers no longer wait, so their results go to the chat.

Caller and worker each update the same row with one statement, and the second one sees the first: either
the caller sees that the call has ended, or the worker sees that the result must go to the chat.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Final

from sqlalchemy import func

from storage.clock import now, seconds_from_now
from storage.models import CallRow
from storage.repositories.base import Repository, found, is_one_of
from storage.repositories.calls import Call, CallRequest
from storage.states import CallState
from storage.upsert import insert

__all__ = ["DetachedCallRepository"]

_OPEN: Final = (CallState.QUEUED, CallState.RUNNING)


class DetachedCallRepository(Repository):
    """Rows of ``calls`` that are detached or may become so."""

    async def detach(self, request: CallRequest, *, runs_seconds: float | None = None) -> Call:
        """Record that the caller no longer waits; returns the call's current row, which may have ended.

        Args:
            request: the call with its ``invocation``, which names the chat to notify; inserted if it has
                no row.
            runs_seconds: how long a call that no worker claims may run; None for a call that is claimed.
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
                # A recorded call already has its complete message, which the sweep publishes again.
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
        """Record the end of an unclaimed call that may be detached; None if it has ended already."""
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
