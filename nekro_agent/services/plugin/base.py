"""Older import path of the plugin class."""

from __future__ import annotations

from typing import TypeVar

from nekro_agent.config import ConfigBase, ExtraField
from nekro_agent.methods import SandboxMethod, SandboxMethodType
from nekro_agent.plugin import NekroPlugin
from nekro_agent.store import PluginStore

__all__ = [
    "ConfigBase",
    "ExtraField",
    "NekroPlugin",
    "PluginConfigType",
    "PluginStore",
    "SandboxMethod",
    "SandboxMethodType",
]

PluginConfigType = TypeVar("PluginConfigType", bound=ConfigBase)
