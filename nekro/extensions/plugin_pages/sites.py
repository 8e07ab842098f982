"""Finds the workers that serve the routes of a plugin."""

from __future__ import annotations

import random
import socket
import time
from http import HTTPStatus

from nekro.app.ops.host_header import is_loopback
from nekro.gateway.problems import ProblemError
from nekro_agent.durations import FRESH_SECONDS
from storage.engine import Database
from storage.publications import Site

__all__ = ["Sites"]


class Sites:
    """Addresses by plugin, read from the catalogue at most once per second."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._known: dict[str, tuple[float, list[Site]]] = {}

    async def of(self, plugin_key: str) -> list[Site]:
        """Return where a plugin is served, in random order; loopback addresses of this host only.

        Raises:
            ProblemError: 503, no worker serves it.
        """
        read_at, sites = self._known.get(plugin_key, (0.0, []))
        if not sites or time.monotonic() - read_at > FRESH_SECONDS:
            async with self._database.read() as transaction:
                sites = await transaction.catalogue.sites_of(plugin_key)
            self._known[plugin_key] = (time.monotonic(), sites)
        here = socket.gethostname()
        usable = [one for one in sites if one.host == here or not is_loopback(one.address.rpartition(":")[0])]
        if not usable:
            raise ProblemError(
                HTTPStatus.SERVICE_UNAVAILABLE, "no_worker", _why(sites), headers={"Retry-After": "2"}
            )
        return random.sample(usable, len(usable))

    def forget(self, plugin_key: str) -> None:
        """Read the addresses of a plugin again at the next request."""
        self._known.pop(plugin_key, None)


def _why(sites: list[Site]) -> str:
    if sites:
        hosts = ", ".join(sorted({one.host for one in sites}))
        return (
            f"the workers of {hosts} serve routes of plugins to their own host only; "
            "set NEKRO_WORKERS__HTTP_ADDRESS there"
        )
    return "no worker serves the routes of this plugin; lane `long` does, or the owner of a pinned plugin"
