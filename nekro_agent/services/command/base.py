"""Commands: the class of commands that are objects, permission and context types."""

from __future__ import annotations

from nekro_agent.commands.instances import BaseCommand, CommandMetadata
from nekro_agent.commands.registration import CommandGroup
from nekro_agent.commands.schemas import CommandExecutionContext, CommandPermission, CommandResponse

__all__ = [
    "BaseCommand",
    "CommandExecutionContext",
    "CommandGroup",
    "CommandMetadata",
    "CommandPermission",
    "CommandResponse",
]
