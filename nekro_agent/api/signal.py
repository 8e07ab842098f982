"""What a message hook wants to happen next."""

from __future__ import annotations

from nekro_agent.schemas.signal import MsgSignal

__all__ = ["MsgSignal"]
