"""What `nekro plugins`, `nekro methods` and others list: what the workers serve, or would serve on this host.

A command imports no plugin itself. Without a live worker it lists the last published catalogue if a broker
is set, because the fleet's plugins are on other hosts. Without a broker the workers would be those that
commands start here, so a child process imports the plugins of the settings, as such a worker would.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from broker_config.settings import Settings
from nekro.app.catalogue import command_names
from nekro.cli.environment import environment_of
from nekro.cli.output import Output
from nekro.plugins.entries import PluginEntry
from nekro.plugins.entry_registry import Registry
from nekro_agent.durations import PROGRAM_SECONDS
from nekro_agent.errors import ServiceError, StorageError
from nekro_agent.execution.tied_process import tied_to_this_process
from storage.driver.urls import exists

if TYPE_CHECKING:
    from nekro.app.catalogue import FleetCatalogue

__all__ = ["Catalogue", "load_catalogue", "published", "say_what_is_listed", "say_which_names_clash"]

_NONE_LIVE = "no worker is running; "


@dataclass(frozen=True, kw_only=True)
class Catalogue:
    """Plugins with their methods and commands, and where they were read."""

    registry: Registry
    #: Plugins that differ between workers, or that some workers failed to load; one line per plugin.
    differences: Sequence[str] = ()
    #: Settings without effect.
    loading_warnings: Sequence[str] = ()
    #: What the list shows if no worker is live; "" otherwise.
    note: str = ""
    #: Whether workers publish it at present.
    is_live: bool = False

    @property
    def plugins(self) -> Sequence[PluginEntry]:
        """Every plugin and every failure, in loading order."""
        return self.registry.plugins


def load_catalogue(settings: Settings, *, of_this_host: bool = False) -> Catalogue:
    """Return what the fleet serves, or what workers of this host would serve; see this module.

    Args:
        of_this_host: import the plugins that the settings name, even if workers are live.

    Raises:
        ServiceError: the process that imports the plugins ended without an answer.
    """
    fleet = None if of_this_host else asyncio.run(published(settings))
    if fleet is not None and (fleet.is_live or (settings.broker.url is not None and fleet.plugins)):
        registry = Registry(fleet.plugins)
        note = "" if fleet.is_live else f"{_NONE_LIVE}this is what the last ones served"
        return Catalogue(registry=registry, differences=fleet.differences(), note=note, is_live=fleet.is_live)
    if settings.broker.url is not None and not of_this_host:
        note = "start `nekro worker --lane methods`; `nekro plugins --load` lists the plugins of this host"
        note = f"{_NONE_LIVE}{note}"
        return Catalogue(registry=Registry(), note=note)
    note = "" if of_this_host else f"{_NONE_LIVE}these are the plugins that workers of this host would load"
    return _of_this_host(settings, note=note)


async def published(settings: Settings) -> FleetCatalogue | None:
    """Return the catalogue of the database; None when there is no database yet, or it does not answer."""
    from nekro.app.catalogue import CatalogueReader
    from storage.engine import Database

    if not exists(settings.database, settings.data_dir):
        return None
    try:
        async with Database(settings.database, settings.data_dir) as database:
            return await CatalogueReader(database).read()
    except StorageError:
        return None


def _of_this_host(settings: Settings, *, note: str) -> Catalogue:
    # `-P`: a folder of our packages' names in the working directory must not be imported.
    command = tied_to_this_process(sys.executable, "-P", "-m", "nekro.plugins.description")
    try:
        done = subprocess.run(  # noqa: S603 - our own module
            command,
            env=environment_of(settings),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=True,
            timeout=10 * PROGRAM_SECONDS,
            start_new_session=True,
        )
        answer = json.loads(done.stdout)
    except subprocess.CalledProcessError as exc:
        last = exc.stderr.decode("utf-8", "replace").strip().rpartition("\n")[2]
        raise ServiceError(f"importing the plugins ended with exit code {exc.returncode}: {last}") from exc
    except (subprocess.TimeoutExpired, ValueError) as exc:
        raise ServiceError(f"importing the plugins gave no answer: {exc}") from exc
    registry = Registry(PluginEntry.from_json(text) for text in answer["plugins"])
    return Catalogue(registry=registry, loading_warnings=answer["warnings"], note=note)


def say_what_is_listed(catalogue: Catalogue, output: Output) -> None:
    """Print to stderr where the list comes from if no worker is live, and what is wrong with it."""
    if catalogue.note:
        output.words(catalogue.note)
    for warning in (*catalogue.loading_warnings, *catalogue.differences):
        output.words(f"warning: {warning}")


def say_which_names_clash(catalogue: Catalogue, output: Output) -> None:
    """Print to stderr which names of methods and commands do not mean what their plugin intends."""
    for warning in (*catalogue.registry.warnings, *command_names(catalogue.registry).warnings):
        output.words(f"warning: {warning}")
