"""Choosing the driver that the settings ask for, or refusing with every reason."""

from __future__ import annotations

from broker_config.settings import SandboxSettings
from nekro_agent.errors import SandboxUnavailableError
from sandbox.drivers.base import SandboxDriver
from sandbox.drivers.bwrap import BwrapDriver
from sandbox.probe import probe

__all__ = ["choose_driver"]


async def choose_driver(settings: SandboxSettings) -> SandboxDriver:
    """Return the driver that the settings ask for, proven by a sandbox that it really ran.

    ``auto`` means bubblewrap and nothing else: a service that cannot isolate code refuses to
    run it instead of isolating it less.

    Raises:
        SandboxUnavailableError: it does not work here; every reason with its mend.
    """
    driver = BwrapDriver(settings)
    capability = await probe(driver, settings)
    if not capability.ok:
        raise SandboxUnavailableError("; ".join(capability.reasons))
    return driver
