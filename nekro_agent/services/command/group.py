"""Commands: groups with a common first word."""

from __future__ import annotations

from nekro_agent.commands.registration import CommandGroup

__all__ = ["CommandGroup"]
