"""What an extension brings, and the extensions of this installation.

An extension is a package below ``nekro.extensions`` whose ``EXTENSION`` names its parts as ``module:NAME``. A
part is imported where a process needs it: workers and commands import no routes. Nothing besides
extensions imports one, so each can be left out: by ``NEKRO_EXTENSIONS``, or by not installing its package.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nekro.base.release import extension, extension_names, imported

if TYPE_CHECKING:
    from broker_config.settings import Settings

__all__ = ["Extension", "ExtensionCommand", "adapters", "imported", "installed", "loaded"]


@dataclass(frozen=True, kw_only=True)
class ExtensionCommand:
    """A command of ``nekro`` that an extension brings; its module is imported when it is used."""

    name: str
    summary: str
    #: The command behind which lists show it.
    after: str
    #: Its module, as ``nekro.cli.command.CommandModule`` describes it.
    module: str


@dataclass(frozen=True, kw_only=True)
class Extension:
    """The parts of one extension."""

    #: That of its package, which ``NEKRO_EXTENSIONS`` names.
    name: str
    #: Its subclass of ``broker_config.limits.SettingGroup``, with a default for each value: the variables
    #: ``NEKRO_<NAME>__…``, which ``Settings.of_extension`` returns. None: it has none of its own.
    settings: str | None = None
    #: Keys of the adapters whose chats it serves: what the agent sends there is queued for their clients.
    adapters: tuple[str, ...] = ()
    #: Its ``nekro.gateway.extensions.GatewayPart``; None: it has no routes.
    gateway: str | None = None
    #: Each a ``LineReader`` that reads people's messages before the agent does; it is made with the database.
    readers: tuple[str, ...] = ()
    #: Its subclass of ``workers.extensions.WorkerPart``; None: it runs nothing in workers.
    worker: str | None = None
    commands: tuple[ExtensionCommand, ...] = ()
    #: What `nekro doctor` checks of it: a coroutine function from settings to a list of its checks.
    checks: str | None = None


def installed() -> Iterator[Extension]:
    """Yield the extensions of this installation, in the order of their names."""
    for name in extension_names():
        yield extension(name)


def loaded(settings: Settings) -> tuple[Extension, ...]:
    """Return the extensions that processes with these settings load."""
    return tuple(one for one in installed() if settings.loads_extension(one.name))


def adapters(settings: Settings) -> frozenset[str]:
    """Return the keys of the adapters that the loaded extensions serve."""
    return frozenset(key for one in loaded(settings) for key in one.adapters)
