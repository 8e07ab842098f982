"""Timers; the name ``timer_service`` is the object here, as in Nekro Agent, not the module."""

from __future__ import annotations

from nekro_agent.services.timer.timer_service import timer_service

__all__ = ["timer_service"]
