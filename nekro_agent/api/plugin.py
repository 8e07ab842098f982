"""What a plugin's module imports to declare itself."""

from __future__ import annotations

from nekro_agent.config import ConfigBase, ExtraField
from nekro_agent.methods import SandboxMethod, SandboxMethodType
from nekro_agent.plugin import NekroPlugin, long_running
from nekro_agent.store import PluginStore

__all__ = [
    "ConfigBase",
    "ExtraField",
    "NekroPlugin",
    "PluginStore",
    "SandboxMethod",
    "SandboxMethodType",
    "long_running",
]
