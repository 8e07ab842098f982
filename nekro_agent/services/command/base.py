"""Commands: the class of commands that are objects, permission and context types."""

from __future__ import annotations

from nekro_agent.commands.registration import BaseCommand, CommandGroup, CommandMetadata
from nekro_agent.commands.schemas import CommandExecutionContext, CommandPermission, CommandResponse

__all__ = [
    "BaseCommand",
    "CommandExecutionContext",
    "CommandGroup",
    "CommandMetadata",
    "CommandPermission",
    "CommandResponse",
]
