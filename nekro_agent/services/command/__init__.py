"""Commands, at the import paths that plugins of Nekro Agent use."""

from __future__ import annotations

from nekro_agent.services.command.base import CommandGroup, CommandPermission
from nekro_agent.services.command.ctl import CmdCtl
from nekro_agent.services.command.schemas import (
    Arg,
    CommandExecutionContext,
    CommandResponse,
    CommandResponseStatus,
)

__all__ = [
    "Arg",
    "CmdCtl",
    "CommandExecutionContext",
    "CommandGroup",
    "CommandPermission",
    "CommandResponse",
    "CommandResponseStatus",
]
