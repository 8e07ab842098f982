"""Commands: permission and context types."""

from __future__ import annotations

from nekro_agent.commands.registration import CommandGroup
from nekro_agent.commands.schemas import CommandExecutionContext, CommandPermission, CommandResponse

__all__ = ["CommandExecutionContext", "CommandGroup", "CommandPermission", "CommandResponse"]
