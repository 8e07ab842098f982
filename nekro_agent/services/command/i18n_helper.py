"""Commands: texts in the language of a user."""

from __future__ import annotations

from nekro_agent.schemas.i18n import t

__all__ = ["t"]
