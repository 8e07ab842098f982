"""Pictures of people on QQ."""

from __future__ import annotations

from nekro_agent.api.user import get_avatar

__all__ = ["get_avatar"]
