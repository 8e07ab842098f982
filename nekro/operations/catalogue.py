"""Methods, commands and plugins: what workers serve, lanes, configuration, and what is enabled or awake."""

from __future__ import annotations

from collections.abc import Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING, Annotated

from nekro.app.catalogue import ServedVersion, command_names, listed_commands
from nekro.operations.actor import Actor, Identity, RefusedError, Scope
from nekro.operations.pages import Param
from nekro.plugins.entries import MethodEntry, PluginEntry
from nekro_agent.errors import NotFoundError, StorageError, UsageError
from nekro_agent.methods import Lane
from nekro_client.models import (
    CatalogueState,
    ChatPlugin,
    ChatPluginBody,
    ChatPluginState,
    Command,
    LaneBody,
    LaneState,
    Method,
    Page,
    Plugin,
    PluginConfig,
    PluginConfigBody,
    PluginState,
    PluginVersion,
)

if TYPE_CHECKING:
    from nekro.app.services import Services
    from storage.caller_reads import LaneOverride

__all__ = [
    "change_plugin_config",
    "delete_lane",
    "disable_plugin",
    "enable_plugin",
    "get_catalogue",
    "get_plugin_config",
    "list_chat_plugins",
    "list_commands",
    "list_methods",
    "list_plugins",
    "put_chat_plugin",
    "put_lane",
]


async def get_catalogue(actor: Actor) -> CatalogueState:
    """Say of what the lists of methods, commands and plugins are, and what is wrong with them."""
    _require_any(actor.identity, Scope.CALL, Scope.RUN, Scope.ADMIN)
    catalogue = await actor.services.read_catalogue()
    registry = actor.services.registry
    return CatalogueState(
        is_live=catalogue.is_live,
        note="" if catalogue.is_live else f"no worker is running; {catalogue.note}",
        warnings=[*catalogue.warnings, *catalogue.differences()],
        name_warnings=[*registry.warnings, *command_names(registry).warnings],
    )


async def list_methods(
    actor: Actor,
    text: Annotated[str, Param(max_length=500, description="only methods whose full name contains it")] = "",
) -> Page[Method]:
    """List the methods that may be called, all on one page."""
    _require_any(actor.identity, Scope.CALL, Scope.RUN, Scope.ADMIN)
    services = actor.services
    await services.refresh()
    overrides = services.lane_overrides.current
    return Page(
        items=[
            _method_answer(
                entry,
                lane=services.lanes.lane_of(entry),
                override=overrides.get(entry.plugin_key) or overrides.get(entry.task),
            )
            for entry in services.registry.enabled()
            if text in entry.task
        ]
    )


async def list_commands(actor: Actor) -> Page[Command]:
    """List the commands of the plugins, all on one page."""
    actor.identity.require(Scope.CALL)
    await actor.services.refresh()
    return Page(
        items=[
            Command(
                name=entry.name,
                full_name=entry.full_name,
                aliases=list(entry.aliases),
                permission=entry.permission,
                usage=entry.usage,
                description=entry.description,
            )
            for entry in listed_commands(actor.services.registry)
        ]
    )


async def put_lane(actor: Actor, name: str, body: LaneBody) -> LaneState:
    """Set the lane of a method, or pin a plugin; running workers apply it within a second.

    `name` is that of a method, or the key of a plugin for the lane `pinned`.
    """
    actor.identity.require_all(Scope.ADMIN)
    services = actor.services
    await services.read_catalogue()
    if body.lane != Lane.PINNED.value:
        name = services.registry.find(name).task
    elif name not in _keys(services):
        known = ", ".join(plugin.key for plugin in services.registry.plugins)
        raise UsageError(
            f"only whole plugins can be pinned, and {name!r} is not a plugin; choose one of {known}"
        )
    async with services.database.begin() as transaction:
        await transaction.lane_overrides.set_by_operator(
            name, lane=Lane(body.lane), reason="pinned by an operator"
        )
        await actor.record(transaction, "lane.set", name, {"lane": body.lane})
    await services.lane_overrides.refresh(at_once=True)
    return LaneState(name=name, lane=body.lane, is_changed=True)


async def delete_lane(actor: Actor, name: str) -> LaneState:
    """Return a method, or a plugin, to the lane of its code, also if the watchdog has moved it."""
    actor.identity.require_all(Scope.ADMIN)
    services = actor.services
    await services.read_catalogue()
    if name not in _keys(services):
        name = services.registry.find(name).task
    async with services.database.begin() as transaction:
        is_changed = await transaction.lane_overrides.clear(name)
        await actor.record(transaction, "lane.clear", name)
    await services.lane_overrides.refresh(at_once=True)
    return LaneState(name=name, is_changed=is_changed)


