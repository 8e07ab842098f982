"""The signals that a message hook may return."""

from __future__ import annotations

from nekro_agent.schemas.signal import MsgSignal

__all__ = ["MsgSignal"]
