"""Load the plugins that the settings name and list their methods, without a broker or a database."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from broker_config.settings import Settings

if TYPE_CHECKING:
    from workers.plugins.loader import LoadedPlugins
    from workers.plugins.registry import Registry

__all__ = ["Catalogue", "load_catalogue"]


@dataclass(frozen=True, kw_only=True)
class Catalogue:
    """The loaded plugins and the registry of their methods."""

    loaded: LoadedPlugins
    registry: Registry


def load_catalogue(settings: Settings) -> Catalogue:
    """Import the plugins that the settings name; their init methods do not run."""
    from workers.plugins.loader import load_plugins
    from workers.plugins.policies import package_policy
    from workers.plugins.registry import Registry

    plugins = settings.plugins
    loaded = load_plugins(
        plugins.dirs,
        disabled=plugins.disabled,
        shipped=plugins.load_shipped,
        data_dir=settings.data_dir,
        packages=package_policy(plugins),
    )
    return Catalogue(
        loaded=loaded, registry=Registry(loaded.plugins, long_methods=settings.workers.long_methods)
    )