async def list_plugins(actor: Actor) -> Page[Plugin]:
    """List the plugins that the workers serve, all on one page."""
    _require_any(actor.identity, Scope.CALL, Scope.RUN, Scope.ADMIN)
    catalogue = await actor.services.read_catalogue()
    # Live workers say it themselves.
    disabled = set() if catalogue.is_live else await _disabled(actor.services)
    return Page(
        items=[
            _plugin_answer(
                entry,
                catalogue.versions.get(entry.key, ()),
                is_disabled=entry.key in disabled,
                shows_path=actor.identity.key_id is None,
            )
            for entry in catalogue.plugins
        ]
    )


async def list_chat_plugins(actor: Actor, chat_key: str) -> Page[ChatPlugin]:
    """List the plugins that may sleep, all on one page, as they are in the chat's next turn."""
    from nekro.app.rounds.sleeping_plugins import awake_plugins, brief_of

    actor.identity.require(Scope.READ, chat_key=chat_key)
    sleepers = await _sleepers(actor.services)
    async with actor.services.database.read() as transaction:
        newest = await transaction.activations.newest_round(chat_key)
        awake = await awake_plugins(transaction, chat_key, first_round=newest + 1)
    return Page(
        items=[
            ChatPlugin(
                key=plugin.key,
                name=plugin.name,
                is_awake=plugin.key in awake,
                turns_left=awake.get(plugin.key),
                brief=brief_of(plugin),
            )
            for plugin in sleepers
        ]
    )


async def put_chat_plugin(
    actor: Actor, chat_key: str, plugin_key: str, body: ChatPluginBody
) -> ChatPluginState:
    """Wake a plugin in a chat from its next turn on, for at most 20 turns or without a limit.

    Or let it sleep. This replaces what the agent has decided.
    """
    from nekro.app.rounds.sleeping_plugins import MOST_TURNS, sleep, wake
    from nekro.operations.chats import require_chat

    actor.identity.require(Scope.ADMIN, chat_key=chat_key)
    if body.turns is not None and not (body.is_awake and body.turns <= MOST_TURNS):
        raise UsageError(
            f"turns {body.turns} must be from 1 to {MOST_TURNS}, and only of a plugin that wakes"
        )
    services = actor.services
    sleepers = await _sleepers(services)
    await _require_plugin(actor, plugin_key)
    if plugin_key not in {plugin.key for plugin in sleepers}:
        raise UsageError(
            f"{plugin_key} is always awake: it declares no sleep, or NEKRO_PLUGINS__KEEP_AWAKE names it"
        )
    async with services.database.begin() as transaction:
        await require_chat(transaction, chat_key)
        is_changed = await sleep(transaction, chat_key, plugin_key) or body.is_awake
        if body.is_awake:
            await wake(transaction, chat_key, plugin_key, turns=body.turns)
        action = "plugin.wake" if body.is_awake else "plugin.sleep"
        await actor.record(transaction, action, plugin_key, {"chat_key": chat_key, "turns": body.turns})
    return ChatPluginState(key=plugin_key, is_awake=body.is_awake, is_changed=is_changed)


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
    await actor.services.read_catalogue()
    if plugin_key not in _keys(actor.services):
        raise NotFoundError(f"there is no plugin {plugin_key!r}")


def _keys(services: Services) -> set[str]:
    return {plugin.key for plugin in services.registry.plugins}


async def _sleepers(services: Services) -> list[PluginEntry]:
    from nekro.app.rounds.sleeping_plugins import may_sleep

    catalogue = await services.read_catalogue()
    keep_awake = services.settings.plugins.keep_awake
    return [plugin for plugin in catalogue.plugins if may_sleep(plugin, keep_awake=keep_awake)]


async def _disabled(services: Services) -> set[str]:
    """Return the plugins that an operator disabled; none where there is no database yet."""
    try:
        async with services.database.read() as transaction:
            return {
                state.plugin_key for state in await transaction.plugin_states.all() if not state.is_enabled
            }
    except StorageError:
        return set()


def _method_answer(entry: MethodEntry, *, lane: str, override: LaneOverride | None) -> Method:
    """Return a method of the catalogue, with the lane that runs it now."""
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


def _plugin_answer(
    entry: PluginEntry, versions: Sequence[ServedVersion], *, is_disabled: bool, shows_path: bool
) -> Plugin:
    """Return a plugin of the catalogue.

    Args:
        versions: what workers serve of it, the one that callers see first.
        is_disabled: whether an operator disabled it since they served it.
        shows_path: whether the caller may know where it is on its hosts.
    """
    return Plugin(
        is_enabled=entry.enabled and not is_disabled,
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
        status="disabled" if is_disabled else entry.status.value,
        path=entry.path if shows_path else None,
        name=entry.name,
        description=entry.description,
        version=entry.version,
        author=entry.author,
        error=entry.error,
        placeholders=list(entry.placeholders),
        files=entry.files or None,
        files_reason=entry.files_reason or None,
    )
