"""Names that a plugin's module imports to declare itself."""

from __future__ import annotations

from nekro_agent.commands.registration import CmdCtl, CommandGroup
from nekro_agent.commands.schemas import (
    Arg,
    CommandExecutionContext,
    CommandOutputSegment,
    CommandOutputSegmentType,
    CommandPermission,
    CommandResponse,
    CommandResponseStatus,
)
from nekro_agent.config import ConfigBase, ExtraField
from nekro_agent.jobs import AsyncTaskHandle, TaskCtl, TaskRunner, TaskSignal, task
from nekro_agent.methods import SandboxMethod, SandboxMethodType
from nekro_agent.packages.imports import dynamic_import_pkg
from nekro_agent.plugin import NekroPlugin, long_running, repeatable
from nekro_agent.store import PluginStore

__all__ = [
    "Arg",
    "AsyncTaskHandle",
    "CmdCtl",
    "CommandExecutionContext",
    "CommandGroup",
    "CommandOutputSegment",
    "CommandOutputSegmentType",
    "CommandPermission",
    "CommandResponse",
    "CommandResponseStatus",
    "ConfigBase",
    "ExtraField",
    "NekroPlugin",
    "PluginStore",
    "SandboxMethod",
    "SandboxMethodType",
    "TaskCtl",
    "TaskRunner",
    "TaskSignal",
    "dynamic_import_pkg",
    "long_running",
    "repeatable",
    "task",
]
