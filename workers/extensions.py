"""What an extension brings to a worker."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from broker_config.settings import Settings
    from nekro.plugins.hooks import PluginHost
    from nekro.plugins.lanes import LaneChooser
    from nekro.plugins.loader import LoadedPlugins
    from storage.engine import Database
    from workers.plugins.initialisation import PluginStates
    from workers.plugins.loop_watchdog import LoopWatchdog

__all__ = ["ServicesOfWorker", "WorkerPart"]


class ServicesOfWorker(Protocol):
    """What extensions use of ``workers.services.WorkerServices``."""

    settings: Settings
    #: The worker's lane.
    role: str
    database: Database
    loaded: LoadedPlugins
    host: PluginHost
    lanes: LaneChooser
    states: PluginStates
    watchdog: LoopWatchdog | None

    @property
    def signing_key(self) -> str: ...

    def may_run_here(self, key: str) -> bool: ...

    def plugins_changed(self) -> None: ...


class WorkerPart:
    """The part of an extension that a worker loads, built with its services; each method may be left out."""

    def __init__(self, services: ServicesOfWorker) -> None:
        """Build what needs no event loop; of the services, those for plugins exist already."""

    async def add_plugins(self) -> None:
        """Add plugins to those that were imported, before any of them is started.

        Raises:
            StorageUnavailableError: the database does not answer.
        """

    async def start(self) -> None:
        """Begin; the plugins have started, and nothing is published yet."""

    async def close(self) -> None:
        """End, also after a partial start; the plugins have not ended yet."""

    @property
    def hooks(self) -> Mapping[str, Callable[[str], Awaitable[Any]]]:
        """What other processes may ask of the worker of a plugin, by name; each takes the plugin's key."""
        return {}

    @property
    def sites(self) -> Mapping[str, str]:
        """Where this worker serves the HTTP routes of plugins, by their keys."""
        return {}
