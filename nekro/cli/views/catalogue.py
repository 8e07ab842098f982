"""What `nekro plugins`, `nekro methods` and others list: what the workers serve, or would serve on this host.

A command imports no plugin itself. Without a live worker it lists the last published catalogue if a broker
is set, because the fleet's plugins are on other hosts. Without a broker the workers would be those that
commands start here, so a child process imports the plugins of the settings, as such a worker would.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
from typing import TYPE_CHECKING

from broker_config.settings import Settings
from nekro.app.catalogue import CatalogueReader, FleetCatalogue, LaneOverrides
from nekro.base.shared_property import shared_property
from nekro.cli.environment import environment_of
from nekro.cli.local_api import LocalServices
from nekro.cli.output import Output
from nekro.plugins.entries import PluginEntry
from nekro.plugins.entry_registry import Registry
from nekro.plugins.lanes import LaneChooser
from nekro_agent.durations import PROGRAM_SECONDS
from nekro_agent.errors import ServiceError, StorageError, StorageUnavailableError
from nekro_agent.execution.tied_process import tied_to_this_process
from storage.driver.urls import exists
from storage.engine import Database

if TYPE_CHECKING:
    from nekro_client import AsyncClient

__all__ = ["CatalogueServices", "published", "read_catalogue", "say_what_is_listed"]


async def read_catalogue(settings: Settings) -> FleetCatalogue:
    """Return what the fleet serves, or what workers of this host would serve; see this module.

    Raises:
        ServiceError: the process that imports the plugins ended without an answer.
    """
    async with CatalogueServices(settings) as services:
        return await services.read_catalogue()


async def published(settings: Settings) -> FleetCatalogue:
    """Return the catalogue of the database; nothing when there is no database yet, or it does not answer."""
    async with CatalogueServices(settings) as services:
        return await services.published()


class CatalogueServices(LocalServices):
    """The services of operations on methods, commands and plugins, in a process that does not call any."""

    def __init__(self, settings: Settings, *, of_this_host: bool = False) -> None:
        """Open nothing.

        Args:
            of_this_host: import the plugins that the settings name, even if workers are live.
        """
        super().__init__(settings)
        self.registry = Registry()
        self.lanes = LaneChooser()
        self._of_this_host = of_this_host
        self._catalogue: FleetCatalogue | None = None

    @shared_property
    def database(self) -> Database:
        """The database.

        Raises:
            StorageUnavailableError: there is none yet; connecting would create an empty one.
        """
        if not self._has_database:
            raise StorageUnavailableError("there is no database yet; run `nekro db upgrade`")
        return Database(self.settings.database, self.settings.data_dir)

    @shared_property
    def lane_overrides(self) -> LaneOverrides:
        """The lane overrides; none where there is no database."""
        settings = self.settings
        unopened = Database(settings.database, settings.data_dir)
        database = self.database if self._has_database else unopened
        return LaneOverrides(database, self.lanes, on_pinned=lambda keys: None)

    async def refresh(self) -> None:
        """Read the catalogue and the lane overrides."""
        await self.read_catalogue()
        if self._has_database:
            await self.lane_overrides.refresh()

    @property
    def _has_database(self) -> bool:
        return exists(self.settings.database, self.settings.data_dir)

    async def read_catalogue(self) -> FleetCatalogue:
        """Return the catalogue, which is read once.

        Raises:
            ServiceError: as ``read_catalogue`` of this module.
        """
        if self._catalogue is None:
            self._catalogue = await self._read()
            self.registry.replace(self._catalogue.plugins)
            declared = {plugin.key for plugin in self._catalogue.plugins if plugin.pinned}
            self.lanes.declare({*declared, *self.settings.workers.pinned_plugins})
        return self._catalogue

    async def published(self) -> FleetCatalogue:
        """Return the catalogue of the database; nothing if it does not answer."""
        with contextlib.suppress(StorageError):
            return await CatalogueReader(self.database).read()
        return FleetCatalogue(versions={})

    async def look_for(self, plugin_key: str) -> None:
        """Add the plugins of this host to the registry if it lacks one that no worker may have published."""
        known = (await self.read_catalogue()).plugins
        if plugin_key not in {plugin.key for plugin in known}:
            self.registry.replace([*known, *(await _of_this_host(self.settings)).plugins])

    async def _read(self) -> FleetCatalogue:
        if not self._of_this_host:
            fleet = await self.published()
            if fleet.is_live or self.settings.broker.url is not None:
                return fleet
        return await _of_this_host(self.settings)


async def _of_this_host(settings: Settings) -> FleetCatalogue:
    # `-P`: a folder of our packages' names in the working directory must not be imported.
    process = await asyncio.create_subprocess_exec(
        *tied_to_this_process(sys.executable, "-P", "-m", "nekro.plugins.description"),
        env=environment_of(settings),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        out, err = await asyncio.wait_for(process.communicate(), 10 * PROGRAM_SECONDS)
        answer = json.loads(out) if process.returncode == 0 else None
    except (TimeoutError, ValueError) as exc:
        raise ServiceError(f"importing the plugins gave no answer: {exc or 'it takes too long'}") from exc
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if answer is None:
        last = err.decode("utf-8", "replace").strip().rpartition("\n")[2]
        raise ServiceError(f"importing the plugins ended with exit code {process.returncode}: {last}")
    return FleetCatalogue(
        plugins=tuple(PluginEntry.from_json(text) for text in answer["plugins"]),
        versions={},
        warnings=tuple(answer["warnings"]),
        note="these are the plugins that workers of this host would load",
    )


async def say_what_is_listed(api: AsyncClient, output: Output, *, names: bool = False) -> None:
    """Print to stderr where a list comes from if no worker is live, and what is wrong with it.

    Args:
        names: also which names of methods and commands do not mean what their plugin intends.
    """
    state = await api.catalogue()
    if state.note:
        output.words(state.note)
    for warning in (*state.warnings, *(state.name_warnings if names else ())):
        output.words(f"warning: {warning}")
