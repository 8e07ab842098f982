"""Rows and entries as objects of the API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nekro_client import models

if TYPE_CHECKING:
    from nekro.app.budgets import Budget
    from nekro.app.catalogue import ServedVersion
    from nekro.broker.dead_letters import DeadMessage
    from nekro.plugins.entries import MethodEntry, PluginEntry
    from storage.accounts.approvals import Approval
    from storage.accounts.keys import Key, RecordedAct
    from storage.caller_reads import LaneOverride
    from storage.listings.series import CostSum
    from storage.repositories.calls import Call

__all__ = [
    "act_answer",
    "approval_answer",
    "budget_answer",
    "cost_answer",
    "dead_letter_answer",
    "key_answer",
    "method_answer",
    "plugin_answer",
]


def cost_answer(sums: CostSum) -> models.Cost:
    """Return what one group used."""
    return models.Cost(**vars(sums))


def budget_answer(budget: Budget, *, warn_at: float) -> models.BudgetUse:
    """Return how much of a budget is used.

    Args:
        warn_at: share at which its state is ``warned``.
    """
    return models.BudgetUse(
        scope=budget.scope,
        id=budget.id,
        measure=budget.measure,
        period=budget.period or ("turn" if budget.scope == "turn" else ""),
        limit=budget.limit,
        used=budget.used,
        estimated_requests=budget.estimated_requests,
        renews_at=budget.renews_at,
        state=budget.state(warn_at),
    )


def method_answer(entry: MethodEntry, *, lane: str, overrides: Mapping[str, LaneOverride]) -> models.Method:
    """Return a method of the catalogue, with the lane on which it runs now.

    Args:
        overrides: by task, or by key of the plugin.
    """
    override = overrides.get(entry.plugin_key) or overrides.get(entry.task)
    return models.Method(
        name=entry.name,
        task=entry.task,
        plugin=entry.plugin_key,
        type=entry.type.value,
        lane=lane,
        lane_reason=None if override is None else str(override),
        signature=entry.signature,
        doc=entry.doc,
        requires_approval=entry.requires_approval,
    )


def plugin_answer(entry: PluginEntry, versions: Sequence[ServedVersion]) -> models.Plugin:
    """Return a plugin of the catalogue; where it is on its hosts is not shown.

    Args:
        versions: what workers serve of it, the one that callers see first.
    """
    return models.Plugin(
        is_enabled=entry.enabled,
        versions=[
            models.PluginVersion(
                version=one.entry.version,
                status=one.entry.status.value,
                error=one.entry.error,
                digest=one.entry.digest,
                methods=len(one.entry.methods),
                published_at=one.published_at,
                workers=list(one.workers),
            )
            for one in versions
        ],
        key=entry.key,
        status=entry.status.value,
        name=entry.name,
        description=entry.description,
        version=entry.version,
        author=entry.author,
        error=entry.error,
        placeholders=list(entry.placeholders),
    )


def dead_letter_answer(message: DeadMessage, **checked: Any) -> models.DeadLetter:
    """Return a dead letter; ``checked`` are the fields that its signatures cover."""
    return models.DeadLetter(
        id=message.id,
        task=message.task,
        lane=message.lane,
        source="broker" if message.refusal is None else "refused",
        reason=message.reason,
        deliveries=message.deliveries,
        bytes=message.size_bytes,
        **checked,
    )


def key_answer(key: Key) -> models.ApiKey:
    """Return a key without its digest."""
    return models.ApiKey(
        id=key.id,
        name=key.name,
        scopes=key.scopes,
        chats=key.chats,
        user_id=key.user_id,
        requests_per_minute=key.requests_per_minute,
        cost_per_day=key.cost_per_day,
        tokens_per_day=key.tokens_per_day,
        stored_bytes_limit=key.stored_bytes_limit,
        stored_bytes=key.stored_bytes,
        created_at=key.created_at,
        expires_at=key.expires_at,
        revoked_at=key.revoked_at,
    )


def act_answer(act: RecordedAct) -> models.Act:
    """Return an administrative act."""
    return models.Act(
        id=str(act.sequence),
        at=act.at,
        key_id=act.key_id,
        action=act.action,
        subject=act.subject,
        data=act.data,
        request_id=act.request_id,
    )


def approval_answer(row: Approval, call: Call | None = None, *, in_full: bool = True) -> models.Approval:
    """Return a request for approval.

    Args:
        call: its call; None: unknown.
        in_full: False leaves out the exact arguments, for lists.
    """
    from nekro.app.approvals.shown import call_line, difference, plain_arguments, shown_call

    answer = models.Approval(
        id=row.id,
        number=row.number,
        call_id=row.call_id,
        chat_key=row.chat_key,
        turn_id=row.turn_id,
        round_id=row.round_id,
        user_id=row.user_id,
        method=row.method,
        summary=call_line(row.method, row.running_arguments),
        digest=row.digest,
        requested_at=row.requested_at,
        expires_at=row.expires_at,
        state=row.state.value,
        scope=None if row.scope is None else row.scope.value,
        grant_until=row.grant_until,
        revoked_at=row.revoked_at,
        decided_by=row.decided_by,
        decided_at=row.decided_at,
        reason=row.reason,
        is_edited=row.edited_arguments is not None,
    )
    if not in_full:
        return answer
    return answer.model_copy(
        update={
            "call": shown_call(row.method, row.running_arguments),
            "arguments": plain_arguments(row.running_arguments),
            "difference": difference(row) or None,
            "call_state": None if call is None else call.state.value,
            "call_error": None if call is None else _call_error_of(call),
        }
    )


def _call_error_of(call: Call) -> models.TurnError | None:
    if call.error_type is None:
        return None
    return models.TurnError(code=call.error_type, text=call.error_message or "")
