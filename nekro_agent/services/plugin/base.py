"""Older import path of the plugin class."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, TypeAlias, TypeVar

from nekro_agent.config import ConfigBase, ExtraField
from nekro_agent.methods import PromptInjectMethod, SandboxMethod, SandboxMethodType, WebhookMethod
from nekro_agent.plugin import NekroPlugin
from nekro_agent.schemas.agent_ctx import AgentCtx
from nekro_agent.store import PluginStore

__all__ = [
    "CollectMethodsFunc",
    "ConfigBase",
    "ExtraField",
    "NekroPlugin",
    "PluginConfigType",
    "PluginStore",
    "PromptInjectMethod",
    "SandboxMethod",
    "SandboxMethodType",
    "WebhookMethod",
]

PluginConfigType = TypeVar("PluginConfigType", bound=ConfigBase)
#: What ``mount_collect_methods`` registers.
CollectMethodsFunc: TypeAlias = Callable[
    [AgentCtx], Coroutine[Any, Any, list[SandboxMethod | Callable[..., Any]]]
]
