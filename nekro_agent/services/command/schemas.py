"""Commands: argument and response types."""

from __future__ import annotations

from nekro_agent.commands.schemas import (
    Arg,
    CommandExecutionContext,
    CommandOutputSegment,
    CommandOutputSegmentType,
    CommandPermission,
    CommandResponse,
    CommandResponseStatus,
)

__all__ = [
    "Arg",
    "CommandExecutionContext",
    "CommandOutputSegment",
    "CommandOutputSegmentType",
    "CommandPermission",
    "CommandResponse",
    "CommandResponseStatus",
]
