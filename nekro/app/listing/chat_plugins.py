"""The plugins and methods that a chat may use."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from nekro.agent.model import MethodBrief
from nekro.plugins.entries import MethodEntry, PluginEntry
from nekro.plugins.entry_registry import Registry

if TYPE_CHECKING:
    from nekro_agent.schemas.agent_ctx import AgentCtx

__all__ = ["ChatPlugin", "method_brief", "names_of", "plugins_of_chat"]

_MUST_BE_APPROVED: Final = (
    "A person must approve each call. Unless one did before, your program ends at the call, and you see the "
    "result after the decision."
)


@dataclass(frozen=True, kw_only=True)
class ChatPlugin:
    """A plugin, with those of its methods that a chat may use."""

    entry: PluginEntry
    methods: Sequence[MethodBrief]
    #: Each name by which a method can be asked for, with the method.
    names: dict[str, MethodBrief]


async def plugins_of_chat(registry: Registry, ctx: AgentCtx) -> list[ChatPlugin]:
    """Return the plugins that serve the chat, those with methods, as its prompts list them."""
    available: dict[str, list[MethodEntry]] = {}
    for entry in await registry.available(ctx):
        available.setdefault(entry.plugin_key, []).append(entry)
    return [
        _chat_plugin(registry, plugin, available[plugin.key])
        for plugin in registry.plugins
        if plugin.key in available and _serves(plugin, ctx.adapter_key)
    ]


def method_brief(registry: Registry, entry: MethodEntry) -> MethodBrief:
    """Return a method as the prompt shows it; one without a bare name has its full name."""
    name = entry.name if entry.name in registry.bare_names(entry) else entry.task
    doc = entry.doc
    if doc is not None and entry.requires_approval:
        doc = f"{doc}\n\n{_MUST_BE_APPROVED}"
    return MethodBrief(name=name, signature=entry.signature, doc=doc, type=entry.type)


def names_of(registry: Registry, entries: Iterable[MethodEntry]) -> dict[str, str]:
    """Return the names of methods in the prompt by their tasks."""
    return {entry.task: method_brief(registry, entry).name for entry in entries}


def _chat_plugin(registry: Registry, plugin: PluginEntry, entries: Sequence[MethodEntry]) -> ChatPlugin:
    names: dict[str, MethodBrief] = {}
    for entry in entries:
        brief = method_brief(registry, entry)
        names |= dict.fromkeys((entry.task, brief.name, *registry.bare_names(entry)), brief)
    briefs = list({brief.name: brief for brief in names.values()}.values())
    return ChatPlugin(entry=plugin, methods=briefs, names=names)


def _serves(plugin: PluginEntry, adapter_key: str | None) -> bool:
    # As `NekroPlugin.serves`.
    return not plugin.adapters or not adapter_key or adapter_key in plugin.adapters
