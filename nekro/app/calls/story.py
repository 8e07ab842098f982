"""A call as JSON data, for reports of runs, rows of rounds and ``nekro history --trace``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from storage.repositories.calls import Call
from storage.states import CallState

if TYPE_CHECKING:
    from nekro.app.calls.dispatch import CallRecord

__all__ = ["call_json", "listed_calls"]


def call_json(record: CallRecord) -> dict[str, Any]:
    """Describe a call as its caller saw it; times are ISO 8601 in UTC, None if unknown.

    ``awaits_approval`` says whether it waits for approval: when its caller ended; in ``listed_calls``: now.
    ``approval_id`` is its request for approval.
    """
    return {
        "id": record.call_id,
        "method": record.method,
        "type": record.type.value,
        "lane": record.lane,
        "worker": record.worker,
        "requested_at": _text(record.requested_at),
        "started_at": _text(record.started_at),
        "finished_at": _text(record.finished_at),
        "duration_ms": round(record.duration_ms, 3),
        "error": record.error,
        "follow_up": record.round_id,
        "awaits_approval": record.approval_id is not None,
        "approval_id": record.approval_id,
    }


def listed_calls(
    listed: Sequence[dict[str, Any]], rows: Sequence[Call], approvals: Mapping[str, str]
) -> list[dict[str, Any]]:
    """Complete a round's own list of its calls with the recorded rows.

    The caller does not know which worker failed a call, and a caller that died left no list.

    Args:
        listed: results of ``call_json``.
        rows: recorded calls of the round (all but TOOL calls).
        approvals: ids of the requests for approval of these, by call id.
    """
    known = {row.id: row for row in rows}
    calls = [_completed(call, known.pop(call["id"], None)) for call in listed]
    calls += [_recorded(row) for row in known.values()]
    calls = [{**call, "approval_id": approvals.get(call["id"])} for call in calls]
    return sorted(calls, key=lambda call: call["requested_at"])


def _completed(call: dict[str, Any], row: Call | None) -> dict[str, Any]:
    if row is None:
        return {"awaits_approval": False, **call}
    times = {"started_at": _text(row.started_at), "finished_at": _text(row.finished_at)}
    missing = {name: value for name, value in {"worker": row.worker, **times}.items() if not call[name]}
    return call | missing | {"awaits_approval": row.state is CallState.AWAITING}


def _recorded(row: Call) -> dict[str, Any]:
    lasted = None
    if row.started_at is not None and row.finished_at is not None:
        lasted = round((row.finished_at - row.started_at).total_seconds() * 1000, 3)
    return {
        "id": row.id,
        "method": row.method,
        "type": row.type.value,
        "lane": row.lane,
        "worker": row.worker or "",
        "requested_at": _text(row.requested_at),
        "started_at": _text(row.started_at),
        "finished_at": _text(row.finished_at),
        "duration_ms": lasted,
        "error": _error(row),
        "follow_up": None,
        "awaits_approval": row.state is CallState.AWAITING,
    }


def _error(row: Call) -> str | None:
    if row.state in (CallState.DONE, CallState.AWAITING):
        return None
    if row.error_type is None:
        return f"({row.state.value})"
    return f"{row.error_type}: {row.error_message or ''}"


def _text(moment: datetime | None) -> str | None:
    return None if moment is None else moment.isoformat()
