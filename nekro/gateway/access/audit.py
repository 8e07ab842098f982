"""Records administrative acts."""

from __future__ import annotations

from typing import Any

from fastapi import Request

from nekro.gateway.identity import Identity
from storage.access.audit import AuditRepository

__all__ = ["record_act"]


async def record_act(
    audit: AuditRepository,
    request: Request,
    identity: Identity,
    action: str,
    subject: str,
    data: dict[str, Any] | None = None,
) -> None:
    """Record an act in the transaction of the act, or before an act that has none.

    Args:
        data: what was asked for; no secrets.
    """
    await audit.add(action, subject, key_id=identity.key_id, request_id=request.state.request_id, data=data)
