"""Whether a request may reach a plugin, as the operator decided per plugin."""

from __future__ import annotations

from http import HTTPStatus

from fastapi import Request

from broker_config.settings import GatewaySettings, PluginAccess
from nekro.gateway.dependencies import identity_of
from nekro.gateway.identity import Identity, Scope
from nekro.gateway.problems import ProblemError
from nekro.plugins.entries import PluginEntry

__all__ = ["admit", "is_reachable", "not_served"]


def is_reachable(settings: GatewaySettings, plugin: PluginEntry) -> bool:
    """Whether requests may reach a plugin at all: it is enabled and not closed."""
    return plugin.enabled and settings.access_to(plugin.key) is not PluginAccess.CLOSED


async def admit(request: Request, access: PluginAccess) -> Identity | None:
    """Return whose request it is if it may reach a plugin with this access; None: unknown.

    Raises:
        ProblemError: 401 or 403, it needs a key with the scope ``call``; 404, the plugin is closed; 429, too
            many requests.
    """
    if access is PluginAccess.CLOSED:
        raise not_served(request.url.path)
    try:
        identity = await identity_of(request)
        identity.require(Scope.CALL)
    except ProblemError as exc:
        if access is PluginAccess.KEY or exc.status == HTTPStatus.TOO_MANY_REQUESTS:
            raise
        return None
    return identity


def not_served(path: str) -> ProblemError:
    """Return the same error for a plugin that does not exist, is disabled or is closed."""
    return ProblemError(
        HTTPStatus.NOT_FOUND,
        "not_found",
        f"nothing is served at {path}; an operator opens a plugin with NEKRO_GATEWAY__PLUGIN_HTTP",
    )
