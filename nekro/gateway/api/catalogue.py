"""Methods and plugins: what the workers serve, configuration, enabling and disabling."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from nekro.app.services import Services
from nekro.gateway.dependencies import IdentityDep, PathText, ServicesDep, record_act
from nekro.gateway.idempotency import OnceDep
from nekro.gateway.views import method_answer, plugin_answer
from nekro.gateway.web.bodies import KeyedRoute
from nekro.operations.actor import Identity, RefusedError, Scope
from nekro_agent.errors import NotFoundError
from nekro_client.models import Method, Page, Plugin, PluginConfig, PluginConfigBody, PluginState
from storage.caller_reads import lane_overrides

__all__ = ["router"]

router = APIRouter(route_class=KeyedRoute, tags=["catalogue"])


@router.get("/methods")
async def list_methods(
    services: ServicesDep,
    identity: IdentityDep,
    text: Annotated[str, Query(max_length=500, description="only methods whose full name contains it")] = "",
) -> Page[Method]:
    """List the methods that may be called, all on one page."""
    _require_any(identity, Scope.CALL, Scope.RUN, Scope.ADMIN)
    await services.refresh()
    entries = [entry for entry in services.registry.enabled() if text in entry.task]
    async with services.database.read() as transaction:
        overrides = await lane_overrides(transaction.connection)
    return Page(
        items=[
            method_answer(entry, lane=services.dispatcher.lane_of(entry), overrides=overrides)
            for entry in entries
        ]
    )


@router.get("/plugins")
async def list_plugins(services: ServicesDep, identity: IdentityDep) -> Page[Plugin]:
    """List the plugins that the workers serve, all on one page."""
    _require_any(identity, Scope.CALL, Scope.RUN, Scope.ADMIN)
    catalogue = await services.read_catalogue()
    return Page(
        items=[plugin_answer(entry, catalogue.versions.get(entry.key, ())) for entry in catalogue.plugins]
    )


@router.get("/plugins/{plugin_key}/config")
async def get_plugin_config(
    plugin_key: PathText, services: ServicesDep, identity: IdentityDep
) -> PluginConfig:
    """Show a plugin's configuration, its JSON schema, and which secrets are set, but no secret."""
    identity.require_all(Scope.ADMIN)
    await _require_plugin(services, plugin_key)
    return PluginConfig.model_validate(await services.fleet_hooks.config(plugin_key, None))


@router.patch("/plugins/{plugin_key}/config")
async def change_plugin_config(
    plugin_key: PathText,
    body: PluginConfigBody,
    request: Request,
    services: ServicesDep,
    identity: IdentityDep,
) -> PluginConfig:
    """Replace fields of a plugin's configuration; every worker uses them from its next call on."""
    identity.require_all(Scope.ADMIN)
    await _require_plugin(services, plugin_key)
    async with services.database.begin() as transaction:
        names = {"fields": sorted(body.values)}
        await record_act(transaction.audit, request, identity, "plugin.configure", plugin_key, names)
    return PluginConfig.model_validate(await services.fleet_hooks.config(plugin_key, body.values))


@router.post("/plugins/{plugin_key}/enable", response_model=PluginState)
async def enable_plugin(
    plugin_key: PathText, request: Request, services: ServicesDep, identity: IdentityDep, once: OnceDep
) -> Response:
    """Enable a plugin on all workers, within a second."""
    return await once.respond(lambda: _decide(plugin_key, request, services, identity, is_enabled=True))


@router.post("/plugins/{plugin_key}/disable", response_model=PluginState)
async def disable_plugin(
    plugin_key: PathText, request: Request, services: ServicesDep, identity: IdentityDep, once: OnceDep
) -> Response:
    """Disable a plugin on all workers, within a second, also on those that start later."""
    return await once.respond(lambda: _decide(plugin_key, request, services, identity, is_enabled=False))


async def _decide(
    plugin_key: str, request: Request, services: Services, identity: Identity, *, is_enabled: bool
) -> PluginState:
    identity.require_all(Scope.ADMIN)
    await _require_plugin(services, plugin_key)
    if is_enabled and plugin_key in services.settings.plugins.disabled:
        raise RefusedError(
            HTTPStatus.CONFLICT,
            "plugin_disabled_by_settings",
            f"NEKRO_PLUGINS__DISABLED names {plugin_key}; remove it there",
        )
    async with services.database.begin() as transaction:
        changed = await transaction.plugin_states.set(plugin_key, is_enabled=is_enabled)
        action = "plugin.enable" if is_enabled else "plugin.disable"
        await record_act(transaction.audit, request, identity, action, plugin_key)
    return PluginState(key=plugin_key, is_enabled=is_enabled, is_changed=changed)


def _require_any(identity: Identity, *scopes: Scope) -> None:
    if not identity.scopes & set(scopes):
        identity.require(scopes[0])


async def _require_plugin(services: Services, plugin_key: str) -> None:
    catalogue = await services.read_catalogue()
    if plugin_key not in {plugin.key for plugin in catalogue.plugins}:
        raise NotFoundError(f"there is no plugin {plugin_key!r}")
