"""Methods and plugins: what the workers serve, configuration, enabling and disabling."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Annotated

from nekro.app.catalogue import ServedVersion
from nekro.operations.actor import Actor, Identity, RefusedError, Scope
from nekro.operations.pages import Param
from nekro.plugins.entries import MethodEntry, PluginEntry
from nekro_agent.errors import NotFoundError
from nekro_client.models import (
    Method,
    Page,
    Plugin,
    PluginConfig,
    PluginConfigBody,
    PluginState,
    PluginVersion,
)
from storage.caller_reads import LaneOverride, lane_overrides

__all__ = [
    "change_plugin_config",
    "disable_plugin",
    "enable_plugin",
    "get_plugin_config",
    "list_methods",
    "list_plugins",
    "method_answer",
    "plugin_answer",
]


async def list_methods(
    actor: Actor,
    text: Annotated[str, Param(max_length=500, description="only methods whose full name contains it")] = "",
) -> Page[Method]:
    """List the methods that may be called, all on one page."""
    _require_any(actor.identity, Scope.CALL, Scope.RUN, Scope.ADMIN)
    await actor.services.refresh()
    entries = [entry for entry in actor.services.registry.enabled() if text in entry.task]
    async with actor.services.database.read() as transaction:
        overrides = await lane_overrides(transaction.connection)
    return Page(
        items=[
            method_answer(entry, lane=actor.services.dispatcher.lane_of(entry), overrides=overrides)
            for entry in entries
        ]
    )


async def list_plugins(actor: Actor) -> Page[Plugin]:
    """List the plugins that the workers serve, all on one page."""
    _require_any(actor.identity, Scope.CALL, Scope.RUN, Scope.ADMIN)
    catalogue = await actor.services.read_catalogue()
    return Page(
        items=[plugin_answer(entry, catalogue.versions.get(entry.key, ())) for entry in catalogue.plugins]
    )


async def get_plugin_config(actor: Actor, plugin_key: str) -> PluginConfig:
    """Show a plugin's configuration, its JSON schema, and which secrets are set, but no secret."""
    actor.identity.require_all(Scope.ADMIN)
    await _require_plugin(actor, plugin_key)
    return PluginConfig.model_validate(await actor.services.fleet_hooks.config(plugin_key, None))


async def change_plugin_config(actor: Actor, plugin_key: str, body: PluginConfigBody) -> PluginConfig:
    """Replace fields of a plugin's configuration; every worker uses them from its next call on."""
    actor.identity.require_all(Scope.ADMIN)
    await _require_plugin(actor, plugin_key)
    async with actor.services.database.begin() as transaction:
        names = {"fields": sorted(body.values)}
        await actor.record(transaction, "plugin.configure", plugin_key, names)
    return PluginConfig.model_validate(await actor.services.fleet_hooks.config(plugin_key, body.values))


async def enable_plugin(actor: Actor, plugin_key: str) -> PluginState:
    """Enable a plugin on all workers, within a second."""
    return await _decide(actor, plugin_key, is_enabled=True)


async def disable_plugin(actor: Actor, plugin_key: str) -> PluginState:
    """Disable a plugin on all workers, within a second, also on those that start later."""
    return await _decide(actor, plugin_key, is_enabled=False)


async def _decide(actor: Actor, plugin_key: str, *, is_enabled: bool) -> PluginState:
    actor.identity.require_all(Scope.ADMIN)

    async def work() -> PluginState:
        await _require_plugin(actor, plugin_key)
        if is_enabled and plugin_key in actor.services.settings.plugins.disabled:
            raise RefusedError(
                HTTPStatus.CONFLICT,
                "plugin_disabled_by_settings",
                f"NEKRO_PLUGINS__DISABLED names {plugin_key}; remove it there",
            )
        async with actor.services.database.begin() as transaction:
            changed = await transaction.plugin_states.set(plugin_key, is_enabled=is_enabled)
            action = "plugin.enable" if is_enabled else "plugin.disable"
            await actor.record(transaction, action, plugin_key)
        return PluginState(key=plugin_key, is_enabled=is_enabled, is_changed=changed)

    return await actor.once.run(PluginState, work)


def _require_any(identity: Identity, *scopes: Scope) -> None:
    if not identity.scopes & set(scopes):
        identity.require(scopes[0])


async def _require_plugin(actor: Actor, plugin_key: str) -> None:
    catalogue = await actor.services.read_catalogue()
    if plugin_key not in {plugin.key for plugin in catalogue.plugins}:
        raise NotFoundError(f"there is no plugin {plugin_key!r}")


def method_answer(entry: MethodEntry, *, lane: str, overrides: Mapping[str, LaneOverride]) -> Method:
    """Return a method of the catalogue, with the lane that runs it now.

    Args:
        overrides: by task, or by key of the plugin.
    """
    override = overrides.get(entry.plugin_key) or overrides.get(entry.task)
    return Method(
        name=entry.name,
        task=entry.task,
        plugin=entry.plugin_key,
        type=entry.type.value,
        lane=lane,
        lane_reason=None if override is None else str(override),
        signature=entry.signature,
        doc=entry.doc,
        requires_approval=entry.requires_approval,
    )


def plugin_answer(entry: PluginEntry, versions: Sequence[ServedVersion]) -> Plugin:
    """Return a plugin of the catalogue; where it is on its hosts is not shown.

    Args:
        versions: what workers serve of it, the one that callers see first.
    """
    return Plugin(
        is_enabled=entry.enabled,
        versions=[
            PluginVersion(
                version=one.entry.version,
                status=one.entry.status.value,
                error=one.entry.error,
                digest=one.entry.digest,
                methods=len(one.entry.methods),
                published_at=one.published_at,
                workers=list(one.workers),
            )
            for one in versions
        ],
        key=entry.key,
        status=entry.status.value,
        name=entry.name,
        description=entry.description,
        version=entry.version,
        author=entry.author,
        error=entry.error,
        placeholders=list(entry.placeholders),
    )
