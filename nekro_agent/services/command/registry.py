"""Commands: the registry of commands that are objects."""

from __future__ import annotations

from nekro_agent.commands.registration import CommandRegistry, command_registry

__all__ = ["CommandRegistry", "command_registry"]
